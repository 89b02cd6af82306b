"""Why a step takes as long as it does."""

from __future__ import annotations

import pytest
from random_plans import random_case

from sim.builders import build
from sim.engine.durations import forward_share
from sim.engine.simulate import simulate
from sim.plan import Plan
from sim.schedule import TaskKind, TensorKind
from sim.timelines.critical_path import Cause, critical_path, critical_tasks
from sim.timelines.replay import StepTimes, replay_times
from tests.sim.handmade import Hand, machine, one_gpu_schedule, paged, plan, tiny_trace
from traces.costs import Costs

NOTHING = {cause.value: 0.0 for cause in Cause}


def quarter(_: object) -> float:
    return 0.25


def chain(of: Plan | None = None) -> Hand:
    """In, forward, backward, out, update: each waits for the one before; a short copy beside the forward."""
    hand = Hand(of or plan())
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT)
    hand.task(TaskKind.FORWARD, samples=(0, 1), waits_for=(0,))
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.DATA)
    hand.task(TaskKind.BACKWARD, samples=(0, 1), waits_for=(1, 2))
    hand.task(TaskKind.SWAP_OUT, tensor_kind=TensorKind.GRADIENT, waits_for=(3,))
    hand.task(TaskKind.UPDATE, gpu=None, waits_for=(4,))
    return hand


def test_shares_of_a_chain() -> None:
    """Lengths 10, 20, 5, 40, 10, 20 of 100: the second copy in is not on the path, a quarter of 40 is recompute."""
    schedule = chain().schedule()
    times = replay_times(schedule, [10, 20, 5, 40, 10, 20])
    assert critical_tasks(schedule, times) == (0, 1, 3, 4, 5)
    assert critical_path(schedule, times, quarter) == {
        **NOTHING,
        "compute": 0.5,
        "recompute": 0.1,
        "swap_in": 0.1,
        "swap_out": 0.1,
        "update": 0.2,
    }


def test_the_longer_branch_is_the_path() -> None:
    schedule = chain().schedule()
    times = replay_times(schedule, [10, 5, 20, 40, 10, 20])
    assert critical_tasks(schedule, times) == (0, 2, 3, 4, 5)


def test_ties_go_to_the_lowest_id() -> None:
    schedule = chain().schedule()
    times = replay_times(schedule, [10, 20, 20, 40, 10, 20])
    assert critical_tasks(schedule, times) == (0, 1, 3, 4, 5)


def test_the_only_forward_of_fused_layers_is_no_recompute() -> None:
    hand = Hand()
    hand.task(TaskKind.BACKWARD, 1, samples=(0, 1))
    schedule = hand.schedule()
    assert critical_path(schedule, replay_times(schedule, [8]), quarter)["compute"] == 1
    plain = chain(paged()).schedule()
    assert critical_path(plain, replay_times(plain, [0, 0, 0, 8, 0, 0]), quarter)["recompute"] == 0.25


def test_gaps_are_idle() -> None:
    """Measured: the first task starts 10 late, and each of the others 10 after what it waited for."""
    schedule = chain().schedule()
    starts, ends = [10, 40, 40, 80, 110, 130], [30, 70, 45, 100, 120, 150]
    times = StepTimes([0, *starts[1:]], [20, *ends[1:]])
    shares = critical_path(schedule, times, quarter)
    assert shares["idle"] == pytest.approx((20 + 10 + 10 + 10) / 150)
    assert sum(shares.values()) == pytest.approx(1)


def test_idle_before_the_first_task_of_the_path() -> None:
    """The path begins at 10 with task 1 of another lane; the step began at 0."""
    hand = Hand()
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT)
    hand.task(TaskKind.FORWARD, samples=(0, 1))
    assert critical_path(hand.schedule(), StepTimes([0, 10], [5, 20]), quarter) == {
        **NOTHING,
        "compute": 0.5,
        "idle": 0.5,
    }


def test_clocks_that_overlap_count_time_once() -> None:
    schedule = chain().schedule()
    times = StepTimes([0, 9, 9, 29, 69, 79], [10, 30, 15, 70, 80, 100])
    shares = critical_path(schedule, times, quarter)
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["idle"] == 0
    assert shares["swap_in"] == pytest.approx(0.09)


def test_a_step_that_takes_no_time_is_idle() -> None:
    schedule = chain().schedule()
    assert critical_path(schedule, replay_times(schedule, [0] * 6), quarter) == {**NOTHING, "idle": 1.0}


def test_the_hand_made_step() -> None:
    """Weights of layer 1 are waited for; then its gradient's copy, and layer 0's, keep the way out busy."""
    shares = simulate(one_gpu_schedule(), tiny_trace(), machine()).info.critical_path
    assert shares is not None
    assert shares["idle"] == 0
    assert {name for name, share in shares.items() if share} == {"compute", "swap_in", "swap_out", "update"}
    assert shares["update"] == pytest.approx(40 / 744)


def test_forward_share_is_by_the_trace() -> None:
    hand = Hand()
    hand.task(TaskKind.BACKWARD, (0, 1), samples=(0, 1))
    assert forward_share(hand.tasks[0], Costs(tiny_trace())) == 8 / 26


@pytest.mark.parametrize("seed", range(8))
def test_shares_sum_to_one_and_a_simulation_has_no_gaps(seed: int) -> None:
    case = random_case(seed)
    shares = simulate(build(case.plan, case.trace, case.machine), case.trace, case.machine).info.critical_path
    assert shares is not None
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["idle"] == pytest.approx(0)
