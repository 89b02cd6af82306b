"""Why a step takes as long as it does: the chain of tasks that decided its end, and what its time went to.

Walk back from the task that ended last, always to the predecessor that ended last. Time on that path that no task of
it fills is idle: in a simulation there is none, in a measurement it is what starting a task costs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ..schedule import Schedule, Task, TaskKind
from .replay import StepTimes


class Cause(Enum):
    """What time on the critical path is spent on. ``RECOMPUTE`` is a backward's repeated forward."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    P2P = "p2p"
    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    REDUCE = "reduce"
    UPDATE = "update"
    IDLE = "idle"


_CAUSES = {
    TaskKind.FORWARD: Cause.COMPUTE,
    TaskKind.BACKWARD: Cause.COMPUTE,
    TaskKind.BACKWARD_INPUT: Cause.COMPUTE,
    TaskKind.BACKWARD_WEIGHT: Cause.COMPUTE,
    TaskKind.UPDATE: Cause.UPDATE,
    TaskKind.REDUCE: Cause.REDUCE,
    TaskKind.ALLREDUCE: Cause.ALLREDUCE,
    TaskKind.REDUCE_SCATTER: Cause.REDUCE_SCATTER,
    TaskKind.ALL_GATHER: Cause.ALL_GATHER,
    TaskKind.SWAP_IN: Cause.SWAP_IN,
    TaskKind.SWAP_OUT: Cause.SWAP_OUT,
    TaskKind.P2P: Cause.P2P,
}


def critical_tasks(schedule: Schedule, times: StepTimes) -> tuple[int, ...]:
    """Ids of the tasks on the critical path, first to last. Of several that ended together, the lowest id counts."""
    ends = times.end_ns
    path: list[int] = []
    candidates: tuple[int, ...] = tuple(range(len(schedule.tasks)))
    while candidates:
        path.append(min(candidates, key=lambda task: (-ends[task], task)))
        candidates = schedule.predecessors[path[-1]]
    return tuple(reversed(path))


def critical_path(schedule: Schedule, times: StepTimes, forward_share: Callable[[Task], float]) -> dict[str, float]:
    """Shares of the step's time by cause, in the critical path; all causes are there, and the shares sum to 1.

    ``forward_share`` says which part of a backward's time (0 … 1) its forward takes; it counts as recompute, except
    for layers that have no forward task, whose only forward it is.
    """
    spent = dict.fromkeys(Cause, 0.0)
    has_forward = _layers_with_forward(schedule)
    until = max(times.end_ns, default=0)
    for number in reversed(critical_tasks(schedule, times)):
        task = schedule.tasks[number]
        end = min(times.end_ns[number], until)
        start = min(times.start_ns[number], end)
        spent[Cause.IDLE] += until - end
        recomputed = 0.0
        if task.kind.goes_back and has_forward[task.layer_first]:
            recomputed = (end - start) * forward_share(task)
        spent[Cause.RECOMPUTE] += recomputed
        spent[_CAUSES[task.kind]] += end - start - recomputed
        until = start
    spent[Cause.IDLE] += until - min(times.start_ns, default=0)
    total = times.duration_ns
    if not total:
        spent[Cause.IDLE] = total = 1
    return {cause.value: spent[cause] / total for cause in Cause}


def _layers_with_forward(schedule: Schedule) -> list[bool]:
    covered = [False] * schedule.layers
    for task in schedule.copies(TaskKind.FORWARD):
        for layer in range(task.layer_first, task.layer_last + 1):
            covered[layer] = True
    return covered
