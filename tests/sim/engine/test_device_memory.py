"""Memory replayed beside a run: every way to break the plan."""

from __future__ import annotations

import pytest

from sim.engine.device_memory import DeviceMemory
from sim.errors import ScheduleError
from sim.schedule import TaskKind, TensorKind
from tests.sim.handmade import Hand, one_gpu_schedule

LOAD = "swap_in weight 0 on gpu 0 swap_in (task 1)"


def two_loads(*, first: int | None, second: int | None, size: int = 100) -> Hand:
    """Two copies in; each allocates a buffer at the given place, and nothing frees them."""
    hand = Hand()
    for offset in (first, second):
        buffer = hand.buffer(TensorKind.WEIGHT, 0, size, offset=offset)
        hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, allocates=(buffer,))
    return hand


def allocate_all(hand: Hand, *, gpu_peak: int = 1000) -> DeviceMemory:
    memory = DeviceMemory(hand.schedule(gpu_peak=gpu_peak))
    for task in hand.tasks:
        memory.allocate(task)
    return memory


def fault(caught: pytest.ExceptionInfo[ScheduleError]) -> str:
    (only,) = caught.value.faults
    return only


def test_a_sound_schedule_leaves_nothing_behind() -> None:
    schedule = one_gpu_schedule()
    memory = DeviceMemory(schedule)
    for task in schedule.tasks:
        memory.allocate(task)
        memory.free(task)
    memory.check_empty()


@pytest.mark.parametrize("second", [50, 0, 99])
def test_overlapping_places(second: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        allocate_all(two_loads(first=0, second=second))
    assert fault(caught) == (
        f"{LOAD} allocates buffer 1 (weight 0, 100 B at {second} on gpu 0), "
        "over buffer 0 (weight 0, 100 B at 0 on gpu 0), which is in use"
    )


def test_an_overlap_from_below() -> None:
    with pytest.raises(ScheduleError, match="which is in use"):
        allocate_all(two_loads(first=99, second=0))


def test_neighbours_touch_and_empty_buffers_are_nowhere() -> None:
    allocate_all(two_loads(first=100, second=0))
    allocate_all(two_loads(first=0, second=0, size=0))


def test_a_place_beyond_the_planned_peak() -> None:
    with pytest.raises(ScheduleError, match="which ends beyond the 250 B planned"):
        allocate_all(two_loads(first=0, second=151), gpu_peak=250)


def test_more_bytes_than_planned() -> None:
    with pytest.raises(ScheduleError) as caught:
        allocate_all(two_loads(first=None, second=None), gpu_peak=199)
    assert fault(caught).endswith("(weight 0, 100 B on gpu 0), 200 B are held then, 199 B are planned")


def test_allocating_twice_and_freeing_what_is_not_there() -> None:
    hand = two_loads(first=None, second=None)
    memory = allocate_all(hand)
    with pytest.raises(ScheduleError, match="which is allocated already"):
        memory.allocate(hand.tasks[0])
    hand.task(TaskKind.FORWARD, samples=(0, 1), frees=(0,))
    memory.free(hand.tasks[2])
    with pytest.raises(ScheduleError, match=r"forward 0 on gpu 0 compute \(task 2\) frees .*, which is not allocated"):
        memory.free(hand.tasks[2])


def test_leftovers_are_named() -> None:
    with pytest.raises(ScheduleError, match=r"never freed: buffer 0 \(weight 0, 100 B on gpu 0\), buffer 1 "):
        allocate_all(two_loads(first=None, second=None)).check_empty()


def test_leftovers_in_the_host_are_named() -> None:
    hand = Hand()
    buffer = hand.buffer(TensorKind.STASH, 1, 8, gpu=None)
    hand.task(TaskKind.SWAP_OUT, 1, tensor_kind=TensorKind.STASH, allocates=(buffer,))
    with pytest.raises(ScheduleError, match=r"never freed: buffer 0 \(stash 1, 8 B on the host\)"):
        allocate_all(hand).check_empty()


def test_the_name_of_a_host_buffer_of_several_layers() -> None:
    hand = Hand()
    hand.buffer(TensorKind.GRADIENT, (0, 1), 8, gpu=None)
    assert str(hand.buffers[0]) == "buffer 0 (gradient 0-1, 8 B on the host)"
