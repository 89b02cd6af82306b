"""Which link held a copy up: of all on its way, the one that was fullest while the copy was under way."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from ..hardware.fabric import Fabric
from ..hardware.machine import Machine
from ..schedule import Schedule, Task, TaskKind
from .replay import StepTimes

_AS_FULL = 1 - 1e-6
"""Links this close to the fullest are as full: rounding to nanoseconds."""


def fullest_links(schedule: Schedule, times: StepTimes, machine: Machine, copies: Iterable[int]) -> dict[int, str]:
    """For each of these copies the name of its bottleneck, as the machine file calls it, with the direction:
    ``gpu0 down``, ``root up``, ``dram``, ``nvlink 0-1``.

    A link is as full as the bytes that pass it meanwhile, of all copies, over what it could carry; each copy's bytes
    are taken to be spread evenly over its time. Of several that are equally full it is the one nearest to the host.
    """
    fabric = Fabric(machine)
    loads = _Loads(fabric, schedule, times)
    return {task: fabric.resources[loads.fullest(task)].name for task in copies}


class _Loads:
    """Bytes over each resource as they add up in the course of a step."""

    def __init__(self, fabric: Fabric, schedule: Schedule, times: StepTimes) -> None:
        self._times, self._capacities = times, fabric.capacities
        self._by_task: dict[int, dict[int, float]] = {}
        self._ways: dict[tuple[TaskKind, int | None, int | None], dict[int, float]] = {}
        flows: list[list[tuple[int, int, float]]] = [[] for _ in fabric.resources]
        for task in schedule.tasks:
            if task.kind.is_copy:
                self._by_task[task.id] = passed = self._way(fabric, task, schedule.plan.gpus)
                start, end = times.start_ns[task.id], times.end_ns[task.id]
                for resource, share in passed.items():
                    flows[resource].append((start, max(end, start + 1), share * task.bytes))
        self._passed = [_Passed(each) for each in flows]

    def fullest(self, task: int) -> int:
        """The resource that was fullest while this copy was under way."""
        start, end = self._times.start_ns[task], self._times.end_ns[task]
        end = max(end, start + 1)
        full = {
            resource: self._passed[resource].between(start, end) / self._capacities[resource]
            for resource in sorted(self._by_task[task])
        }
        most = max(full.values(), default=0.0)
        return next(resource for resource, how in full.items() if how >= most * _AS_FULL)

    def _way(self, fabric: Fabric, task: Task, gpus: int) -> dict[int, float]:
        """How often each byte of a copy passes each resource."""
        key = (task.kind, task.gpu, task.peer)
        if key not in self._ways:
            way: dict[int, float] = {}
            routes = _routes(fabric, task, gpus)
            for route in routes:
                for resource, share in route:
                    if self._capacities[resource] < math.inf:
                        way[resource] = way.get(resource, 0.0) + share / len(routes)
            self._ways[key] = way
        return self._ways[key]


def _routes(fabric: Fabric, task: Task, gpus: int) -> list[tuple[tuple[int, float], ...]]:
    match task.kind, task.gpu, task.peer:
        case TaskKind.SWAP_IN, int(gpu), None:
            return [fabric.swap_in(gpu).loads]
        case TaskKind.SWAP_OUT, int(gpu), None:
            return [fabric.swap_out(gpu).loads]
        case TaskKind.P2P, int(sender), int(receiver):
            return [fabric.p2p(sender, receiver).loads]
        case _:
            return [edge.loads for edge in fabric.ring(gpus)]


class _Passed:
    """Bytes over one resource, as a function of time that is linear between starts and ends of copies."""

    def __init__(self, flows: Sequence[tuple[int, int, float]]) -> None:
        table = np.array(flows, dtype=np.float64).reshape(-1, 3)
        rates = table[:, 2] / (table[:, 1] - table[:, 0])
        changes = np.concatenate([rates, -rates])
        moments = np.concatenate([table[:, 0], table[:, 1]])
        order = np.argsort(moments, kind="stable")
        self._moments = moments[order]
        slopes = np.cumsum(changes[order])
        self._bytes = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(self._moments))])

    def between(self, start: int, end: int) -> float:
        """Bytes that pass from ``start`` to ``end`` (ns)."""
        if not len(self._moments):
            return 0.0
        first, last = np.interp([start, end], self._moments, self._bytes)
        return float(last - first)
