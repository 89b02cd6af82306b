"""Memory replayed after a run: every way to break the plan."""

from __future__ import annotations

from typing import Any

import pytest

from sim.engine.device_memory import check_memory
from sim.errors import ScheduleError
from sim.schedule import TaskKind, TensorKind
from sim.timelines.replay import replay_times
from tests.sim.handmade import Hand, one_gpu_schedule, plan

LOAD = "swap_in weight 0 on gpu 0 swap_in (task 1)"


def two_loads(*, first: int | None, second: int | None, size: int = 100) -> Hand:
    """Two copies in; each allocates a buffer at the given place, and nothing frees them."""
    hand = Hand()
    for offset in (first, second):
        buffer = hand.buffer(TensorKind.WEIGHT, 0, size, offset=offset)
        hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, allocates=(buffer,))
    return hand


def freeing(hand: Hand, *buffers: int, **fields: Any) -> int:
    return hand.task(TaskKind.FORWARD, samples=(0, 1), frees=buffers, **fields)


def check(hand: Hand, lengths: list[int] | None = None, order: list[int] | None = None, **peak: int) -> None:
    """Replay a schedule whose tasks last ``lengths`` (1 each), as early as they can."""
    schedule = hand.schedule(**peak)
    times = replay_times(schedule, lengths or [1] * len(hand.tasks))
    check_memory(schedule, times.start_ns, times.end_ns, order or range(len(hand.tasks)))


def fault(hand: Hand, lengths: list[int] | None = None, order: list[int] | None = None, **peak: int) -> str:
    with pytest.raises(ScheduleError) as caught:
        check(hand, lengths, order, **peak)
    (only,) = caught.value.faults
    return only


@pytest.mark.parametrize("lengths", [0, 1, 10**18, 10**25])
def test_a_sound_schedule_leaves_nothing_behind(lengths: int) -> None:
    schedule = one_gpu_schedule()
    times = replay_times(schedule, [lengths] * len(schedule.tasks))
    check_memory(schedule, times.start_ns, times.end_ns, range(len(schedule.tasks)))


def test_no_buffers() -> None:
    hand = Hand()
    freeing(hand)
    check(hand)


@pytest.mark.parametrize("second", [50, 0, 99])
def test_overlapping_places(second: int) -> None:
    hand = two_loads(first=0, second=second)
    freeing(hand, 0, 1, waits_for=(0, 1))
    assert fault(hand) == (
        f"{LOAD} allocates buffer 1 (weight 0, 100 B at {second} on gpu 0), "
        "over buffer 0 (weight 0, 100 B at 0 on gpu 0), which is in use"
    )


def test_an_overlap_from_below() -> None:
    hand = two_loads(first=99, second=0)
    freeing(hand, 0, 1, waits_for=(0, 1))
    assert fault(hand).endswith("which is in use")


def test_a_place_is_free_again_when_its_buffer_is_freed() -> None:
    hand = two_loads(first=0, second=0)
    freeing(hand, 0, waits_for=(0,))
    freeing(hand, 1, waits_for=(1,))
    assert fault(hand).startswith(f"{LOAD} allocates buffer 1")  # at 1, when the first forward starts
    check(hand, [1, 1, 0, 1], order=[0, 2, 1, 3])  # but if that takes no time, the place is free at 1


@pytest.mark.parametrize(("first", "second", "size"), [(100, 0, 100), (0, 0, 0)])
def test_neighbours_touch_and_empty_buffers_are_nowhere(first: int, second: int, size: int) -> None:
    hand = two_loads(first=first, second=second, size=size)
    freeing(hand, 0, 1, waits_for=(0, 1))
    check(hand)


def test_places_of_different_gpus_do_not_meet() -> None:
    hand = Hand(plan(gpus=2))
    for gpu in (0, 1):
        buffer = hand.buffer(TensorKind.WEIGHT, 0, 100, gpu=gpu, offset=0)
        hand.task(TaskKind.SWAP_IN, gpu=gpu, tensor_kind=TensorKind.WEIGHT, allocates=(buffer,))
    freeing(hand, 0, 1, waits_for=(0, 1))
    check(hand)


def test_a_place_beyond_the_planned_peak() -> None:
    hand = two_loads(first=0, second=151)
    freeing(hand, 0, 1, waits_for=(0, 1))
    assert fault(hand, gpu_peak=250).endswith("which ends beyond the 250 B planned")


def test_more_bytes_than_planned() -> None:
    hand = two_loads(first=None, second=None)
    freeing(hand, 0, 1, waits_for=(0, 1))
    check(hand, gpu_peak=200)
    assert fault(hand, gpu_peak=199) == (
        f"{LOAD} allocates buffer 1 (weight 0, 100 B on gpu 0), 200 B are held then, 199 B are planned"
    )


def test_the_hosts_store_counts() -> None:
    hand = Hand()
    buffer = hand.buffer(TensorKind.STASH, 1, 100, gpu=None)
    hand.task(TaskKind.SWAP_OUT, 1, tensor_kind=TensorKind.STASH, allocates=(buffer,))
    freeing(hand, 0, waits_for=(0,))
    check(hand, host_store=50, host_peak=150)
    assert fault(hand, host_store=50, host_peak=149).endswith("150 B are held then, 149 B are planned")


def test_allocating_twice_and_freeing_what_is_not_there() -> None:
    hand = two_loads(first=None, second=None)
    freeing(hand, 0, 1, waits_for=(0, 1))
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, allocates=(1,), waits_for=(2,))
    freeing(hand, 1, waits_for=(3,))
    check(hand)  # a buffer may come back
    twice = two_loads(first=None, second=None)
    twice.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, allocates=(0,))
    assert fault(twice).endswith("which is allocated already")
    freeing(hand, 0, waits_for=(4,))
    assert fault(hand) == (
        "forward 0 on gpu 0 compute (task 5) frees buffer 0 (weight 0, 100 B on gpu 0), which is not allocated"
    )


def test_leftovers_are_named() -> None:
    assert fault(two_loads(first=None, second=None)) == (
        "never freed: buffer 0 (weight 0, 100 B on gpu 0), buffer 1 (weight 0, 100 B on gpu 0)"
    )


def test_leftovers_in_the_host_are_named() -> None:
    hand = Hand()
    buffer = hand.buffer(TensorKind.STASH, 1, 8, gpu=None)
    hand.task(TaskKind.SWAP_OUT, 1, tensor_kind=TensorKind.STASH, allocates=(buffer,))
    assert fault(hand) == "never freed: buffer 0 (stash 1, 8 B on the host)"


def test_the_name_of_a_host_buffer_of_several_layers() -> None:
    hand = Hand()
    hand.buffer(TensorKind.GRADIENT, (0, 1), 8, gpu=None)
    assert str(hand.buffers[0]) == "buffer 0 (gradient 0-1, 8 B on the host)"
