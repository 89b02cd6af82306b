"""What may be slowed, and that leaving the rest out of the links changes no time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.builders import build
from sim.engine.contention import Contention, Shared, Stream
from sim.engine.durations import CostDurations, Demands
from sim.engine.simulate import run_step
from sim.hardware.machine import Gpu, Host, Link, Machine, NvLink
from sim.schedule import Schedule, Task, TaskKind
from tests.random_plans import random_case
from tests.sim.handmade import Hand, machine, plan
from traces.costs import Costs

from .lane_processes import LaneProcesses


class Given:
    """Durations by task; updates in the host move as many bytes as they last nanoseconds, on 3 threads."""

    threads = 3

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths

    def compute_ns(self, task: Task) -> int:
        return self._lengths[task.id]

    def host_bytes(self, task: Task) -> int:
        return self._lengths[task.id]


def copies(on: Machine, *kinds: tuple[TaskKind, dict[str, Any]]) -> Contention:
    """Copies of 100 bytes; each GPU has 1 byte/ns."""
    hand = Hand(plan(gpus=len(on.gpus), minibatch=len(on.gpus)))
    for kind, fields in kinds:
        hand.task(kind, **{"bytes": 100, **fields})
    return Contention(hand.schedule(), Demands(on, Given([100] * len(kinds)), len(on.gpus)))


def under_one_link(rate: float, **host: Any) -> Machine:
    gpu = Gpu(name="gpu", memory_bytes=1, bandwidth=1e9, link="up", copy_overhead_ns=7)
    host = {"memory_bytes": None, "dram_bandwidth": 1e12, **host}
    return Machine(name="m", host=Host(**host), links=(Link(name="up", bandwidth=rate),), gpus=(gpu, gpu))


def test_a_link_that_can_carry_all_lanes_at_once_slows_nothing() -> None:
    swaps = [(TaskKind.SWAP_IN, {"gpu": gpu, "bytes": 100 + gpu}) for gpu in (0, 1)]
    assert copies(under_one_link(2e9), *swaps, *swaps).durations_ns == [107, 108, 107, 108]
    assert copies(under_one_link(1.9e9), *swaps).durations_ns == [None, None]


def test_two_directions_do_not_slow_each_other() -> None:
    two = copies(under_one_link(1e9), (TaskKind.SWAP_IN, {"gpu": 0}), (TaskKind.SWAP_OUT, {"gpu": 1}))
    assert two.durations_ns == [107, 107]


def test_tasks_of_one_lane_do_not_slow_each_other() -> None:
    assert copies(under_one_link(1e9), *[(TaskKind.SWAP_IN, {})] * 3).durations_ns == [107] * 3


def test_what_is_never_full_only_caps() -> None:
    """The GPU's own link gives 1 byte/ns; the shared one stays as a load."""
    shared = copies(under_one_link(1.5e9), *[(TaskKind.SWAP_IN, {"gpu": gpu}) for gpu in (0, 1)]).shared
    (stream,) = shared[0].streams
    assert shared == {0: shared[1], 1: shared[1]}
    assert (stream.bytes, stream.cap, len(stream.loads)) == (100, 1e9, 1)


def test_work_with_a_part_that_nothing_slows_lasts_at_least_as_long_as_that() -> None:
    """The update's cores are its own, but it shares host memory with the copy: 1.5 bytes/ns, of 2 that they want."""
    update = (TaskKind.UPDATE, {"gpu": None})
    found = copies(under_one_link(1e9, dram_bandwidth=1.5e9, cores=4), update, (TaskKind.SWAP_IN, {})).shared[0]
    ((loads, size, cap),) = found.streams
    assert (found.delay_ns, found.least_ns, size, cap, len(loads)) == (0, 100, 100, 1e9, 1)


def test_the_edges_of_a_ring_may_slow_each_other() -> None:
    """Both directions of one all-reduce go through one link that caps their sum."""
    alone = machine(gpus=2)
    joint = replace(alone, gpus=tuple(replace(gpu, both_directions=1e9) for gpu in alone.gpus))
    reduce = (TaskKind.ALLREDUCE, {"gpu": None, "bytes": 200})
    assert copies(alone, reduce).durations_ns == [100]
    assert copies(joint, reduce).durations_ns == [None]


