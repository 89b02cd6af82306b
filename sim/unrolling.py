"""Several steps of a schedule as one long schedule, without a barrier between them.

A task of a step waits for what it needs of the step before, and for nothing else:

* its lanes have done that step's tasks;
* home tensors: who reads a weight waits for its update, who writes a gradient for the update that reads the last one;
  so also for what stays on a GPU from step to step;
* memory: who first takes an address of a GPU waits for the last who gave it back; and where memory is counted, not
  placed (in the host, for each GPU that fills it), for all that the step before gave back.

And no task starts before all of the step before the last has ended, so that never more than two steps are under way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from .home import Ties, home_accesses, in_conflict
from .schedule import LaneKey, Schedule, Task
from .timelines.replay import StepTimes

Edge = tuple[int, int]
"""A task of one step that must have ended before a task of the next one starts."""


def unroll(schedule: Schedule, steps: int, ties: Ties) -> Schedule:
    """So many steps as one. Of step k, ids of tasks (and of buffers) are k times their number higher than in the
    schedule, and so on the whole in order; but what stays on a GPU is the same buffer in all steps, and those of later
    steps are empty. ``ties``: which layers share weights."""
    if steps == 1:
        return schedule
    edges = [*_home_edges(schedule, ties), *_resident_edges(schedule)]
    before = _by_later(schedule, [*edges, *_placed_edges(schedule), *_counted_edges(schedule)])
    ends_of_lanes = [ids[-1] for ids in schedule.lanes.values()]
    two_before = {ids[0]: ends_of_lanes for ids in schedule.lanes.values()}
    count = len(schedule.tasks)

    def waits(task: Task, step: int) -> tuple[int, ...]:
        own = [number + step * count for number in task.waits_for]
        last = [number + (step - 1) * count for number in before.get(task.id, ())] if step >= 1 else []
        older = [number + (step - 2) * count for number in two_before.get(task.id, ())] if step >= 2 else []
        return (*older, *last, *own)

    return replace(
        schedule,
        tasks=tuple(
            _shifted(task, step * count, numbers, waits(task, step))
            for step, numbers in enumerate(_buffer_numbers(schedule, steps))
            for task in schedule.tasks
        ),
        buffers=tuple(
            replace(
                buffer,
                id=buffer.id + step * len(schedule.buffers),
                bytes=0 if buffer.resident and step else buffer.bytes,
            )
            for step in range(steps)
            for buffer in schedule.buffers
        ),
    )


def _buffer_numbers(schedule: Schedule, steps: int) -> Iterator[Sequence[int]]:
    """For each step, the ids of the buffers that its tasks use."""
    for step in range(steps):
        later = step * len(schedule.buffers)
        yield [buffer.id if buffer.resident else buffer.id + later for buffer in schedule.buffers]


def split_steps(times: StepTimes, steps: int) -> list[StepTimes]:
    """Times of an unrolled schedule, step by step."""
    count = len(times.start_ns) // steps
    parts = [slice(step * count, (step + 1) * count) for step in range(steps)]
    return [StepTimes(times.start_ns[part], times.end_ns[part]) for part in parts]


def _shifted(task: Task, tasks: int, buffers: Sequence[int], waits_for: tuple[int, ...]) -> Task:
    def moved(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple([buffers[number] for number in ids])

    return replace(
        task,
        id=task.id + tasks,
        waits_for=waits_for,
        reads=moved(task.reads),
        writes=moved(task.writes),
        allocates=moved(task.allocates),
        frees=moved(task.frees),
    )


def _by_later(schedule: Schedule, edges: Iterable[Edge]) -> dict[int, tuple[int, ...]]:
    """By the later task, the earlier ones that count: of each other lane the last."""
    latest: dict[int, dict[LaneKey, int]] = {}
    for earlier, later in edges:
        lanes = schedule.tasks[earlier].lanes
        if not any(lane in schedule.tasks[later].lanes for lane in lanes):
            last = latest.setdefault(later, {})
            last[lanes[0]] = max(earlier, last.get(lanes[0], 0))
    return {later: tuple(sorted(by_lane.values())) for later, by_lane in latest.items()}


def _home_edges(schedule: Schedule, ties: Ties) -> Iterator[Edge]:
    for used in home_accesses(schedule, ties).values():
        yield from _across([(access.task, access.writes) for access in used])


def _across(used: Sequence[tuple[Task, bool]]) -> Iterator[Edge]:
    """Edges between the users of one tensor, in order and with whether they write it."""
    twice = [((step, task.id), writes) for step in range(2) for task, writes in used]
    for (step, earlier), (next_step, later) in in_conflict(twice):
        if step < next_step:
            yield earlier, later


def _resident_edges(schedule: Schedule) -> Iterator[Edge]:
    used: dict[int, list[tuple[Task, bool]]] = {buffer.id: [] for buffer in schedule.residents}
    for task in schedule.tasks:
        for number in dict.fromkeys(task.reads + task.writes):
            if number in used:
                used[number].append((task, number in task.writes))
    for users in used.values():
        yield from _across(users)


def _placed_edges(schedule: Schedule) -> Iterator[Edge]:
    """From who gave an address back last to who takes it first."""
    allocates, frees = _owners(schedule)
    for gpu in range(schedule.plan.gpus):
        spans = [
            (buffer.offset, buffer.offset + buffer.bytes, buffer.id)
            for number in allocates
            if (buffer := schedule.buffers[number]).gpu == gpu and buffer.offset is not None and buffer.bytes
        ]
        bounds = sorted({at for start, stop, _ in spans for at in (start, stop)})
        first, last = _painted(spans[::-1], bounds), _painted(spans, bounds)
        for taken, given in dict.fromkeys(zip(first, last, strict=True)):
            if taken is not None and given is not None:
                yield frees[given], allocates[taken]


def _painted(spans: Sequence[tuple[int, int, int]], bounds: Sequence[int]) -> list[int | None]:
    """Between every two bounds, the buffer whose span covers that place; of several, the last one."""
    painted: list[int | None] = [None] * max(0, len(bounds) - 1)
    for start, stop, number in spans:
        at, end = bisect_left(bounds, start), bisect_left(bounds, stop)
        painted[at:end] = [number] * (end - at)
    return painted


def _counted_edges(schedule: Schedule) -> Iterator[Edge]:
    """From all who give counted memory back to all who take it, each lane's last and first: of every GPU's memory and
    of the host memory that copies out of it fill."""
    allocates, frees = _owners(schedule)
    takers: dict[tuple[int | None, int | None], dict[LaneKey, int]] = {}
    givers: dict[tuple[int | None, int | None], dict[LaneKey, int]] = {}
    for number, taker in allocates.items():
        buffer, task = schedule.buffers[number], schedule.tasks[taker]
        if buffer.offset is None:
            part = buffer.gpu, task.gpu if buffer.gpu is None else None
            takers.setdefault(part, {}).setdefault(task.lanes[0], taker)
            giver = schedule.tasks[frees[number]]
            last = givers.setdefault(part, {})
            last[giver.lanes[0]] = max(giver.id, last.get(giver.lanes[0], 0))
    for part, first in takers.items():
        for later in first.values():
            for earlier in givers[part].values():
                yield earlier, later


def _owners(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """The tasks that allocate and free each buffer, in the order of allocations."""
    allocates = {number: task.id for task in schedule.tasks for number in task.allocates}
    frees = {number: task.id for task in schedule.tasks for number in task.frees}
    return allocates, frees
