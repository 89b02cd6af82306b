"""Memory while a schedule runs: every allocation must find the place that the plan promised it."""

from __future__ import annotations

from bisect import bisect_left, insort

from ..errors import ScheduleError
from ..schedule import Buffer, Schedule, Task


class DeviceMemory:
    """What every GPU and the host hold. Raises ScheduleError, naming task, buffer and bytes, if the plan is broken."""

    def __init__(self, schedule: Schedule) -> None:
        plan = schedule.memory
        self._buffers = schedule.buffers
        self._promised: dict[int | None, int] = {None: plan.host_peak_bytes, **dict(enumerate(plan.gpu_peak_bytes))}
        self._held: dict[int | None, int] = {**dict.fromkeys(self._promised, 0), None: plan.host_store_bytes}
        self._live: set[int] = set()
        # Placed buffers in use, as (start, end, id), disjoint and sorted.
        self._placed: dict[int | None, list[tuple[int, int, int]]] = {gpu: [] for gpu in self._promised}

    def allocate(self, task: Task) -> None:
        """Take what ``task`` allocates when it starts."""
        for number in task.allocates:
            buffer = self._buffers[number]
            if number in self._live:
                raise _broken(task, "allocates", buffer, "which is allocated already")
            self._live.add(number)
            self._held[buffer.gpu] += buffer.bytes
            if self._held[buffer.gpu] > self._promised[buffer.gpu]:
                where = f"{self._held[buffer.gpu]} B are held then, {self._promised[buffer.gpu]} B are planned"
                raise _broken(task, "allocates", buffer, where)
            if buffer.offset is not None and buffer.bytes:
                self._place(task, buffer, buffer.offset)

    def free(self, task: Task) -> None:
        """Give back what ``task`` frees when it ends."""
        for number in task.frees:
            buffer = self._buffers[number]
            if number not in self._live:
                raise _broken(task, "frees", buffer, "which is not allocated")
            self._live.remove(number)
            self._held[buffer.gpu] -= buffer.bytes
            if buffer.offset is not None and buffer.bytes:
                placed = self._placed[buffer.gpu]
                del placed[bisect_left(placed, (buffer.offset, buffer.offset + buffer.bytes, number))]

    def check_empty(self) -> None:
        """At the end of a step nothing may be left."""
        if self._live:
            left = ", ".join(str(self._buffers[number]) for number in sorted(self._live))
            raise ScheduleError((f"never freed: {left}",))

    def _place(self, task: Task, buffer: Buffer, offset: int) -> None:
        placed = self._placed[buffer.gpu]
        end = offset + buffer.bytes
        if end > self._promised[buffer.gpu]:
            raise _broken(task, "allocates", buffer, f"which ends beyond the {self._promised[buffer.gpu]} B planned")
        at = bisect_left(placed, (offset, end, buffer.id))
        for start, stop, other in placed[max(0, at - 1) : at + 1]:
            if start < end and offset < stop:
                raise _broken(task, "allocates", buffer, f"over {self._buffers[other]}, which is in use")
        insort(placed, (offset, end, buffer.id))


def _broken(task: Task, verb: str, buffer: Buffer, why: str) -> ScheduleError:
    return ScheduleError((f"{task} {verb} {buffer}, {why}",))
