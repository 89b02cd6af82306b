"""One pass over the dependencies, and how memory changes at the times it gives."""

from __future__ import annotations

import pytest

from sim.errors import ScheduleError
from sim.schedule import TaskKind, TensorKind
from sim.timelines.replay import (
    MemoryChange,
    StepTimes,
    in_sequence,
    mean_period_ns,
    memory_changes,
    replay_times,
)
from tests.sim.handmade import Hand


def two_lanes() -> Hand:
    """A copy in, a forward that waits for it, and a second copy beside the forward; each allocates 10 or 20 bytes."""
    hand = Hand()
    first = hand.buffer(TensorKind.WEIGHT, 0, 10)
    second = hand.buffer(TensorKind.WEIGHT, 1, 20)
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, writes=(first,), allocates=(first,))
    hand.task(TaskKind.FORWARD, samples=(0, 1), waits_for=(0,), reads=(first,), frees=(first,))
    hand.task(TaskKind.SWAP_IN, 1, tensor_kind=TensorKind.WEIGHT, writes=(second,), allocates=(second,))
    hand.task(TaskKind.FORWARD, 1, samples=(0, 1), waits_for=(2,), reads=(second,), frees=(second,))
    return hand


def test_tasks_start_when_their_predecessors_have_ended() -> None:
    assert replay_times(two_lanes().schedule(), [5, 7, 1, 2]) == StepTimes([0, 5, 5, 12], [5, 12, 6, 14])


def test_a_later_predecessor_is_refused() -> None:
    hand = Hand()
    hand.task(TaskKind.FORWARD, samples=(0, 1), waits_for=(1,))
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT)
    with pytest.raises(ScheduleError, match=r"task 0\) waits for swap_in weight 0 on gpu 0 swap_in \(task 1\)"):
        replay_times(hand.schedule(), [1, 1])


def test_every_task_needs_a_duration() -> None:
    with pytest.raises(ValueError, match="shorter"):
        replay_times(two_lanes().schedule(), [1, 1, 1])


def test_duration_is_from_first_start_to_last_end() -> None:
    assert StepTimes([30, 10], [35, 90]).duration_ns == 80
    assert StepTimes([], []).duration_ns == 0


def test_memory_changes_by_time() -> None:
    schedule = two_lanes().schedule()
    first, second = schedule.buffers
    assert memory_changes(schedule, replay_times(schedule, [5, 7, 1, 2])) == [
        MemoryChange(0, first, 10),
        MemoryChange(5, second, 20),
        MemoryChange(12, first, -10),
        MemoryChange(14, second, -20),
    ]


def test_recorded_memory_comes_before_the_plans() -> None:
    schedule = two_lanes().schedule()
    recorded = [MemoryChange(9, schedule.buffers[0], -4), MemoryChange(2, schedule.buffers[0], 4)]
    times = StepTimes([0] * 4, [0] * 4, memory=recorded)
    assert memory_changes(schedule, times) == recorded[::-1]


def test_runs_in_sequence_begin_where_the_one_before_ended() -> None:
    """The second run is of two steps that overlap."""
    change = MemoryChange(7, two_lanes().buffers[0], 5)
    alone = StepTimes([5, 6], [9, 8], copied_bytes=[1, 2], memory=[change])
    placed = in_sequence([[alone], [StepTimes([0, 2], [2, 5]), StepTimes([3, 4], [4, 6])], [StepTimes([1], [2])]])
    assert placed == [
        StepTimes([0, 1], [4, 3], copied_bytes=[1, 2], memory=[change._replace(time_ns=2)]),
        StepTimes([4, 6], [6, 9]),
        StepTimes([7, 8], [8, 10]),
        StepTimes([10], [11]),
    ]


def test_the_period_is_from_end_to_end() -> None:
    assert mean_period_ns([30, 40, 52]) == 11