def both_ways(schedule: Schedule, demands: Demands) -> tuple[tuple[list[int], list[int]], tuple[list[int], list[int]]]:
    step = run_step(schedule, demands)
    return (list(step.start_ns), list(step.end_ns)), LaneProcesses(schedule, demands).times()


KINDS = [TaskKind.FORWARD, TaskKind.SWAP_IN, TaskKind.SWAP_OUT, TaskKind.P2P, TaskKind.UPDATE, TaskKind.REDUCE]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Demands]:
    """Tasks of all kinds on three GPUs and the host, on machines that are short of this or that."""
    hand = Hand(plan(gpus=3, minibatch=3))
    lengths = draw(st.lists(st.integers(0, 60), min_size=1, max_size=30))
    for number, length in enumerate(lengths):
        kind = draw(st.sampled_from(KINDS))
        gpu = None if kind in (TaskKind.UPDATE, TaskKind.REDUCE) else draw(st.integers(0, 2))
        waits = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        peer = (gpu + draw(st.integers(1, 2))) % 3 if kind is TaskKind.P2P and gpu is not None else None
        hand.task(kind, gpu=gpu, peer=peer, bytes=length, waits_for=tuple(sorted(waits)), samples=(0, 1))
    rates = st.sampled_from((0.3e9, 0.5e9, 1e9, 2e9, 3e9))
    gpu = Gpu(
        name="gpu",
        memory_bytes=10**16,
        bandwidth=1e9,
        link="up",
        p2p=draw(st.booleans()),
        p2p_bandwidth=draw(st.none() | rates),
        both_directions=draw(st.none() | rates),
        copy_overhead_ns=draw(st.sampled_from((0, 3))),
        efficiency=draw(st.sampled_from(((), ((10, 0.25), (50, 0.5))))),
    )
    on = Machine(
        name="random",
        host=Host(memory_bytes=None, dram_bandwidth=draw(rates), cores=draw(st.integers(1, 4))),
        links=(Link(name="up", bandwidth=draw(rates), both_directions=draw(st.none() | rates)),),
        gpus=(gpu, replace(gpu, link="host"), gpu),
        nvlinks=(NvLink(gpus=(0, 2), bandwidth=2e9),) if draw(st.booleans()) else (),
    )
    return hand.schedule(), Demands(on, Given(lengths), 3)


@given(cases())
@settings(max_examples=150, deadline=None)
def test_times_are_those_of_a_process_for_each_lane(case: tuple[Schedule, Demands]) -> None:
    ours, plain = both_ways(*case)
    assert ours == plain


@pytest.mark.parametrize("seed", range(10))
def test_times_of_plans_are_those_of_a_process_for_each_lane(seed: int) -> None:
    case = random_case(seed)
    schedule = build(case.plan, case.trace, case.machine)
    gpus = schedule.plan.gpus
    durations = CostDurations(Costs(replace(case.trace, threads=seed)), case.machine, gpus)
    ours, plain = both_ways(schedule, Demands(case.machine, durations, gpus))
    assert ours == plain


def test_equal_copies_have_one_demand() -> None:
    hand = Hand()
    for size in (100, 200, 100):
        hand.task(TaskKind.SWAP_IN, bytes=size)
    first, second, third = Demands(machine(), Given([]), 1).of_all(hand.tasks)
    assert first is third
    assert first != second


def test_a_stream_keeps_what_the_copys_size_reaches() -> None:
    slow = under_one_link(0.9e9)
    slow = replace(slow, gpus=tuple(replace(gpu, efficiency=((100, 0.25), (200, 0.5))) for gpu in slow.gpus))
    swaps = [(TaskKind.SWAP_IN, {"gpu": gpu, "bytes": 400}) for gpu in (0, 1)]
    shared = copies(slow, *swaps).shared
    assert shared[0] == Shared(7, 0, 800, (Stream(shared[0].streams[0].loads, 400, 0.5e9),))
