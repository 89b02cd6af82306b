"""Memory while a schedule runs: every allocation must find the place that the plan promised it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from ..errors import ScheduleError
from ..schedule import Schedule


def check_memory(schedule: Schedule, start_ns: Sequence[int], end_ns: Sequence[int], order: Sequence[int]) -> None:
    """Replay what tasks allocate when they start and free when they end.

    ``order`` has all tasks, each after those that it waits for; what happens at one time, happens in that order.
    Raises ScheduleError, naming task, buffer and bytes, for a buffer that is allocated twice or freed when it is not
    there, for more bytes than planned, a place beyond the plan or in use, and for buffers left at the end.
    """
    changes = _Changes(schedule, start_ns, end_ns, order)
    changes.check_lives()
    changes.check_totals()
    changes.check_places()


class _Changes:
    """Every allocation and free of a step, in the order in which they happen: one entry of each array."""

    def __init__(
        self, schedule: Schedule, start_ns: Sequence[int], end_ns: Sequence[int], order: Sequence[int]
    ) -> None:
        self._schedule, tasks = schedule, schedule.tasks
        allocated = [buffer for task in tasks for buffer in task.allocates]
        freed = [buffer for task in tasks for buffer in task.frees]
        task = np.repeat(
            np.tile(np.arange(len(tasks)), 2),
            [len(task.allocates) for task in tasks] + [len(task.frees) for task in tasks],
        )
        frees = np.arange(len(task)) >= len(allocated)
        # Floats, as times may be beyond any integer of fixed size; rounding keeps their order, and ties follow `order`.
        times = np.where(frees, np.array(end_ns, float)[task], np.array(start_ns, float)[task])
        place = np.empty(len(tasks), int)
        place[order] = np.arange(len(tasks))
        by_time = np.lexsort((2 * place[task] + frees, times))
        self._tasks, self._frees = task[by_time], frees[by_time]
        self._buffers = np.array(allocated + freed, int)[by_time]

    def check_lives(self) -> None:
        """Each buffer is allocated, freed, and perhaps so again."""
        by_buffer = np.argsort(self._buffers, kind="stable")
        buffers, frees = self._buffers[by_buffer], self._frees[by_buffer]
        other = buffers[1:] != buffers[:-1]
        was_free = np.concatenate([[True], other | frees[:-1]])[: len(buffers)]
        wrong = by_buffer[frees == was_free]
        if len(wrong):
            at = wrong.min()
            raise self._broken(at, "which is not allocated" if self._frees[at] else "which is allocated already")
        left = buffers[~frees & np.concatenate([other, [True]])[: len(buffers)]]
        if len(left):
            names = ", ".join(str(self._schedule.buffers[number]) for number in left)
            raise ScheduleError((f"never freed: {names}",))

    def check_totals(self) -> None:
        """No device, nor the host, holds more bytes than planned."""
        plan, buffers = self._schedule.memory, self._schedule.buffers
        device = np.array([-1 if buffer.gpu is None else buffer.gpu for buffer in buffers], int)[self._buffers]
        change = np.array([buffer.bytes for buffer in buffers], int)[self._buffers] * np.where(self._frees, -1, 1)
        for gpu, promised in [(-1, plan.host_peak_bytes), *enumerate(plan.gpu_peak_bytes)]:
            here = np.flatnonzero(device == gpu)
            stays = sum(buffer.bytes for buffer in self._schedule.residents if buffer.gpu == gpu)
            held = np.cumsum(change[here]) + (plan.host_store_bytes if gpu == -1 else stays)
            beyond = here[(held > promised) & ~self._frees[here]]
            if len(beyond):
                at = beyond[0]
                most = held[np.searchsorted(here, at)]
                raise self._broken(at, f"{most} B are held then, {promised} B are planned")

    def check_places(self) -> None:
        """Buffers with a place lie within the plan, and over no other that is in use."""
        buffers, promised = self._schedule.buffers, self._schedule.memory.gpu_peak_bytes
        starts = [-1 if buffer.offset is None or not buffer.bytes else buffer.offset for buffer in buffers]
        stops = [start + buffer.bytes for start, buffer in zip(starts, buffers, strict=True)]
        devices = [-1 if buffer.gpu is None else buffer.gpu for buffer in buffers]
        places: list[list[int]] = [[] for _ in promised]  # of each GPU, where buffers in use start: ascending
        owners: list[list[int]] = [[] for _ in promised]  # and which these are
        for resident in sorted(self._schedule.residents, key=lambda buffer: buffer.offset or 0):
            if starts[resident.id] >= 0:
                places[devices[resident.id]].append(starts[resident.id])
                owners[devices[resident.id]].append(resident.id)
        here = np.flatnonzero((np.array(starts, int) >= 0)[self._buffers])
        changes = zip(here.tolist(), self._buffers[here].tolist(), self._frees[here].tolist(), strict=True)
        for at, buffer, frees in changes:
            gpu, start, stop = devices[buffer], starts[buffer], stops[buffer]
            place, owner = places[gpu], owners[gpu]
            index = bisect_left(place, start)
            if frees:
                del place[index], owner[index]
                continue
            if stop > promised[gpu]:
                raise self._broken(at, f"which ends beyond the {promised[gpu]} B planned")
            if index < len(place) and place[index] < stop:
                raise self._broken(at, f"over {buffers[owner[index]]}, which is in use")
            if index and stops[owner[index - 1]] > start:
                raise self._broken(at, f"over {buffers[owner[index - 1]]}, which is in use")
            place.insert(index, start)
            owner.insert(index, buffer)

    def _broken(self, at: int, why: str) -> ScheduleError:
        task, buffer = self._schedule.tasks[self._tasks[at]], self._schedule.buffers[self._buffers[at]]
        return ScheduleError((f"{task} {'frees' if self._frees[at] else 'allocates'} {buffer}, {why}",))
