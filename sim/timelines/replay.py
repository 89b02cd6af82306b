"""When the tasks of a step start and end, and what follows from that alone: changes of memory.

:func:`replay_times` evaluates a schedule with a given duration for every task, in one pass over the total order and
without events. It knows no shared links, so it serves bounds and checks under many timings; the engine is the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from ..errors import ScheduleError
from ..schedule import Buffer, Schedule, TensorKind


class MemoryChange(NamedTuple):
    """Bytes that a GPU (None: the host) begins (+) or ceases (-) to hold for a buffer."""

    time_ns: int
    buffer: Buffer
    delta_bytes: int

    @property
    def gpu(self) -> int | None:
        """Whose memory."""
        return self.buffer.gpu

    @property
    def tensor_kind(self) -> TensorKind:
        """What kind of tensor it holds."""
        return self.buffer.kind


@dataclass(frozen=True)
class StepTimes:
    """One step: start and end (ns) of every task, by task id.

    ``copied_bytes`` are the bytes every task really copied, by task id (None: what the tasks say). ``memory`` is what
    was really allocated and freed (None: the schedule's buffers, allocated at starts and freed at ends).
    """

    start_ns: Sequence[int]
    end_ns: Sequence[int]
    copied_bytes: Sequence[int] | None = None
    memory: Sequence[MemoryChange] | None = None

    @property
    def duration_ns(self) -> int:
        """From the first start to the last end; 0 without tasks."""
        return max(self.end_ns, default=0) - min(self.start_ns, default=0)


def in_sequence(runs: Iterable[Sequence[StepTimes]]) -> list[StepTimes]:
    """The steps of several runs as a timeline has them: each run begins where the one before it ended. The steps of a
    run may overlap; an isolated step is a run of its own."""
    placed: list[StepTimes] = []
    begin = 0
    for run in runs:
        by_ns = begin - min(min(step.start_ns, default=0) for step in run)
        placed += [_later(step, by_ns) for step in run]
        begin = max(begin, *(max(step.end_ns, default=0) for step in placed[-len(run) :]))
    return placed


def mean_period_ns(ends_ns: Sequence[int]) -> int:
    """Time from the end of one step to the end of the next, of steps that overlap: the mean over all but the first of
    them, before which there was none."""
    return round((ends_ns[-1] - ends_ns[0]) / (len(ends_ns) - 1))


def _later(step: StepTimes, by_ns: int) -> StepTimes:
    return StepTimes(
        start_ns=[time + by_ns for time in step.start_ns],
        end_ns=[time + by_ns for time in step.end_ns],
        copied_bytes=step.copied_bytes,
        memory=None if step.memory is None else [m._replace(time_ns=m.time_ns + by_ns) for m in step.memory],
    )


def replay_times(schedule: Schedule, duration_ns: Sequence[int]) -> StepTimes:
    """Times when every task lasts ``duration_ns[id]`` and starts as soon as its predecessors have ended.

    Raises ScheduleError if a task waits for a later one.
    """
    starts: list[int] = []
    ends: list[int] = []
    for number, (before, duration) in enumerate(zip(schedule.predecessors, duration_ns, strict=True)):
        if before and before[-1] >= number:
            tasks = schedule.tasks
            raise ScheduleError((f"{tasks[number]} waits for {tasks[before[-1]]}, which comes later in the order",))
        start = max([ends[task] for task in before], default=0)
        starts.append(start)
        ends.append(start + duration)
    return StepTimes(starts, ends)


def memory_changes(schedule: Schedule, times: StepTimes) -> list[MemoryChange]:
    """Every allocation and free of the step, by time; at equal times in no particular order."""
    if times.memory is not None:
        return sorted(times.memory, key=attrgetter("time_ns"))
    return sorted(_planned_changes(schedule, times), key=attrgetter("time_ns"))


def resident_changes(schedule: Schedule, start_ns: int, end_ns: int) -> Iterator[MemoryChange]:
    """What a step between these times holds throughout."""
    for buffer in schedule.residents:
        yield MemoryChange(start_ns, buffer, buffer.bytes)
        yield MemoryChange(end_ns, buffer, -buffer.bytes)


def _planned_changes(schedule: Schedule, times: StepTimes) -> Iterator[MemoryChange]:
    yield from resident_changes(schedule, min(times.start_ns, default=0), max(times.end_ns, default=0))
    for task, start, end in zip(schedule.tasks, times.start_ns, times.end_ns, strict=True):
        for time, ids, sign in ((start, task.allocates, 1), (end, task.frees, -1)):
            for number in ids:
                buffer = schedule.buffers[number]
                yield MemoryChange(time, buffer, sign * buffer.bytes)
