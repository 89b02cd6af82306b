"""Which tasks have surely ended before which others start, whatever the timing.

Vector clocks (Fidge 1988, Mattern 1989) over lanes: a task's clock says how many tasks of each lane have ended when it
starts. As a lane runs its tasks in order, one number per lane says it all::

    lane a:  A0 → A1             clock of B1: a 2, b 1
                     ↘           so A0, A1 and B0 have ended when B1 starts
    lane b:  B0  →   B1
"""

from __future__ import annotations

from ..schedule import LaneKey, Schedule


class HappensBefore:
    """The order that lanes and ``waits_for`` force. Dependencies must be on existing, earlier tasks."""

    def __init__(self, schedule: Schedule) -> None:
        self.lanes: dict[LaneKey, int] = {key: number for number, key in enumerate(schedule.lanes)}
        self._lane: list[int] = []  # of each task: its own lane, and how many of its tasks have ended when it has
        self._place: list[int] = []
        self._clocks: list[list[int]] = []
        latest: dict[LaneKey, list[int]] = {}  # clock at the end of the lane's latest task
        ends: list[list[int]] = []  # clock at the end of each task
        length = [0] * len(self.lanes)
        for task in schedule.tasks:
            before = [ends[number] for number in task.waits_for]
            before += [latest[key] for key in task.lanes if key in latest]
            clock = list(map(max, *before)) if len(before) > 1 else list(before[0]) if before else [0] * len(length)
            end = list(clock)
            for key in task.lanes:
                lane = self.lanes[key]
                length[lane] += 1
                end[lane] = length[lane]
                latest[key] = end
            self._clocks.append(clock)
            ends.append(end)
            self._lane.append(self.lanes[task.lanes[0]])
            self._place.append(end[self._lane[-1]])

    def __call__(self, first: int, then: int) -> bool:
        """Whether task ``first`` has ended before task ``then`` starts. False for a task and itself."""
        return self._clocks[then][self._lane[first]] >= self._place[first]

    def ended(self, task: int) -> list[int]:
        """For each lane (numbered as in ``lanes``), how many of its tasks have ended when ``task`` starts."""
        return self._clocks[task]

    def place(self, task: int) -> tuple[int, int]:
        """A task's own lane, and how many of that lane's tasks have ended when it has."""
        return self._lane[task], self._place[task]
