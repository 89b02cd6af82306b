"""What of a schedule's work others can slow, and what cannot be slowed.

A lane does one task at a time. So what a lane takes of a resource at most, summed over the lanes, says whether the
resource can ever be full. One that cannot slows nobody: it only caps each flow at the rate that the flow reaches alone.
Work that meets no other resource lasts as long as if it were alone on the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..hardware.fabric import Fabric
from ..hardware.fluid import Loads, whole_ns
from ..schedule import Schedule
from ..units import NS_PER_S
from .durations import Demand, Demands, Flow

_ROUNDING = 1 + 1e-12


class Stream(NamedTuple):
    """A flow that others may slow: its loads on resources that may be full, bytes, and its cap in bytes/s."""

    loads: Loads
    bytes: float
    cap: float


class Shared(NamedTuple):
    """Work that others may slow: ``delay_ns`` first, then all ``streams`` at once, and it ends with the last of them,
    but no sooner than ``least_ns`` after the delay. A single stream that is alone takes ``alone_ns``; several may slow
    each other (None)."""

    delay_ns: int
    least_ns: int
    alone_ns: int | None
    streams: tuple[Stream, ...]


class Contention:
    """Each task's work: in ``durations_ns`` if nothing can slow it (else None there), or in ``shared``."""

    def __init__(self, schedule: Schedule, demands: Demands) -> None:
        self._fabric = demands.fabric
        each = demands.of_all(schedule.tasks)
        self._contested = _contested(schedule, each, demands.fabric)
        self.durations_ns: list[int | None] = []
        self.shared: dict[int, Shared] = {}
        known: dict[int, Shared] = {}  # by identity of the demand: equal copies have one
        for number, demand in enumerate(each):
            if not demand.flows:
                self.durations_ns.append(demand.delay_ns)
                continue
            work = known.get(id(demand))
            if work is None:
                work = known[id(demand)] = self._shared(demand)
            if work.streams:
                self.durations_ns.append(None)
                self.shared[number] = work
            else:
                self.durations_ns.append(work.delay_ns + work.least_ns)

    def _shared(self, demand: Demand) -> Shared:
        alone_ns = [self._alone_ns(flow) for flow in demand.flows]
        loads = [tuple(load for load in flow.route.loads if load[0] in self._contested) for flow in demand.flows]
        each = list(zip(demand.flows, loads, alone_ns, strict=True))
        streams = tuple(Stream(own, flow.bytes, self._cap(flow)) for flow, own, _ in each if own)
        least_ns = max([alone for _, own, alone in each if not own], default=0)
        return Shared(demand.delay_ns, least_ns, max(alone_ns) if len(streams) == 1 else None, streams)

    def _alone_ns(self, flow: Flow) -> int:
        return whole_ns(flow.bytes / self._fabric.uncontended_rate(flow.route, flow.bytes) * NS_PER_S)

    def _cap(self, flow: Flow) -> float:
        """The flow's own, and what the resources allow that are never full."""
        capacities, contested = self._fabric.capacities, self._contested
        free = [capacities[at] / times for at, times in flow.route.loads if at not in contested]
        return min([flow.route.cap_for(flow.bytes), *free])


def _contested(schedule: Schedule, demands: Sequence[Demand], fabric: Fabric) -> frozenset[int]:
    """Resources that may be full."""
    load = [0.0] * len(fabric.capacities)
    for (_, lane), ids in schedule.lanes.items():
        own = [demands[task] for task in ids if schedule.tasks[task].lane is lane]
        most: dict[int, float] = {}
        for demand in {id(demand): demand for demand in own if demand.flows}.values():
            for resource, taken in _taken(demand, fabric).items():
                most[resource] = max(most.get(resource, 0.0), taken)
        for resource, taken in most.items():
            load[resource] += taken
    return frozenset(at for at, capacity in enumerate(fabric.capacities) if load[at] > capacity * _ROUNDING)


def _taken(demand: Demand, fabric: Fabric) -> dict[int, float]:
    """What a demand takes of each resource when nothing slows it (bytes/s)."""
    taken: dict[int, float] = {}
    for route, size in demand.flows:
        rate = fabric.uncontended_rate(route, size)
        for resource, times in route.loads:
            taken[resource] = taken.get(resource, 0.0) + times * rate
    return taken
