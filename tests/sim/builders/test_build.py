"""What no builder is asked to build."""

from __future__ import annotations

import pytest

from sim.builders import build
from sim.errors import PlanError
from sim.plan import HarmonyPlan, PagedPlan, Plan, Policy, ShardedPlan
from tests.sim.handmade import machine
from traces.synthetic import uniform_trace

LAYERS = 4
SAMPLES = 10**12


@pytest.mark.parametrize(
    ("plan", "computations"),
    [
        (PagedPlan(policy=Policy.DP_SWAP, minibatch=SAMPLES, gpus=1, u_fwd=1, u_bwd=1), 2 * LAYERS * SAMPLES),
        (ShardedPlan(policy=Policy.ZERO3_OFFLOAD, minibatch=SAMPLES, gpus=1, u_fwd=4, u_bwd=4), 2 * SAMPLES),
        (
            HarmonyPlan(
                policy=Policy.HARMONY_PP, minibatch=SAMPLES, gpus=1, u_fwd=1, u_bwd=2,
                packs_fwd=((0, 1),), packs_bwd=((0, 0), (1, 1), (2, 3)),
            ),
            SAMPLES + 3 * SAMPLES // 2,
        ),
    ],
)  # fmt: skip
def test_steps_of_too_many_computations_are_refused(plan: Plan, computations: int) -> None:
    with pytest.raises(PlanError, match=f"makes {computations} forwards and backwards"):
        build(plan, uniform_trace(LAYERS), machine())
