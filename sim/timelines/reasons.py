"""Why a task waits for another one: for its lane, for data, or only for memory.

A schedule's dependencies do not say what they are there for, and it follows from what the two tasks do.
"""

from __future__ import annotations

from enum import Enum

from ..schedule import Buffer, Schedule, Task


class Reason(Enum):
    """What a dependency is there for.

    ``LANE``: both take their turn in one lane. ``DATA``: they touch the same tensor, and one of them writes or frees
    it. ``MEMORY``: nothing but the room that the first one makes for what the second one allocates.
    """

    LANE = "lane"
    DATA = "data"
    MEMORY = "memory"


class Reasons:
    """The reasons in one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._users: list[list[int]] = [[] for _ in schedule.buffers]
        for task in schedule.tasks:
            for number in {*task.reads, *task.writes}:
                self._users[number].append(task.id)

    def of(self, before: int, task: int) -> Reason:
        """Why ``task`` waits for ``before``, one of its predecessors.

        Without common lane and buffer it is memory if ``before`` frees addresses that ``task`` allocates, or, where
        buffers are counted and not placed, any buffer of that memory. Else it is data: of the host's store, say, for
        which no buffers stand.
        """
        tasks, buffers = self._schedule.tasks, self._schedule.buffers
        first, then = tasks[before], tasks[task]
        if {*first.lanes} & {*then.lanes}:
            return Reason.LANE
        if _share_data(first, then):
            return Reason.DATA
        freed, wanted = [buffers[i] for i in first.frees], [buffers[i] for i in then.allocates]
        return Reason.MEMORY if any(_reuses(new, old) for new in wanted for old in freed) else Reason.DATA

    def needed(self, task: int) -> set[int]:
        """What must have ended before ``task`` starts if there were memory for everything: its predecessors, those for
        memory aside, and whatever of data they stand for (a dependency on a task covers earlier ones of its lane)."""
        then = self._schedule.tasks[task]
        needed = {p for p in self._schedule.predecessors[task] if self.of(p, task) is not Reason.MEMORY}
        for number in {*then.reads, *then.writes}:
            for user in self._users[number]:
                if user < task and _share_data(self._schedule.tasks[user], then):
                    needed.add(user)
        return needed


def _share_data(first: Task, then: Task) -> bool:
    """Whether one of them writes, or the later one frees, what the other one touches."""
    touched = {*first.reads, *first.writes}
    return bool({*then.reads, *then.writes} & {*first.writes} or {*then.writes, *then.frees} & touched)


def _reuses(new: Buffer, old: Buffer) -> bool:
    """Whether a buffer takes memory that another one had."""
    if new.gpu != old.gpu or not new.bytes or not old.bytes:
        return False
    if new.offset is None or old.offset is None:
        return True
    return new.offset < old.offset + old.bytes and old.offset < new.offset + new.bytes
