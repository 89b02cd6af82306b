"""Another simulator, as plain as can be: a SimPy process per lane, and every flow of every task shares all its links.

It has no memory, no priorities, and no thought for speed.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

import simpy

from sim.engine.durations import Demands
from sim.hardware.fluid import whole_ns
from sim.schedule import LaneKey, Schedule


class LaneProcesses:
    """One step of a schedule that does not stall."""

    def __init__(self, schedule: Schedule, demands: Demands) -> None:
        self._schedule, self._demands = schedule, demands
        self._env, self._fluid = simpy.Environment(), demands.fabric.fluid()
        self._changed = self._env.event()
        self._ended = [self._env.event() for _ in schedule.tasks]
        self._times = [(0, 0)] * len(schedule.tasks)

    def times(self) -> tuple[list[int], list[int]]:
        """Starts and ends of all tasks."""
        for lane in self._schedule.lanes:
            self._env.process(self._lane(lane))
        self._env.process(self._links())
        self._env.run(self._env.all_of(self._ended))
        return [start for start, _ in self._times], [end for _, end in self._times]

    def _lane(self, lane: LaneKey) -> Generator[simpy.Event, Any, None]:
        for task in self._schedule.tasks:
            if task.lanes[0] != lane:
                continue
            yield self._env.all_of([self._ended[before] for before in self._schedule.predecessors[task.id]])
            start = int(self._env.now)
            demand = self._demands.of(task)
            yield self._env.timeout(demand.delay_ns)
            through = [self._env.event() for _ in demand.flows]
            for event, (route, size) in zip(through, demand.flows, strict=True):
                self._fluid.start(self._env.now, event, route.loads, size, route.cap_for(size))
            self._changed.succeed()
            self._changed = self._env.event()
            yield self._env.all_of(through)
            self._times[task.id] = start, int(self._env.now)
            self._ended[task.id].succeed()

    def _links(self) -> Generator[simpy.Event, Any, None]:
        """Wake at the next end of a flow, or when a flow has started."""
        while True:
            next_end = self._fluid.next_end()
            waits = [self._changed]
            if next_end < math.inf:
                waits.append(self._env.timeout(max(0, whole_ns(next_end) - self._env.now)))
            yield self._env.any_of(waits)
            self._fluid.advance(self._env.now)
            for event in self._fluid.finished:
                event.succeed()
            self._fluid.finished.clear()
