"""Validation of the memory plan, for every timing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.builders import build
from sim.schedule import Schedule, TaskKind, TensorKind
from sim.timelines.held import held_at_peaks
from sim.timelines.replay import memory_changes, replay_times
from sim.validation.happens_before import HappensBefore
from sim.validation.memory import memory_faults
from tests.random_plans import random_case
from tests.sim.handmade import Hand, one_gpu_schedule, plan

SOUND = one_gpu_schedule()
W0 = "buffer 0 (weight 0, 100 B at 0 on gpu 0)"


def faults(schedule: Schedule) -> list[str]:
    return list(memory_faults(schedule, HappensBefore(schedule)))


def changed(number: int, **fields: Any) -> Schedule:
    tasks = list(SOUND.tasks)
    tasks[number] = replace(tasks[number], **fields)
    return replace(SOUND, tasks=tuple(tasks))


def with_memory(**fields: Any) -> Schedule:
    return replace(SOUND, memory=replace(SOUND.memory, **fields))


def test_lives() -> None:
    assert faults(changed(0, allocates=())) == [f"{W0} is never allocated"]
    assert faults(changed(5, frees=SOUND.tasks[5].frees[:-1])) == [f"{W0} is never freed"]
    assert f"{W0} is freed 2 times: by {SOUND.tasks[2]} and by {SOUND.tasks[5]}" in faults(
        changed(2, frees=(*SOUND.tasks[2].frees, 0))
    )


def test_host_buffers_are_freed_as_well() -> None:
    buffer = next(buffer for buffer in SOUND.buffers if buffer.gpu is None)
    freeing = next(task for task in SOUND.tasks if buffer.id in task.frees)
    assert f"{buffer} is never freed" in faults(
        changed(freeing.id, frees=tuple(number for number in freeing.frees if number != buffer.id))
    )


def test_a_use_before_the_allocation() -> None:
    """The forward no longer waits for the copy of its data, which allocates it."""
    assert faults(changed(2, waits_for=(0,))) == [
        f"{SOUND.tasks[2]} may use buffer 1 (data 0, 10 B at 100 on gpu 0) before {SOUND.tasks[1]} has allocated it",
        f"{SOUND.tasks[2]} may free buffer 1 (data 0, 10 B at 100 on gpu 0) while {SOUND.tasks[1]} still needs it",
        f"{SOUND.tasks[1]} and {SOUND.tasks[2]} may touch buffer 1 (data 0, 10 B at 100 on gpu 0) at the same time, "
        "and one of them writes it",
    ]


def test_a_free_while_in_use() -> None:
    """The first forward frees the weights that the second, which starts later, still reads."""
    tasks = list(SOUND.tasks)
    tasks[2] = replace(tasks[2], frees=(*tasks[2].frees, 0))
    tasks[5] = replace(tasks[5], frees=tasks[5].frees[:-1])
    found = faults(replace(SOUND, tasks=tuple(tasks)))
    assert found[0] == f"{SOUND.tasks[2]} may free {W0} while {SOUND.tasks[5]} still needs it"


def test_a_read_of_what_nobody_wrote() -> None:
    found = faults(changed(1, writes=()))
    assert found == [f"{SOUND.tasks[2]} reads buffer 1 (data 0, 10 B at 100 on gpu 0) before anything has written it"]


def test_two_readers_may_overlap_and_a_writer_may_not() -> None:
    def schedule(second: dict[str, Any]) -> Schedule:
        hand = Hand(plan(gpus=2))
        shared = hand.buffer(TensorKind.STASH, 1, 8, gpu=None)
        hand.task(TaskKind.SWAP_OUT, tensor_kind=TensorKind.STASH, writes=(shared,), allocates=(shared,))
        hand.task(TaskKind.SWAP_IN, gpu=0, tensor_kind=TensorKind.STASH, waits_for=(0,), reads=(shared,))
        hand.task(TaskKind.SWAP_IN, gpu=1, tensor_kind=TensorKind.STASH, waits_for=(0,), **second)
        hand.task(TaskKind.UPDATE, gpu=None, waits_for=(1, 2), frees=(shared,))
        return hand.schedule(gpu_peak=0, host_peak=8)

    assert faults(schedule({"reads": (0,)})) == []
    found = faults(schedule({"writes": (0,)}))
    assert (
        "swap_in stash 0 on gpu 0 swap_in (task 1) and swap_in stash 0 on gpu 1 swap_in (task 2) may touch" in found[0]
    )


def test_memory_out_of_reach() -> None:
    hand = Hand(plan(gpus=2))
    far = hand.buffer(TensorKind.WEIGHT, 0, 8, gpu=1)
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, writes=(far,), allocates=(far,))
    hand.task(TaskKind.P2P, peer=1, tensor_kind=TensorKind.WEIGHT, reads=(far,), waits_for=(0,), frees=(far,))
    memory = hand.schedule(host_peak=0).memory
    schedule = replace(hand.schedule(), memory=replace(memory, gpu_peak_bytes=(0, 8)))
    assert faults(schedule) == [
        f"{task} {verb} buffer 0 (weight 0, 8 B on gpu 1), which is out of its reach"
        for task, verb in zip(schedule.tasks, ("writes", "reads"), strict=True)
    ]


def test_a_place_taken_before_it_is_free() -> None:
    """Data comes in again over the gradient of an activation, whose copy out it does not wait for."""
    (data,) = SOUND.tasks[19].allocates
    (gradient,) = SOUND.tasks[11].frees
    assert SOUND.buffers[gradient].offset == 650
    buffers = list(SOUND.buffers)
    buffers[data] = replace(buffers[data], offset=660)
    assert faults(replace(SOUND, buffers=tuple(buffers))) == [
        f"{SOUND.tasks[19]} may put {buffers[data]} over {buffers[gradient]} before {SOUND.tasks[11]} has freed that"
    ]


@pytest.mark.parametrize(("offset", "size"), [(10, 20), (80, 20), (0, 1), (99, 1)])
def test_a_place_that_was_taken_again_in_its_middle(offset: int, size: int) -> None:
    """Weights at 0-99 go; a small buffer comes at 40-59; then another over what is left of the weights' place."""
    hand = Hand()
    places = [(0, 100), (40, 20), (offset, size)]
    made = [hand.buffer(TensorKind.WEIGHT, 0, length, offset=start) for start, length in places]
    for buffer in made:
        hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, writes=(buffer,), allocates=(buffer,))
    for buffer in made:
        hand.task(
            TaskKind.SWAP_OUT, tensor_kind=TensorKind.WEIGHT, waits_for=(buffer,), reads=(buffer,), frees=(buffer,)
        )
    found = faults(hand.schedule(gpu_peak=100, host_peak=0))
    assert [fault for fault in found if f"over {hand.buffers[0]}" in fault] == found
    assert len(found) == 2


