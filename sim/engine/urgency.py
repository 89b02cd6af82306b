"""Which copies go first, on machines that share links by priority.

    0    a GPU's compute lane stands still and waits for this copy: directly, or through other copies only
    1    all else that moves: prefetches, copies between GPUs, all-reduces, updates and reductions in host memory
    2    copies out of a GPU

A lower number goes first. A copy becomes urgent while it waits or while it is under way, and then stays so: the lane
stands still until it has ended. Behind a task that computes nothing is urgent: there the lane will wait for that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import pairwise

from ..schedule import Lane, Schedule, TaskKind


class Urgency:
    """Ranks of a schedule's copies while it runs.

    ``ends`` says when tasks end, as far as that is known; ``rerank(now, task, rank)`` tells the links of a change.
    """

    def __init__(self, schedule: Schedule, ends: Sequence[int | None], rerank: Callable[[int, int, int], None]) -> None:
        self._tasks, self._predecessors = schedule.tasks, schedule.predecessors
        self._ends, self._rerank = ends, rerank
        self._urgent: set[int] = set()
        computing = [ids for (_, lane), ids in schedule.lanes.items() if lane is Lane.COMPUTE]
        self._next = {before: task for ids in computing for before, task in pairwise(ids)}
        self._looks = [(0, ids[0]) for ids in computing]  # a heap: when a lane comes to a task

    def rank(self, task: int) -> int:
        """The rank of a task's flows that start now."""
        if task in self._urgent:
            return 0
        return 2 if self._tasks[task].kind is TaskKind.SWAP_OUT else 1

    def comes_on(self, task: int, at: int) -> None:
        """If ``task``, which ends then, computes, its lane comes to the next one."""
        if (following := self._next.get(task)) is not None:
            heappush(self._looks, (at, following))

    def next_look(self) -> float:
        """When :meth:`look` has to be called next, as far as that is known; until then, infinity."""
        return self._looks[0][0] if self._looks else math.inf

    def look(self, now: int) -> None:
        """Make urgent what lanes that stand still at this time wait for."""
        while self._looks and self._looks[0][0] <= now:
            waiting = [heappop(self._looks)[1]]
            while waiting:
                for before in self._predecessors[waiting.pop()]:
                    if (
                        not self._has_ended(before, now)
                        and before not in self._urgent
                        and self._tasks[before].kind.is_copy
                    ):
                        self._urgent.add(before)
                        self._rerank(now, before, 0)
                        waiting.append(before)

    def _has_ended(self, task: int, now: int) -> bool:
        end = self._ends[task]
        return end is not None and end <= now
