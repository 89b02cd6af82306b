"""What is held when most is held, counted by hand and again from scratch."""

from __future__ import annotations

import json

import pytest

from sim.builders import build
from sim.engine.simulate import simulate
from sim.schedule import Schedule, TaskKind, TensorKind
from sim.timelines.held import held_at_peaks
from sim.timelines.replay import MemoryChange, StepTimes, memory_changes, replay_times
from tests.random_plans import random_case
from tests.sim.handmade import Hand, machine, one_gpu_schedule, tiny_trace
from tests.sim.timelines.test_replay import two_lanes


def two_copies() -> Schedule:
    """Two lanes: weights of 10 B come in and are used, then 20 B; 7 B go out to the host and come back."""
    hand = Hand()
    first = hand.buffer(TensorKind.WEIGHT, (0, 1), 10)
    second = hand.buffer(TensorKind.ACTIVATION, 1, 20, samples=(0, 2))
    third = hand.buffer(TensorKind.ACTIVATION, 1, 7, gpu=None, samples=(0, 1))
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, writes=(first,), allocates=(first,))
    hand.task(TaskKind.FORWARD, samples=(0, 1), waits_for=(0,), reads=(first,), frees=(first,))
    hand.task(TaskKind.SWAP_IN, 1, tensor_kind=TensorKind.ACTIVATION, writes=(second,), allocates=(second,))
    hand.task(TaskKind.SWAP_OUT, 1, tensor_kind=TensorKind.ACTIVATION, reads=(second,), frees=(second,),
              waits_for=(2,), writes=(third,), allocates=(third,))  # fmt: skip
    hand.task(TaskKind.SWAP_IN, 1, tensor_kind=TensorKind.ACTIVATION, waits_for=(3,), reads=(third,), frees=(third,))
    return hand.schedule(host_store=100)


def test_planned_is_one_task_after_the_other_and_observed_side_by_side() -> None:
    """In order, the weights are gone before the activation comes; while the forward lasts 7 ns, both are there."""
    schedule = two_copies()
    times = replay_times(schedule, [5, 7, 1, 2, 3])
    peaks = held_at_peaks(schedule, [memory_changes(schedule, times)])
    planned, observed = peaks["0"].planned, peaks["0"].observed
    assert (planned.bytes, planned.by_kind, planned.time_ns) == (20, {TensorKind.ACTIVATION: 20}, None)
    assert observed.by_kind == {TensorKind.WEIGHT: 10, TensorKind.ACTIVATION: 20}
    assert (observed.bytes, observed.step, observed.time_ns) == (30, 0, 5)
    largest, other = observed.largest
    assert (largest.tensor_kind, largest.layer_first, largest.layer_last, largest.samples, largest.bytes) == (
        TensorKind.ACTIVATION, 1, 1, (0, 2), 20,
    )  # fmt: skip
    assert (other.tensor_kind, other.layer_last, other.samples) == (TensorKind.WEIGHT, 1, None)


@pytest.mark.parametrize(("lengths", "peak"), [([5, 7, 1, 2], 30), ([5, 0, 1, 2], 20)])
def test_what_is_freed_at_a_moment_makes_room_for_what_comes_then(lengths: list[int], peak: int) -> None:
    """With no time for the forward, the first buffer goes at 5, just when the second comes: in whichever order."""
    schedule = two_lanes().schedule()
    changes = memory_changes(schedule, replay_times(schedule, lengths))
    for ordered in (changes, sorted(changes, key=lambda change: (change.time_ns, -change.delta_bytes))):
        assert held_at_peaks(schedule, [ordered])["0"].observed.bytes == peak


def test_the_host_holds_its_store_as_well() -> None:
    schedule = two_copies()
    host = held_at_peaks(schedule, [memory_changes(schedule, replay_times(schedule, [5, 7, 1, 2, 3]))])["host"]
    for held in (host.planned, host.observed):
        assert (held.bytes, held.by_kind) == (107, {TensorKind.WEIGHT: 100, TensorKind.ACTIVATION: 7})
        assert [buffer.bytes for buffer in held.largest] == [7]
    assert host.observed.time_ns == 6


def test_the_step_in_which_most_was_held_counts_and_what_was_really_taken() -> None:
    schedule = two_copies()
    weight = schedule.buffers[0]

    def step(size: int, start: int) -> list[MemoryChange]:
        return [MemoryChange(start, weight, size), MemoryChange(start + 4, weight, -size)]

    observed = held_at_peaks(schedule, [step(8, 0), step(9, 10), step(9, 20)])["0"].observed
    assert (observed.bytes, observed.step, observed.time_ns) == (9, 1, 10)
    assert observed.largest[0].bytes == 9


def test_a_gpu_that_holds_nothing() -> None:
    schedule = Hand().schedule()
    observed = held_at_peaks(schedule, [[]])["0"].observed
    assert (observed.bytes, observed.by_kind, observed.largest, observed.time_ns) == (0, {}, (), None)


def test_summary_says_it_all_in_json() -> None:
    figures = simulate(one_gpu_schedule(), tiny_trace(), machine()).summary()
    held = json.loads(json.dumps(figures["held_at_peak"]))
    assert list(held) == ["0", "host"]
    assert held["0"]["observed"]["bytes"] == figures["observed_peak_memory_bytes"][0]
    assert held["0"]["planned"]["time_s"] is None
    assert held["host"]["observed"]["bytes"] == figures["observed_host_peak_bytes"]
    assert held["host"]["observed"]["by_kind"]["weight"] == 908
    assert figures["fragmentation"] == [1 - held["0"]["planned"]["bytes"] / 860]


@pytest.mark.parametrize("seed", range(0, 40, 3))
def test_what_is_held_is_the_observed_peak_and_never_more_than_planned(seed: int) -> None:
    case = random_case(seed)
    schedule = build(case.plan, case.trace, case.machine)
    times = replay_times(schedule, [1 + task.id * 7919 % 101 for task in schedule.tasks])
    changes = memory_changes(schedule, times)
    peaks = held_at_peaks(schedule, [changes])
    for gpu, promised in enumerate(schedule.memory.gpu_peak_bytes):
        held = peaks[str(gpu)]
        assert held.observed.bytes == _most_held(schedule, times, gpu) == sum(held.observed.by_kind.values())
        assert max(held.planned.bytes, held.observed.bytes) <= promised
        assert {kind.value for kind in held.observed.by_kind} >= {b.tensor_kind.value for b in held.observed.largest}
        assert held.observed.bytes == _held_at(schedule, times, gpu, held.observed.time_ns)
    assert peaks["host"].observed.bytes == schedule.memory.host_store_bytes + _most_held(schedule, times, None)


def _most_held(schedule: Schedule, times: StepTimes, gpu: int | None) -> int:
    """What is held grows only where a task starts."""
    return max(_held_at(schedule, times, gpu, now) for now in set(times.start_ns))


def _held_at(schedule: Schedule, times: StepTimes, gpu: int | None, now: int | None) -> int:
    """Bytes of the buffers whose lives, start of the first user to end of the last, go on at ``now``."""
    if now is None:
        return 0
    taken = {number: times.start_ns[task.id] for task in schedule.tasks for number in task.allocates}
    freed = {number: times.end_ns[task.id] for task in schedule.tasks for number in task.frees}
    live = [b for b in schedule.buffers if b.resident or taken[b.id] <= now < freed[b.id]]
    return sum(b.bytes for b in live if b.gpu == gpu)