def test_peaks_and_caps() -> None:
    assert faults(with_memory(gpu_peak_bytes=(859,))) == [
        "the planned peak of gpu 0 is 859 B, its buffers end at 860 B"
    ]
    assert len(faults(with_memory(gpu_peak_bytes=(1116,), gpu_cap_bytes=(1116,)))) == 1
    assert faults(with_memory(gpu_peak_bytes=(1024,), gpu_cap_bytes=(1024,))) == []  # the arena's alignment
    assert faults(with_memory(gpu_cap_bytes=(800,))) == ["the planned peak of gpu 0 is 860 B, above its cap of 800 B"]
    assert faults(with_memory(host_peak_bytes=947)) == [
        "the planned peak of the host is 947 B, its store of 908 B and its buffers need 948 B at the worst timing"
    ]
    assert faults(with_memory(host_cap_bytes=940)) == ["the planned peak of the host is 948 B, above its cap of 940 B"]


def test_placed_and_counted_buffers_do_not_mix() -> None:
    buffers = list(SOUND.buffers)
    buffers[1] = replace(buffers[1], offset=None)
    placed = sum(buffer.offset is not None for buffer in buffers)
    assert faults(replace(SOUND, buffers=tuple(buffers))) == [
        f"gpu 0 has {placed} buffers with an offset and 1 without"
    ]


@pytest.mark.parametrize(("waits", "peak"), [((0, 1), 5), ((0,), 9)])
def test_counted_peaks_are_of_the_worst_timing(waits: tuple[int, ...], peak: int) -> None:
    """The second buffer comes after the first is freed, or perhaps before."""
    hand = Hand()
    first, second = (hand.buffer(TensorKind.WEIGHT, 0, size) for size in (4, 5))
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, writes=(first,), allocates=(first,))
    hand.task(TaskKind.FORWARD, samples=(0, 1), waits_for=(0,), reads=(first,), frees=(first,))
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, waits_for=waits, writes=(second,), allocates=(second,))
    hand.task(TaskKind.FORWARD, samples=(1, 2), waits_for=(2,), reads=(second,), frees=(second,))
    assert faults(hand.schedule(gpu_peak=peak, host_peak=0)) == []
    wrong = faults(hand.schedule(gpu_peak=peak + 1, host_peak=0))
    assert wrong == [f"the planned peak of gpu 0 is {peak + 1} B, its buffers need {peak} B at the worst timing"]


@given(st.integers(0, 10**6), st.data())
@settings(max_examples=25, deadline=None)
def test_no_timing_of_a_sound_schedule_exceeds_its_plan(seed: int, data: st.DataObject) -> None:
    case = random_case(seed % 50)
    schedule = build(case.plan, case.trace, case.machine)
    assert faults(schedule) == []
    lengths = data.draw(st.lists(st.integers(0, 20), min_size=len(schedule.tasks), max_size=len(schedule.tasks)))
    times = replay_times(schedule, lengths)
    peaks = held_at_peaks(schedule, [memory_changes(schedule, times)])
    for gpu, planned in enumerate(schedule.memory.gpu_peak_bytes):
        assert peaks[str(gpu)].observed.bytes <= planned
    assert peaks["host"].observed.bytes <= schedule.memory.host_peak_bytes
