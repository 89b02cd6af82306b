"""The simulator: a schedule runs on a machine, one SimPy process per lane.

    wait until all predecessors have ended → allocate → spend time, then send bytes → free → next task of the lane

Copies at the same time share links: see ``hardware/fluid.py``, and ``urgency.py`` for those that go first. Memory is
planned in the schedule; the run replays it and fails if a buffer does not have the place that the plan promised.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

import simpy
from msgspec.structs import replace

from traces.costs import Costs
from traces.schema import Trace

from ..errors import DoesNotFit, PlanError, ScheduleError, Stalled
from ..hardware.fluid import Fluid, whole_ns
from ..hardware.machine import Machine, Sharing
from ..schedule import Schedule
from ..timelines.critical_path import critical_path
from ..timelines.replay import StepTimes, in_sequence
from ..timelines.timeline import Timeline, TimelineInfo
from ..units import NS_PER_S
from .bounds import bound_ns
from .device_memory import DeviceMemory
from .durations import CostDurations, Demands, Durations, Flow, forward_share, used_durations
from .urgency import Urgency

_LONGEST_NS = 2**62
"""What the tables of a timeline can hold."""


def simulate(
    schedule: Schedule,
    trace: Trace,
    machine: Machine,
    *,
    steps: int = 1,
    extrapolate: bool = False,
    durations: Durations | None = None,
) -> Timeline:
    """Predict when every task of ``schedule`` starts and ends on ``machine``.

    A barrier separates steps and the simulation has no chance in it, so all steps are alike. ``durations`` replaces
    what the trace says about tasks that are no copies.

    Raises PlanError or DoesNotFit if the machine is too small, TraceError if the trace lacks a figure (unless
    ``extrapolate``), Stalled if no task can go on, ScheduleError if the memory plan does not hold.
    """
    if steps < 1:
        raise PlanError(f"{steps} steps asked for; simulate at least 1")
    costs = Costs(trace, extrapolate=extrapolate)
    _check(schedule, trace, machine)
    demands = Demands(machine, durations or CostDurations(costs, machine, schedule.plan.gpus), schedule.plan.gpus)
    step = run_step(schedule, demands)
    if steps * step.duration_ns > _LONGEST_NS:
        raise PlanError(
            f"{steps} step(s) take {steps * step.duration_ns / NS_PER_S:.3g} s, and times end at "
            f"{_LONGEST_NS / NS_PER_S:.3g} s; look for a layer's time, a speed or a link that is out of all proportion"
        )
    info = replace(
        TimelineInfo.of(schedule, machine.name, "simulated", steps=steps),
        lower_bound_ns=bound_ns(schedule, demands),
        critical_path=critical_path(schedule, step, lambda task: forward_share(task, costs)),
        provenance={where.value: count for where, count in costs.tally(used_durations(schedule.tasks)).items()},
    )
    return Timeline.from_times(schedule, info, in_sequence([step] * steps))


def run_step(schedule: Schedule, demands: Demands) -> StepTimes:
    """One isolated step, without the tables: what a search needs of a simulation."""
    return _Run(schedule, demands).times()


def _check(schedule: Schedule, trace: Trace, machine: Machine) -> None:
    if not schedule.tasks:
        raise ScheduleError(("it has no tasks",))
    if schedule.model != trace.model or schedule.layers != len(trace.layers):
        raise ScheduleError(
            (
                f"it is of {schedule.model} with {schedule.layers} layers, and the trace of {trace.model} with "
                f"{len(trace.layers)}; simulate it with a trace of the model it was built for",
            )
        )
    if schedule.plan.gpus > len(machine.gpus):
        raise PlanError(
            f"the schedule is for {schedule.plan.gpus} GPUs, machine {machine.name} has {len(machine.gpus)}; "
            f"choose the machine's count with --gpus {schedule.plan.gpus}"
        )
    layers, planned = (0, schedule.layers - 1), "the planned buffers"
    for gpu, needed in enumerate(schedule.memory.gpu_peak_bytes):
        if needed > (usable := machine.gpus[gpu].usable_bytes):
            raise DoesNotFit(gpu, layers, planned, needed, usable)
    cap = machine.host.memory_bytes
    if cap is not None and schedule.memory.host_peak_bytes > cap:
        raise DoesNotFit(None, layers, "the store and the planned buffers", schedule.memory.host_peak_bytes, cap)


class _Run:
    """One step in flight."""

    def __init__(self, schedule: Schedule, demands: Demands) -> None:
        self._tasks, self._predecessors = schedule.tasks, schedule.predecessors
        self._demands = demands
        self._env = simpy.Environment()
        self._links = _Links(self._env, demands.fabric.fluid())
        self._urgency = Urgency(schedule, self._links.rerank) if demands.sharing is Sharing.PRIORITY else None
        self._memory = DeviceMemory(schedule)
        self._awaited = [len(before) for before in self._predecessors]
        self._successors = _successors(schedule)
        self._gates: dict[int, simpy.Event] = {}  # of tasks that a lane stands before
        self._starts = [0] * len(self._tasks)
        self._ends: list[int | None] = [None] * len(self._tasks)
        self._left = len(self._tasks)
        self._all_ended = self._env.event()
        self._lanes = {
            key: [task for task in ids if self._tasks[task].lanes[0] == key] for key, ids in schedule.lanes.items()
        }

    def times(self) -> StepTimes:
        """Run to the end. Raises Stalled if there is none."""
        for ids in self._lanes.values():
            self._env.process(self._lane(ids))
        try:
            if self._left:
                self._env.run(until=self._all_ended)
        except RuntimeError:
            if self._env.peek() == math.inf:  # nothing will ever happen again
                raise Stalled(self._blocked()) from None
            raise
        self._memory.check_empty()
        return StepTimes(self._starts, [end for end in self._ends if end is not None])

    def _lane(self, ids: Sequence[int]) -> Generator[simpy.Event, Any, None]:
        """The process of one lane."""
        env, tasks = self._env, self._tasks
        for number in ids:
            if self._awaited[number]:
                gate = self._gates[number] = env.event()
                if self._urgency:
                    self._urgency.stands_before(number, self._ends)
                yield gate
            task = tasks[number]
            self._starts[number] = int(env.now)
            self._memory.allocate(task)
            demand = self._demands.of(task)
            if demand.delay_ns:
                yield env.timeout(demand.delay_ns)
            if demand.flows:
                yield self._links.send(number, demand.flows, self._urgency.rank(number) if self._urgency else 0)
            self._ends[number] = int(env.now)
            self._memory.free(task)
            self._release(number)

    def _release(self, number: int) -> None:
        for successor in self._successors[number]:
            self._awaited[successor] -= 1
            if not self._awaited[successor] and successor in self._gates:
                self._gates.pop(successor).succeed()
        self._left -= 1
        if not self._left:
            self._all_ended.succeed()

    def _blocked(self) -> tuple[str, ...]:
        """For each lane that is not through, its next task and what that waits for."""
        heads = [next((task for task in ids if self._ends[task] is None), None) for ids in self._lanes.values()]
        return tuple(
            f"{self._tasks[head]} waits for "
            + ", ".join(str(self._tasks[before]) for before in self._predecessors[head] if self._ends[before] is None)
            for head in heads
            if head is not None
        )


def _successors(schedule: Schedule) -> list[list[int]]:
    """For each task the tasks that wait for it. Raises ScheduleError for a dependency on no task."""
    successors: list[list[int]] = [[] for _ in schedule.tasks]
    for task, before in zip(schedule.tasks, schedule.predecessors, strict=True):
        for number in before:
            if not 0 <= number < len(successors):
                raise ScheduleError((f"{task} waits for task {number}; there are tasks 0-{len(successors) - 1}",))
            successors[number].append(task.id)
    return successors


class _Links:
    """The fabric in simulated time: a timer always rings at the next end of a flow, or before, and is then set anew."""

    def __init__(self, env: simpy.Environment, fluid: Fluid) -> None:
        self._env, self._fluid = env, fluid
        self._tasks: dict[simpy.Event, int] = {}  # of the flows under way, which are named by the event of their end
        self._rings = math.inf  # when the next timer rings that counts; others were set before rates changed

    def send(self, task: int, flows: Sequence[Flow], rank: int) -> simpy.Event:
        """Start a task's flows; the event comes when all of them have ended."""
        events = []
        for route, size in flows:
            event = self._env.event()
            self._tasks[event] = task
            self._fluid.start(self._env.now, event, route.loads, size, route.cap_for(size), rank)
            events.append(event)
        self._settle()
        return events[0] if len(events) == 1 else self._env.all_of(events)

    def rerank(self, task: int, rank: int) -> None:
        """Give the flows of a task, if they are under way, another rank."""
        for event in [event for event, its in self._tasks.items() if its == task]:
            self._fluid.rerank(self._env.now, event, rank)
        self._settle()

    def _settle(self) -> None:
        """Report flows that have ended, and set the timer for the next."""
        finished = self._fluid.finished
        for event in finished:
            assert isinstance(event, simpy.Event)
            del self._tasks[event]
            event.succeed()
        finished.clear()
        next_end = self._fluid.next_end()
        if next_end < self._rings and (rings := whole_ns(next_end)) < self._rings:
            self._rings = rings
            timer = self._env.timeout(max(0, rings - self._env.now), rings)
            timer.callbacks.append(self._on_timer)

    def _on_timer(self, timer: simpy.Event) -> None:
        if timer.value == self._rings:
            self._rings = math.inf
            self._fluid.advance(self._env.now)
            self._settle()
