"""A choice is completed to the plan with the fewest packs that fits."""

from __future__ import annotations

from typing import Any

import pytest

from sim.builders import build_from_costs
from sim.errors import DoesNotFit, PlanError
from sim.plan import HarmonyPlan, PagedPlan, Plan, Policy
from sim.planner.choice import PlanChoice
from sim.planner.completion import build_choice, completions
from sim.schedule import Schedule
from tests.sim.handmade import machine
from traces.costs import Costs
from traces.synthetic import uniform_trace

LAYERS = 6
COSTS = Costs(uniform_trace(LAYERS))


def harmony(plan: Plan) -> HarmonyPlan:
    assert isinstance(plan, HarmonyPlan)
    return plan


def plans(policy: Policy, *, gpus: int = 2, memory: int = 10**9, **fixed: Any) -> list[Plan]:
    on = machine(gpus=gpus).with_usable_memory(memory)
    return list(completions(PlanChoice(**fixed), policy, 8, COSTS, on))


def built(memory: int, **fixed: Any) -> Schedule:
    return build_choice(PlanChoice(**fixed), Policy.HARMONY_DP, 8, COSTS, machine(gpus=2).with_usable_memory(memory))


def test_open_microbatch_sizes_are_one_or_equal() -> None:
    for fixed, expected in (
        ({}, (1, 1)),
        ({"u_fwd": 4}, (4, 4)),
        ({"u_bwd": 2}, (2, 2)),
        ({"u_fwd": 4, "u_bwd": 2}, (4, 2)),
    ):
        plan = plans(Policy.HARMONY_DP, **fixed)[0]
        assert (plan.u_fwd, plan.u_bwd) == expected


def test_open_packs_grow_from_the_fewest_that_fit_to_one_a_layer() -> None:
    counts = [len(harmony(plan).packs_bwd) for plan in plans(Policy.HARMONY_DP)]
    assert counts == [1, 2, 3, 4, 5, 6]
    assert len(harmony(plans(Policy.HARMONY_DP, memory=45_000_000)[0]).packs_bwd) > 1


def test_a_pipeline_has_a_pack_for_each_gpu() -> None:
    first = harmony(plans(Policy.HARMONY_PP, gpus=3)[0])
    assert len(first.packs_bwd) == 3
    assert len(first.packs_fwd) == 3


def test_fixed_packs_stay_and_open_ones_grow_beside_them() -> None:
    found = [harmony(plan) for plan in plans(Policy.HARMONY_DP, packs_bwd=((0, 2), (3, 5)))]
    assert {plan.packs_bwd for plan in found} == {((0, 2), (3, 5))}
    assert [len(plan.packs_fwd) for plan in found] == [1, 2, 3]
    found = [harmony(plan) for plan in plans(Policy.HARMONY_DP, packs_bwd=3, packs_fwd=2)]
    assert [(len(plan.packs_bwd), len(plan.packs_fwd)) for plan in found] == [(3, 2)]


@pytest.mark.parametrize("policy", [policy for policy in Policy if policy.is_paged])
def test_a_baseline_has_one_completion(policy: Policy) -> None:
    found = plans(policy, u_fwd=2, recompute=False)
    assert found == [PagedPlan(policy=policy, minibatch=8, gpus=2, u_fwd=2, u_bwd=2, recompute=False)]


def test_the_first_that_fits_is_built() -> None:
    """Packs that fit by themselves may not fit together with what has to be there beside them."""
    refused = 0
    for memory in range(30_000_000, 100_000_000, 10_000_000):
        on = machine(gpus=2).with_usable_memory(memory)
        schedule = built(memory)
        assert max(schedule.memory.gpu_peak_bytes) <= memory
        for plan in plans(Policy.HARMONY_DP, memory=memory):
            if plan == schedule.plan:
                break
            with pytest.raises(DoesNotFit):
                build_from_costs(plan, COSTS, on)
            refused += 1
    assert refused > 0


def test_when_nothing_fits_the_error_says_what() -> None:
    with pytest.raises(DoesNotFit, match="does not fit on GPU 0: layers"):
        built(5_000_000)


def test_a_count_that_cannot_be_is_refused_with_those_that_can() -> None:
    with pytest.raises(PlanError, match="layers 0-5 cannot be cut into 7 packs") as refusal:
        built(10**9, packs_bwd=7)
    assert "the fewest that fit are 1, the most are 6" in str(refusal.value)
