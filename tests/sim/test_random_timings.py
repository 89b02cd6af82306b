"""However long tasks take, a schedule runs to its end and never exceeds its memory plan."""

import numpy as np
import pytest

from sim.builders import build
from sim.plan import Policy
from sim.schedule import Schedule
from tests.random_plans import random_case

TIMINGS = 1000


def random_times(schedule: Schedule, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends, (tasks, timings), of tasks that last anything between 0 and 1000."""
    draw = np.random.default_rng(seed)
    scale = draw.choice([1, 30, 1000], size=(len(schedule.tasks), TIMINGS))
    durations = np.floor(draw.random((len(schedule.tasks), TIMINGS)) * scale)
    starts, ends = np.zeros_like(durations), np.zeros_like(durations)
    for task, before in enumerate(schedule.predecessors):
        if before:
            starts[task] = ends[list(before)].max(axis=0)
        ends[task] = starts[task] + durations[task]
    return starts, ends


def lifetimes(schedule: Schedule) -> list[tuple[int, int]]:
    """Allocating and freeing task of every buffer."""
    born = {buffer: task.id for task in schedule.tasks for buffer in task.allocates}
    died = {buffer: task.id for task in schedule.tasks for buffer in task.frees}
    return [(born[buffer.id], died[buffer.id]) for buffer in schedule.buffers]


def most_held(schedule: Schedule, gpu: int | None, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Peak bytes of one memory, per timing; what is freed at a moment makes room for what is allocated then."""
    mine = [(b.bytes, *life) for b, life in zip(schedule.buffers, lifetimes(schedule), strict=True) if b.gpu == gpu]
    if not mine:
        return np.zeros(TIMINGS)
    sizes = np.array([size for size, _, _ in mine])
    times = np.concatenate([ends[[died for *_, died in mine]], starts[[born for _, born, _ in mine]]])
    changes = np.concatenate([-sizes, sizes])
    order = np.argsort(times, axis=0, kind="stable")
    return np.cumsum(changes[order], axis=0).max(axis=0)


@pytest.mark.parametrize("seed", range(20))
def test_a_thousand_random_timings(seed):
    case = random_case(seed)
    schedule = build(case.plan, case.trace, case.machine)
    starts, ends = random_times(schedule, seed)
    life = lifetimes(schedule)
    for gpu, planned in enumerate(schedule.memory.gpu_peak_bytes):
        assert most_held(schedule, gpu, starts, ends).max() <= planned
        placed = [b for b in schedule.buffers if b.gpu == gpu and b.offset is not None]
        assert all(b.offset + b.bytes <= planned for b in placed)
        for a in placed:
            for b in placed:
                if a.id < b.id and a.offset < b.offset + b.bytes and b.offset < a.offset + a.bytes:
                    a_first = ends[life[a.id][1]] <= starts[life[b.id][0]]
                    b_first = ends[life[b.id][1]] <= starts[life[a.id][0]]
                    assert np.all(a_first | b_first), (a, b)
    dynamic = schedule.memory.host_peak_bytes - schedule.memory.host_store_bytes
    assert most_held(schedule, None, starts, ends).max() <= dynamic


def test_the_twenty_schedules_differ_in_what_matters():
    plans = [random_case(seed).plan for seed in range(20)]
    assert len({plan.policy for plan in plans}) == len(Policy)
    assert {plan.gpus for plan in plans} == {1, 2, 3, 4}
