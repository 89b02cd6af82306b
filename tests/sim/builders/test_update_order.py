"""In which order the host updates packs."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.builders import build
from sim.builders.order import place_groups
from sim.builders.update_order import update_order
from sim.hardware.machine import Machine
from sim.plan import HarmonyPlan, Pack, Policy
from sim.schedule import TaskKind
from sim.validation.validate import validate
from tests.sim.handmade import machine
from traces.costs import Costs
from traces.synthetic import uniform_trace, with_frozen

PACKS: tuple[Pack, ...] = tuple((at, at) for at in range(4))


def plan(**fields: Any) -> HarmonyPlan:
    defaults: dict[str, Any] = {"policy": Policy.HARMONY_PP, "gpus": 2, "overlap_steps": True}
    return HarmonyPlan(minibatch=4, u_fwd=1, u_bwd=1, packs_fwd=PACKS[:3], packs_bwd=PACKS, **{**defaults, **fields})


def on(host_speed: float) -> Machine:
    made = machine(gpus=2)
    return replace(made, host=replace(made.host, speed=host_speed))


def order(of: HarmonyPlan, host_speed: float, costs: Costs | None = None) -> list[int]:
    """First layers of the packs in the order of their updates; the last one, the loss, has no weights."""
    found = update_order(of, costs or Costs(uniform_trace(4)), on(host_speed), place_groups(of))
    return [first for first, _ in found]


def test_what_is_ready_first_is_updated_first() -> None:
    assert order(plan(), 1e6) == [2, 1, 0]
    assert order(plan(overlap_steps=False), 1e-6) == [2, 1, 0]


def test_of_those_that_wait_for_a_slow_host_the_first_goes_first() -> None:
    assert order(plan(), 1e-6) == [2, 0, 1]


def test_data_parallel_gpus_keep_the_order_of_the_backward() -> None:
    assert order(plan(policy=Policy.HARMONY_DP), 1e-6) == [2, 1, 0]


def test_frozen_packs_are_left_out() -> None:
    assert order(plan(), 1e-6, Costs(with_frozen(uniform_trace(4), (1,)))) == [2, 0]


@pytest.mark.parametrize("speed", [1e6, 1e-6])
def test_schedules_update_in_that_order(speed: float) -> None:
    trace, machine = uniform_trace(4), on(speed)
    schedule = build(plan(), trace, machine)
    validate(schedule, trace)
    assert [task.layer_first for task in schedule.copies(TaskKind.UPDATE)] == order(plan(), speed)
