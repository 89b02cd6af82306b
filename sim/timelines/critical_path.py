"""Why a step takes as long as it does: the tasks that decided its end, and what its time went to.

The *path* covers the step without gap or overlap. Walk back from the task that ended last, always to the predecessor
that ended last; of several, lane order counts before data, and data before memory. Every piece of it has a cause:

    compute, recompute    forwards and backwards; recompute is the forward that is repeated in, or for, a backward
    update, reduce, norm  optimizer steps, and the adding of gradients in host memory, and their norm there
    link:…                copies, by the link that was fullest on their way (``fullest_links.py``); where no machine is
                          known, by their lane: swap_in, swap_out, p2p, allreduce
    bubble                a GPU stands still while others compute what it waits for
    memory_wait           copies that make room, or that were late only because there was no room
    idle                  no task of the path runs: in a measurement, what starting a task costs

*Bubble.* When the walk comes to another GPU's compute lane while the lane where it has been stood still, that other
work is what this GPU waits for. The walk follows it, its computing counting as bubble, only back to where the GPU stood
still; then it goes on in the GPU's own lane. So a GPipe of equal stages shows a bubble of (N-1)/(M+N-1), as it should.

*Memory.* A dependency that is there only for memory (``reasons.py``) made a task late by as much as it ended after all
that the task needs besides. For so long, at most, the copies right before it count as memory_wait (they make room), and
then those right after it (with room, they would have run earlier, beside the computing before). Computing always counts
as itself: so memory_wait is about what more memory would save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

import msgspec

from ..hardware.machine import Machine
from ..schedule import Lane, Schedule, Task, TaskKind
from .fullest_links import fullest_links
from .reasons import Reason, Reasons
from .replay import StepTimes


class Cause(Enum):
    """Causes that have no name of a link in them."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    UPDATE = "update"
    REDUCE = "reduce"
    NORM = "norm"
    BUBBLE = "bubble"
    MEMORY_WAIT = "memory_wait"
    IDLE = "idle"


LINK = "link:"
"""How causes that name a link begin."""

_RANKS = {Reason.LANE: 0, Reason.DATA: 1, Reason.MEMORY: 2}
_WORK = {
    TaskKind.RECOMPUTE: Cause.RECOMPUTE,
    TaskKind.UPDATE: Cause.UPDATE,
    TaskKind.REDUCE: Cause.REDUCE,
    TaskKind.NORM: Cause.NORM,
}


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Time on the critical path, from the step's beginning: what for, and in which task (None: in none)."""

    start_ns: int
    end_ns: int
    cause: str
    task: int | None


class CriticalPath(msgspec.Struct, frozen=True):
    """The pieces of the critical path of step ``step``, first to last, without gap from its beginning to its end."""

    pieces: tuple[Piece, ...]
    step: int = 0

    @property
    def tasks(self) -> tuple[int, ...]:
        """The tasks on it, first to last."""
        return tuple(dict.fromkeys(piece.task for piece in self.pieces if piece.task is not None))

    def shares(self) -> dict[str, float]:
        """Shares of the step by cause, which sum to 1; of links and lanes only those that occur."""
        spent = dict.fromkeys((cause.value for cause in Cause), 0)
        for piece in self.pieces:
            spent[piece.cause] = spent.get(piece.cause, 0) + piece.end_ns - piece.start_ns
        total = sum(spent.values())
        if not total:
            return {cause: float(cause == Cause.IDLE.value) for cause in spent}
        return {cause: time / total for cause, time in spent.items()}


def critical_path(
    schedule: Schedule, times: StepTimes, forward_share: Callable[[Task], float], machine: Machine | None = None
) -> CriticalPath:
    """The critical path of a step.

    ``forward_share`` says which part of a backward's time (0 … 1) its forward takes; it counts as recompute, except
    for layers that have no forward task, whose only forward it is.
    """
    reasons = Reasons(schedule)
    stretches = list(reversed(list(_Walk(schedule, times, reasons).back())))
    copies = [stretch.task for stretch in stretches if stretch.task is not None and _is_copy(schedule, stretch.task)]
    links = fullest_links(schedule, times, machine, copies) if machine else {}
    _mark_memory(stretches, schedule, times, reasons)
    repeated = _shares_of_repeated_forwards(schedule, forward_share)
    begin = min(times.start_ns, default=0)
    pieces = (
        Piece(start - begin, end - begin, cause, stretch.task)
        for stretch in stretches
        for start, end, cause in _causes(stretch, schedule, repeated, links)
        if end > start
    )
    return CriticalPath(tuple(pieces))


class _Stretch:
    """A task's time on the path (task None: nobody's). ``for_memory_ns`` at its beginning and at its end are waiting
    for memory; ``reason`` is why the next stretch's task waited for this one (None: it did not)."""

    __slots__ = ("bubble", "end", "memory_first", "memory_last", "reason", "start", "task")

    def __init__(self, task: int | None, start: int, end: int, reason: Reason | None, bubble: bool) -> None:
        self.task, self.start, self.end, self.reason, self.bubble = task, start, end, reason, bubble
        self.memory_first = self.memory_last = 0

    @property
    def left_ns(self) -> int:
        """What is not waiting for memory."""
        return self.end - self.start - self.memory_first - self.memory_last


