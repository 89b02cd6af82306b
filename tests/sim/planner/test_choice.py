"""What a choice fixes, and which plans agree with it."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import PlanError
from sim.plan import HarmonyPlan, PagedPlan, Policy, Reduce, Residency, UpdateOn
from sim.planner.choice import PlanChoice

HARMONY = HarmonyPlan(
    policy=Policy.HARMONY_DP, minibatch=8, gpus=2, u_fwd=2, u_bwd=1, packs_fwd=((0, 1),), packs_bwd=((0, 1), (2, 3))
)
PAGED = PagedPlan(policy=Policy.DP_SWAP, minibatch=8, gpus=2, u_fwd=1, u_bwd=1)


@pytest.mark.parametrize(
    ("fields", "harmony", "paged"),
    [
        ({}, True, True),
        ({"u_fwd": 2}, True, False),
        ({"u_bwd": 1}, True, True),
        ({"packs_bwd": 2}, True, True),
        ({"packs_bwd": 3}, False, True),
        ({"packs_bwd": ((0, 1), (2, 3))}, True, True),
        ({"packs_bwd": ((0, 2), (3, 3))}, False, True),
        ({"packs_fwd": 1, "update": UpdateOn.CPU}, True, True),
        ({"update": UpdateOn.GPU}, False, True),
        ({"prefetch": False}, False, True),
        ({"slots": 4}, False, True),
        ({"residency": Residency.LRU}, True, True),
        ({"residency": Residency.NONE}, True, False),
        ({"recompute": True, "prefetch_depth": 0}, True, True),
        ({"recompute": False}, True, False),
        ({"prefetch_depth": 1}, True, False),
    ],
)
def test_a_plan_agrees_with_all_that_is_fixed_and_that_it_has(
    fields: dict[str, Any], harmony: bool, paged: bool
) -> None:
    choice = PlanChoice(**fields)
    assert choice.admits(HARMONY) is harmony
    assert choice.admits(PAGED) is paged


def test_a_field_that_a_policy_lacks_is_refused_by_its_option() -> None:
    with pytest.raises(PlanError, match=r"--packs-bwd, --slots is not an option of dp-swap plans"):
        PlanChoice(packs_bwd=2, slots=1, u_fwd=1).fixed_for(Policy.DP_SWAP)
    with pytest.raises(PlanError, match="--residency is not an option of harmony-pp plans"):
        PlanChoice(residency=Residency.LRU).fixed_for(Policy.HARMONY_PP)
    with pytest.raises(PlanError, match="--reduce is not an option of harmony-pp plans"):
        PlanChoice(reduce=Reduce.HOST).fixed_for(Policy.HARMONY_PP)
    with pytest.raises(PlanError, match="--slots is not an option of harmony-dp plans"):
        PlanChoice(slots=1).fixed_for(Policy.HARMONY_DP)
    assert PlanChoice(u_fwd=1, update=UpdateOn.GPU).fixed_for(Policy.HARMONY_DP) == {"u_fwd": 1, "update": UpdateOn.GPU}
