"""Transfers by priority: what a standing compute lane waits for, then other copies, then copies out of GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from sim.builders import build
from sim.engine.bounds import bound_ns
from sim.engine.durations import CostDurations, Demands
from sim.engine.simulate import run_step
from sim.hardware.machine import Gpu, Host, Link, Machine, Sharing
from sim.schedule import Task, TaskKind
from tests.random_plans import random_case
from tests.sim.handmade import Hand, plan
from traces.costs import Costs

LONG = 1000


def one_uplink(gpus: int, sharing: Sharing) -> Machine:
    """One byte a nanosecond for all GPUs together, both directions together."""
    host = Host(memory_bytes=None, dram_bandwidth=1e12, cores=1)
    cards = (Gpu(name="G", memory_bytes=10**9, bandwidth=1e12, link="up"),) * gpus
    links = (Link(name="up", bandwidth=1e9, both_directions=1e9),)
    return Machine(name="up", host=host, gpus=cards, links=links, sharing=sharing)


@dataclass
class Story:
    """A schedule on some GPUs: copies of 100 bytes, and computing for given times."""

    gpus: int
    hand: Hand = field(init=False)
    computing: dict[int, int] = field(default_factory=dict)
    threads: int = 0

    def __post_init__(self) -> None:
        self.hand = Hand(plan(gpus=self.gpus, minibatch=self.gpus))

    def copy(self, kind: TaskKind, gpu: int, *after: int) -> int:
        return self.hand.task(kind, gpu=gpu, bytes=100, waits_for=after)

    def compute(self, gpu: int, duration: int, *after: int) -> int:
        task = self.hand.task(TaskKind.FORWARD, gpu=gpu, waits_for=after)
        self.computing[task] = duration
        return task

    def compute_ns(self, task: Task) -> int:
        return self.computing[task.id]

    def host_bytes(self, task: Task) -> int:
        raise AssertionError(f"{task} is not in the host")

    def ends(self, sharing: Sharing, *tasks: int) -> list[int]:
        step = run_step(self.hand.schedule(), Demands(one_uplink(self.gpus, sharing), self, self.gpus))
        return [step.end_ns[task] for task in tasks]


def test_a_fetch_that_compute_waits_for_goes_before_a_prefetch() -> None:
    story = Story(gpus=2)
    fetch = story.copy(TaskKind.SWAP_IN, 0)
    story.compute(0, 1, fetch)
    story.compute(1, LONG)
    prefetch = story.copy(TaskKind.SWAP_IN, 1)
    story.compute(1, 1, prefetch)
    assert story.ends(Sharing.FAIR, fetch, prefetch) == [200, 200]
    assert story.ends(Sharing.PRIORITY, fetch, prefetch) == [100, 200]


def test_a_prefetch_goes_before_an_offload() -> None:
    story = Story(gpus=1)
    offload = story.copy(TaskKind.SWAP_OUT, 0)
    story.compute(0, LONG)
    prefetch = story.copy(TaskKind.SWAP_IN, 0)
    story.compute(0, 1, prefetch)
    assert story.ends(Sharing.FAIR, offload, prefetch) == [200, 200]
    assert story.ends(Sharing.PRIORITY, offload, prefetch) == [200, 100]


def test_a_prefetch_becomes_urgent_when_compute_comes_to_wait_for_it() -> None:
    story = Story(gpus=2)
    story.compute(0, 50)
    late = story.copy(TaskKind.SWAP_IN, 0)
    story.compute(0, 1, late)
    story.compute(1, LONG)
    prefetch = story.copy(TaskKind.SWAP_IN, 1)
    story.compute(1, 1, prefetch)
    assert story.ends(Sharing.PRIORITY, late, prefetch) == [50 + 75, 200]  # each has 25 bytes at 50


@pytest.mark.parametrize("before", [TaskKind.SWAP_IN, TaskKind.SWAP_OUT])
def test_copies_that_an_urgent_one_waits_for_are_urgent(before: TaskKind) -> None:
    """As one lane fetches both, or as the second needs the room that the first frees."""
    story = Story(gpus=2)
    first = story.copy(before, 0)
    second = story.copy(TaskKind.SWAP_IN, 0, first)
    story.compute(0, 1, second)
    story.compute(1, LONG)
    prefetch = story.copy(TaskKind.SWAP_IN, 1)
    story.compute(1, 1, prefetch)
    assert story.ends(Sharing.FAIR, first, second, prefetch) == [200, 300, 200]
    assert story.ends(Sharing.PRIORITY, first, second, prefetch) == [100, 200, 300]


def test_what_only_a_later_computation_needs_is_not_urgent() -> None:
    """GPU 1 stands still for its own fetch and for a computation of GPU 0, which has yet to start."""
    story = Story(gpus=2)
    story.compute(0, LONG)
    prefetch = story.copy(TaskKind.SWAP_IN, 0)
    computed = story.compute(0, 1, prefetch)
    fetch = story.copy(TaskKind.SWAP_IN, 1)
    story.compute(1, 1, fetch, computed)
    assert story.ends(Sharing.PRIORITY, prefetch, fetch) == [200, 100]


def test_urgent_copies_share_fairly() -> None:
    story = Story(gpus=3)
    fetches = [story.copy(TaskKind.SWAP_IN, gpu) for gpu in range(3)]
    for gpu, fetch in enumerate(fetches):
        story.compute(gpu, 1, fetch)
    assert story.ends(Sharing.PRIORITY, *fetches) == [300, 300, 300]


@pytest.mark.parametrize("seed", range(12))
def test_any_plan_runs_by_priority_within_the_bound_and_always_alike(seed: int) -> None:
    case = random_case(seed)
    gpus = len(case.machine.gpus)
    machine = one_uplink(gpus, Sharing.PRIORITY)
    schedule = build(case.plan, case.trace, machine, extrapolate=True)
    demands = Demands(machine, CostDurations(Costs(case.trace, extrapolate=True), machine, gpus), gpus)
    step = run_step(schedule, demands)
    assert step.duration_ns >= bound_ns(schedule, demands)
    assert all(
        step.start_ns[task.id] >= max((step.end_ns[before] for before in schedule.predecessors[task.id]), default=0)
        for task in schedule.tasks
    )
    again = run_step(schedule, demands)
    assert (again.start_ns, again.end_ns) == (step.start_ns, step.end_ns)