class _Walk:
    """The walk back over one step."""

    def __init__(self, schedule: Schedule, times: StepTimes, reasons: Reasons) -> None:
        self._schedule, self._times, self._reasons = schedule, times, reasons
        self._begin = min(times.start_ns, default=0)
        self._lane_before: dict[int, int] = {}  # of each task in a compute lane, the one before it there
        for (_, lane), ids in schedule.lanes.items():
            if lane is Lane.COMPUTE:
                self._lane_before.update(zip(ids[1:], ids, strict=False))

    def back(self) -> Iterator[_Stretch]:
        """Stretches of the path, last to first."""
        ends = self._times.end_ns
        task: int | None = min(range(len(ends)), key=lambda task: (-ends[task], task), default=None)
        until = max(ends, default=0)
        reason: Reason | None = None
        stood: int | None = None  # the task whose lane we are in
        floor: int | None = None  # while that lane stands still: since when
        while task is not None:
            lowest = self._begin if floor is None else floor
            end = max(min(ends[task], until), lowest)
            start = max(min(self._times.start_ns[task], end), lowest)
            if end < until:
                yield _Stretch(None, end, until, None, False)
            computes = self._schedule.tasks[task].lane is Lane.COMPUTE
            yield _Stretch(task, start, end, reason, floor is not None and computes)
            until = start
            if floor is not None and start <= floor:
                assert stood is not None
                task, reason, floor = self._lane_before.get(stood), Reason.LANE, None
                continue
            if computes and floor is None:
                stood = task
            task, reason = self._latest(task)
            if floor is None and task is not None and stood is not None and self._is_elsewhere(task, stood):
                since = self._idle_since(stood)
                floor = since if since < min(ends[task], until) else None
        if until > self._begin:
            yield _Stretch(None, self._begin, until, None, False)

    def _latest(self, task: int) -> tuple[int | None, Reason | None]:
        """The predecessor that ended last, and why it is one."""
        ends = self._times.end_ns
        before = self._schedule.predecessors[task]
        latest = max((ends[number] for number in before), default=0)
        last = [(self._reasons.of(number, task), number) for number in before if ends[number] == latest]
        reason, number = min(last, key=lambda item: (_RANKS[item[0]], item[1]), default=(None, None))
        return number, reason

    def _is_elsewhere(self, task: int, stood: int) -> bool:
        """Whether a task is in the compute lane of another GPU."""
        other, own = self._schedule.tasks[task], self._schedule.tasks[stood]
        return other.lane is Lane.COMPUTE and other.gpu != own.gpu

    def _idle_since(self, stood: int) -> int:
        before = self._lane_before.get(stood)
        return self._begin if before is None else self._times.end_ns[before]


def _mark_memory(stretches: list[_Stretch], schedule: Schedule, times: StepTimes, reasons: Reasons) -> None:
    """Find the copies that are waiting for memory. ``stretches`` are first to last."""
    ends, begin = times.end_ns, min(times.start_ns, default=0)
    for at, stretch in enumerate(stretches):
        if stretch.reason is not Reason.MEMORY or stretch.task is None:
            continue
        earlier, later = range(at, -1, -1), range(at + 1, len(stretches))
        after = next(task for place in later if (task := stretches[place].task) is not None)
        needed = max((ends[number] for number in reasons.needed(after)), default=begin)
        late = max(0, ends[stretch.task] - needed)
        for other in _copies_at(earlier, stretches, schedule):
            if not late:
                break
            taken = min(late, other.left_ns)
            other.memory_last, late = other.memory_last + taken, late - taken
        for other in _copies_at(later, stretches, schedule):
            if not late:
                break
            taken = min(late, other.left_ns)
            other.memory_first, late = other.memory_first + taken, late - taken


def _copies_at(places: Iterable[int], stretches: Sequence[_Stretch], schedule: Schedule) -> Iterator[_Stretch]:
    """The stretches at these places, as long as they are copies (or nobody's time, which is left out)."""
    for place in places:
        stretch = stretches[place]
        if stretch.task is not None:
            if not _is_copy(schedule, stretch.task):
                return
            yield stretch


def _is_copy(schedule: Schedule, task: int) -> bool:
    return schedule.tasks[task].kind.is_copy


def _causes(
    stretch: _Stretch, schedule: Schedule, repeated: Callable[[Task], float], links: dict[int, str]
) -> Iterator[tuple[int, int, str]]:
    """A stretch cut by cause."""
    start, end = stretch.start, stretch.end
    if stretch.task is None:
        yield start, end, Cause.IDLE.value
        return
    task = schedule.tasks[stretch.task]
    if task.kind.is_copy:
        first, last = start + stretch.memory_first, end - stretch.memory_last
        yield start, first, Cause.MEMORY_WAIT.value
        yield first, last, LINK + links[task.id] if task.id in links else task.kind.value
        yield last, end, Cause.MEMORY_WAIT.value
    elif stretch.bubble:
        yield start, end, Cause.BUBBLE.value
    elif task.kind in _WORK:
        yield start, end, _WORK[task.kind].value
    else:
        again = start + round((end - start) * repeated(task))
        yield start, again, Cause.RECOMPUTE.value
        yield again, end, Cause.COMPUTE.value


def _shares_of_repeated_forwards(schedule: Schedule, forward_share: Callable[[Task], float]) -> Callable[[Task], float]:
    """Which part of a task's time a forward takes that was done before."""
    done = {
        layer for task in schedule.copies(TaskKind.FORWARD) for layer in range(task.layer_first, task.layer_last + 1)
    }
    return lambda task: forward_share(task) if task.kind.goes_back and task.layer_first in done else 0.0
