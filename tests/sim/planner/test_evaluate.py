"""Evaluating a candidate: with as many slots as fit, the same here and in another process."""

from __future__ import annotations

import msgspec
import pytest

from sim.builders import build_from_costs
from sim.errors import DoesNotFit, PlanError
from sim.plan import HarmonyPlan, Policy
from sim.planner.evaluate import Found, evaluate, evaluate_encoded
from tests.sim.handmade import machine
from traces.costs import Costs
from traces.errors import HarmonyError
from traces.synthetic import uniform_trace

COSTS = Costs(uniform_trace(4, weight_bytes=400_000))
PLAN = HarmonyPlan(
    policy=Policy.HARMONY_PP, minibatch=16, gpus=2, u_fwd=1, u_bwd=1, packs_fwd=((0, 0), (1, 1), (2, 2)),
    packs_bwd=((0, 0), (1, 1), (2, 2), (3, 3)),
)  # fmt: skip
ROOMY = machine(gpus=2)


def test_a_plan_that_fits_keeps_its_slots() -> None:
    found = evaluate(PLAN, True, COSTS, ROOMY)
    assert isinstance(found, Found)
    assert found.plan == PLAN
    schedule = build_from_costs(PLAN, COSTS, ROOMY)
    assert found.gpu_peak_bytes == schedule.memory.gpu_peak_bytes
    assert found.host_peak_bytes == schedule.memory.host_peak_bytes


def test_with_open_slots_the_first_of_ever_fewer_that_fits_is_taken() -> None:
    """16 microbatches: as many slots as never spill, then 4, then 1."""
    taken = set()
    for memory in range(9_000_000, 40_000_000, 1_000_000):
        tight = ROOMY.with_usable_memory(memory)
        variants = [PLAN, msgspec.structs.replace(PLAN, slots=4), msgspec.structs.replace(PLAN, slots=1)]
        outcomes = [evaluate(variant, False, COSTS, tight) for variant in variants]
        fitting = [outcome for outcome in outcomes if isinstance(outcome, Found)]
        outcome = evaluate(PLAN, True, COSTS, tight)
        if fitting:
            assert outcome == fitting[0]
            taken.add(fitting[0].plan.slots)
        else:
            # The error is that of the plan as it was asked for.
            assert isinstance(outcome, DoesNotFit)
            assert str(outcome) == str(outcomes[0])
    assert {None, 1} <= taken


def test_a_plan_that_is_wrong_is_refused_at_once() -> None:
    assert isinstance(evaluate(PLAN, True, COSTS, machine(gpus=3)), PlanError)
    host = msgspec.structs.replace(ROOMY.host, memory_bytes=10)
    refusal = evaluate(PLAN, True, COSTS, msgspec.structs.replace(ROOMY, host=host))
    assert isinstance(refusal, DoesNotFit)
    assert refusal.gpu is None


@pytest.mark.parametrize("memory", [10**9, 1_000_000])
def test_another_process_answers_the_same(memory: int) -> None:
    on = ROOMY.with_usable_memory(memory)
    encoded = [msgspec.msgpack.encode(value) for value in (COSTS.trace, on)]
    answer = evaluate_encoded(PLAN, True, encoded[0], False, encoded[1])
    here = evaluate(PLAN, True, COSTS, on)
    if isinstance(answer, HarmonyError):
        assert str(answer) == str(here)
    else:
        assert msgspec.msgpack.decode(answer, type=Found) == here
    assert isinstance(answer, HarmonyError) == (memory == 1_000_000)
