"""Which copies go first, on machines that share links by priority.

    0    a GPU's compute lane stands still and waits for this copy: directly, or through other copies only
    1    all else that moves: prefetches, copies between GPUs, all-reduces, reductions in host memory
    2    copies out of a GPU

A lower number goes first. A copy becomes urgent while it waits or while it is under way, and then stays so: the lane
stands still until it has ended. Behind a task that computes nothing is urgent: there the lane will wait for that one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..schedule import Lane, Schedule, TaskKind


class Urgency:
    """Ranks of a schedule's copies while it runs; ``rerank(task, rank)`` tells the links of a change."""

    def __init__(self, schedule: Schedule, rerank: Callable[[int, int], None]) -> None:
        self._tasks, self._predecessors = schedule.tasks, schedule.predecessors
        self._rerank = rerank
        self._urgent: set[int] = set()

    def rank(self, task: int) -> int:
        """The rank of a task's flows that start now."""
        if task in self._urgent:
            return 0
        return 2 if self._tasks[task].kind is TaskKind.SWAP_OUT else 1

    def stands_before(self, task: int, ends: Sequence[int | None]) -> None:
        """A lane stands still before ``task``; ``ends`` says which tasks have ended."""
        if self._tasks[task].lane is not Lane.COMPUTE:
            return
        waiting = [task]
        while waiting:
            for before in self._predecessors[waiting.pop()]:
                if ends[before] is None and before not in self._urgent and self._tasks[before].kind.is_copy:
                    self._urgent.add(before)
                    self._rerank(before, 0)
                    waiting.append(before)
