"""Updates and reductions in the host: alone they take what the trace says, together they share cores and DRAM."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.engine.bounds import bound_ns
from sim.engine.durations import CostDurations, Demands
from sim.engine.simulate import run_step, simulate
from sim.hardware.machine import Machine
from sim.schedule import Lane, Task, TaskKind, TensorKind
from tests.sim.handmade import Hand, machine, tiny_trace
from traces.costs import Costs

LANES = (Lane.UPDATE, Lane.COLLECTIVE, Lane.COMPUTE, Lane.P2P_IN)  # so many of the host work at the same time


@dataclass
class Works:
    """What tasks in the host take, by task: how long, and the bytes that they move; all with so many threads."""

    took: list[tuple[int, int]]
    threads: int

    def compute_ns(self, task: Task) -> int:
        return self.took[task.id][0]

    def host_bytes(self, task: Task) -> int:
        return self.took[task.id][1]


def host(*, cores: int | None = None, dram: float = float("inf"), **gpu: object) -> Machine:
    """A machine of one GPU; ``dram`` in bytes/ns."""
    plain = machine(**gpu)
    return replace(plain, host=replace(plain.host, cores=cores, dram_bandwidth=dram * 1e9))


def side_by_side(on: Machine, took: list[tuple[int, int]], threads: int, swapped: int | None = None) -> list[int]:
    """Ends of updates on lanes of their own, and of a copy into the GPU beside them."""
    hand = Hand()
    for _, lane in zip(took, LANES, strict=False):
        hand.task(TaskKind.UPDATE, gpu=None, lane=lane)
    if swapped is not None:
        hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT, bytes=swapped)
    demands = Demands(on, Works(took, threads), 1)
    step = run_step(hand.schedule(), demands)
    assert bound_ns(hand.schedule(), demands) <= step.duration_ns
    return list(step.end_ns)


@given(
    duration=st.integers(0, 10**12),
    moved=st.integers(0, 10**13),
    threads=st.integers(0, 200),
    cores=st.none() | st.integers(1, 100),
    dram=st.floats(1e-3, 1e4) | st.just(float("inf")),
)
@example(duration=7, moved=0, threads=3, cores=1, dram=1.0)
def test_alone_it_takes_what_the_trace_says(
    duration: int, moved: int, threads: int, cores: int | None, dram: float
) -> None:
    """Whatever the machine: with more threads than cores, and with more bytes than its DRAM moves meanwhile."""
    assert side_by_side(host(cores=cores, dram=dram), [(duration, moved)], threads) == [duration]


def test_a_copy_and_an_update_share_host_memory() -> None:
    """Of 10 bytes/ns each has 5. At 120 the copy is through; then the update's other 200 bytes go at its own 8."""
    assert side_by_side(host(dram=10, bandwidth=1e10), [(100, 800)], 0, swapped=600) == [145, 120]


def test_an_update_leaves_a_copy_what_it_does_not_need() -> None:
    """The update moves 3 bytes/ns, so the copy has 7; nothing is slowed but the copy."""
    assert side_by_side(host(dram=10, bandwidth=1e10), [(100, 300)], 0, swapped=700) == [100, 100]


def test_updates_share_cores() -> None:
    """Each has 2 of 4 cores. At 90 the shorter has had its 180 ns of one; the other has 120 left, on 3 cores."""
    assert side_by_side(host(cores=4), [(100, 0), (60, 0)], threads=3) == [130, 90]


def test_an_update_waits_for_its_cores_when_its_bytes_are_through() -> None:
    """On one of two cores each it takes twice as long; host memory has room for both."""
    assert side_by_side(host(cores=2, dram=100), [(100, 800), (100, 800)], threads=2) == [200, 200]


def test_an_update_waits_for_its_bytes_when_it_has_calculated() -> None:
    """8 bytes/ns each of 10: both get 5, though there are cores enough."""
    assert side_by_side(host(cores=8, dram=10), [(100, 800), (100, 800)], threads=2) == [160, 160]


def test_updates_one_after_the_other_do_not_slow_each_other() -> None:
    hand = Hand()
    hand.task(TaskKind.UPDATE, gpu=None)
    hand.task(TaskKind.UPDATE, gpu=None)
    step = run_step(hand.schedule(), Demands(host(cores=2, dram=8), Works([(100, 800), (50, 400)], 2), 1))
    assert step.end_ns == [100, 150]


@given(
    count=st.integers(1, len(LANES)),
    threads=st.integers(1, 12),
    cores=st.integers(1, 12),
    rate=st.integers(1, 20),
    dram=st.integers(1, 16),
)
def test_equal_updates_together(count: int, threads: int, cores: int, rate: int, dram: int) -> None:
    """Each lasts 720720 ns, times the cores that all want over those that there are, or the same of DRAM.

    720720 is a multiple of 1 … 16, so that nothing is rounded.
    """
    duration = 720_720
    wanted = max(count * min(threads, cores) / cores, count * min(rate, dram) / dram, 1)
    ends = side_by_side(host(cores=cores, dram=dram), [(duration, duration * rate)] * count, threads)
    assert ends == [round(duration * wanted)] * count


def test_a_reduction_keeps_the_threads_busy_while_it_moves_its_bytes() -> None:
    """Alone it would take 100 ns on both cores. An update wants both, too, and no memory: both last twice as long."""
    hand = Hand()
    hand.task(TaskKind.REDUCE, gpu=None)
    hand.task(TaskKind.UPDATE, gpu=None, lane=Lane.COLLECTIVE)
    step = run_step(hand.schedule(), Demands(host(cores=2, dram=8), Works([(0, 800), (100, 0)], 2), 1))
    assert step.end_ns == [200, 200]


def test_where_dram_slows_nothing_a_reduction_takes_no_time() -> None:
    hand = Hand()
    hand.task(TaskKind.REDUCE, gpu=None)
    assert run_step(hand.schedule(), Demands(host(cores=2), Works([(0, 800)], 2), 1)).end_ns == [0]


@pytest.mark.parametrize(("threads", "slowed"), [(2, 160), (0, 80)])
def test_the_traces_threads_and_bytes(threads: int, slowed: int) -> None:
    """Layer 1 updates in 80 ns: it reads 200 bytes of weights, gradient and state each, and writes two of them."""
    trace = replace(tiny_trace(), threads=threads)
    hand = Hand()
    hand.task(TaskKind.UPDATE, 1, gpu=None)
    alone = simulate(hand.schedule(gpu_peak=0, host_peak=0), trace, host(cores=2, dram=12.5))
    assert alone.step_time_ns == 80
    assert CostDurations(Costs(trace), host(), 1).host_bytes(hand.tasks[0]) == 3 * 200 + 2 * 200
    hand.task(TaskKind.UPDATE, 1, gpu=None, lane=Lane.COLLECTIVE)
    assert simulate(hand.schedule(gpu_peak=0, host_peak=0), trace, host(cores=2)).step_time_ns == slowed
