"""A step in simulated time.

A task starts when the last of its predecessors has ended. What nothing can slow (computing, and copies over links that
never fill up) lasts a known time, so its end is known as soon as its predecessors' ends are, even if they lie in the
future: times spread along the dependencies at once. Only flows that others may slow need a clock, SimPy's. It stops
when one of them starts or ends, and when its rank may change.

    compute  ■■■■■■■■■■■■■■■■■■■■■■■     ■■■■■■■■■■■■■■
    flow             ├───────────────────┤
             known from the start │ … but this end, and what follows, only when the clock gets there
"""

from __future__ import annotations

import math
from collections.abc import Generator
from heapq import heappop, heappush

import simpy

from ..errors import Stalled
from ..hardware.fluid import whole_ns
from ..hardware.machine import Sharing
from ..schedule import Schedule
from ..timelines.replay import StepTimes
from .contention import Contention
from .device_memory import check_memory
from .durations import Demands
from .urgency import Urgency


class Run:
    """One step in flight. Starts are the latest known end of a predecessor; ends are None until they are known."""

    def __init__(self, schedule: Schedule, demands: Demands) -> None:
        contention = Contention(schedule, demands)
        count = len(schedule.tasks)
        self._schedule = schedule
        self._durations, self._shared = contention.durations_ns, contention.shared
        self._successors = schedule.successors
        self._awaited = [len(before) for before in schedule.predecessors]
        self._starts = [0] * count
        self._ends: list[int | None] = [None] * count
        self._known: list[int] = []  # tasks whose end has become known, and their successors do not know it yet
        self._order: list[int] = []  # tasks whose end is known, each after its predecessors
        self._due: list[tuple[int, int]] = []  # a heap: when flows start, and whose
        self._fluid = demands.fabric.fluid()
        self._under_way: dict[int, int] = {}  # how many flows of a task are
        by_priority = demands.sharing is Sharing.PRIORITY
        self._urgency = Urgency(schedule, self._ends, self._rerank) if by_priority else None

    def times(self) -> StepTimes:
        """Run to the end.

        Raises Stalled if no task can go on, and ScheduleError if the memory plan does not hold.
        """
        for task, awaited in enumerate(self._awaited):
            if not awaited:
                self._set_out(task)
        self._spread()
        self._pass_alone()
        if self._due:
            env = simpy.Environment()
            env.process(self._clock(env))
            env.run()
        ends = [end for end in self._ends if end is not None]
        if len(ends) < len(self._ends):
            raise Stalled(self._blocked())
        check_memory(self._schedule, self._starts, ends, self._order)
        return StepTimes(self._starts, ends)

    def _set_out(self, task: int) -> None:
        """The task's start is known."""
        duration = self._durations[task]
        if duration is None:
            heappush(self._due, (self._starts[task] + self._shared[task].delay_ns, task))
        else:
            self._ends[task] = self._starts[task] + duration
            self._known.append(task)

    def _spread(self) -> None:
        """Tell the successors of tasks whose end is known, theirs if that settles their end, and so on."""
        starts, ends, awaited, successors = self._starts, self._ends, self._awaited, self._successors
        known, order, urgency = self._known, self._order, self._urgency
        while known:
            task = known.pop()
            order.append(task)
            end = ends[task]
            assert end is not None
            if urgency is not None:
                urgency.comes_on(task, end)
            for later in successors[task]:
                if end > starts[later]:
                    starts[later] = end
                awaited[later] -= 1
                if not awaited[later]:
                    self._set_out(later)

    def _pass_alone(self) -> None:
        """While no flow is under way, let go those that will have ended before the next one starts."""
        due = self._due
        while due and not self._under_way:
            start, task = due[0]
            alone_ns = self._shared[task].alone_ns
            if alone_ns is None or any(start + alone_ns > other for other, _ in due[1:3]):  # a heap: the next is there
                return
            heappop(due)
            self._ends[task] = start + alone_ns
            self._known.append(task)
            self._spread()

    def _clock(self, env: simpy.Environment) -> Generator[simpy.Event, None, None]:
        """The process that lets time pass."""
        while (now := self._next_moment()) is not None:
            yield env.timeout(now - env.now)
            self._fluid.advance(now)
            while self._fluid.finished or (self._due and self._due[0][0] == now):
                self._end_flows(now)
                self._start_flows(now)
            if self._urgency is not None:
                self._urgency.look(now)
            self._pass_alone()

    def _next_moment(self) -> int | None:
        """When a flow starts or ends, or may become urgent; None if no flow is left."""
        moment: float = self._due[0][0] if self._due else math.inf
        end = self._fluid.next_end()
        if end < moment:
            moment = whole_ns(end)
        if self._urgency is not None and moment < math.inf:
            moment = min(moment, self._urgency.next_look())
        return None if moment == math.inf else int(moment)

    def _start_flows(self, now: int) -> None:
        """Start the flows of the tasks that are due."""
        while self._due and self._due[0][0] == now:
            _, task = heappop(self._due)
            streams = self._shared[task].streams
            rank = self._urgency.rank(task) if self._urgency is not None else 0
            self._under_way[task] = len(streams)
            for number, (loads, size, cap) in enumerate(streams):
                self._fluid.start(now, (task, number), loads, size, cap, rank)

    def _end_flows(self, now: int) -> None:
        """Tasks end with the last of their flows."""
        for task, _ in self._fluid.finished:
            self._under_way[task] -= 1
            if not self._under_way[task]:
                del self._under_way[task]
                work = self._shared[task]
                self._ends[task] = max(now, self._starts[task] + work.delay_ns + work.least_ns)
                self._known.append(task)
        self._fluid.finished.clear()
        self._spread()

    def _rerank(self, now: int, task: int, rank: int) -> None:
        """Give those flows of a task that are under way another rank."""
        if task in self._under_way:
            for number in range(len(self._shared[task].streams)):
                self._fluid.rerank(now, (task, number), rank)

    def _blocked(self) -> tuple[str, ...]:
        """For each lane that is not through, its next task and what that waits for."""
        tasks, ends = self._schedule.tasks, self._ends
        heads = [
            next((task for task in ids if ends[task] is None and tasks[task].lanes[0] == lane), None)
            for lane, ids in self._schedule.lanes.items()
        ]
        return tuple(
            f"{tasks[head]} waits for "
            + ", ".join(str(tasks[before]) for before in self._schedule.predecessors[head] if ends[before] is None)
            for head in heads
            if head is not None
        )
