"""A bound from below on the time of a step: what no order of events could beat.

The largest of: the longest chain of dependencies, and for every resource of the fabric the bytes that must pass it over
its capacity. Every task counts as if it were alone. The tasks of one lane depend on each other, so the chain is never
shorter than the busiest lane.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from traces.costs import Costs

from ..hardware.machine import Machine
from ..schedule import Schedule
from ..timelines.replay import replay_times
from .durations import CostDurations, Demand, Demands, floor_ns


def lower_bound_ns(schedule: Schedule, costs: Costs, machine: Machine) -> int:
    """No simulation of this schedule takes less (ns)."""
    durations = CostDurations(costs, machine, schedule.plan.gpus)
    return bound_ns(schedule, Demands(machine, durations, schedule.plan.gpus))


def bound_ns(schedule: Schedule, demands: Demands) -> int:
    """As :func:`lower_bound_ns`, for tasks that take what ``demands`` says."""
    return max(longest_path_ns(schedule, demands), *resource_ns(schedule, demands).values())


def longest_path_ns(schedule: Schedule, demands: Demands) -> int:
    """The longest chain of tasks that wait for each other, lane order included, when nothing is shared (ns)."""
    each = demands.of_all(schedule.tasks)
    lasting = {id(demand): demands.uncontended_ns(demand) for demand in _different(each)}
    return replay_times(schedule, [lasting[id(demand)] for demand in each]).duration_ns


def resource_ns(schedule: Schedule, demands: Demands) -> dict[str, int]:
    """For each resource of the fabric, how long it needs at full capacity for all bytes that must pass it (ns)."""
    each = demands.of_all(schedule.tasks)
    times_asked = Counter(map(id, each))
    load = [0.0] * len(demands.fabric.resources)
    for demand in _different(each):
        for route, size in demand.flows:
            for resource, times in route.loads:
                load[resource] += times * size * times_asked[id(demand)]
    return {
        resource.name: floor_ns(size / resource.capacity)
        for resource, size in zip(demands.fabric.resources, load, strict=True)
    }


def _different(demands: Iterable[Demand]) -> Iterable[Demand]:
    """Each once; equal copies have one object."""
    return {id(demand): demand for demand in demands}.values()
