"""What every task takes: time of its own (``delay_ns``), and then bytes over the fabric (``flows``).

    forward, backward, update    time, from the trace and the speed of the device; backward in whole or a part of it
    update in the host           that time of the trace's threads, and all bytes of host memory that it reads and writes
    swap in, swap out, P2P       the route's delay, then the bytes over the route
    collectives                  the same, over every edge of the ring at once, evenly
    reduce, norm                 bytes through host memory, and as many threads as an update has

Work in the host shares the cores and host memory. Alone, an update takes what the trace says, always: it asks for cores
and host memory evenly over that time, and for no more than the machine has (how fast the host is, is said by its
``speed``). Then it ends when it has had both. A trace that does not say its threads asks for no cores.

A task's time may be injected (:class:`Durations`), which is how tests draw random timings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from traces.costs import Costs
from traces.schema import Phase

from ..hardware.fabric import Fabric, Route
from ..hardware.fluid import SLACK_NS
from ..hardware.machine import Machine
from ..schedule import Task, TaskKind
from ..shards import Shards
from ..units import NS_PER_S


class Durations(Protocol):
    """What tasks take that no copy takes."""

    def compute_ns(self, task: Task) -> int:
        """How long a forward, backward or update lasts."""

    def host_bytes(self, task: Task) -> int:
        """Bytes of host memory that an update or a reduction in the host reads and writes."""

    @property
    def threads(self) -> int:
        """Cores that an update or a reduction in the host keeps busy; 0 if that is unknown."""


class CostDurations:
    """Durations from a trace: its times over the device's speed.

    A backward repeats the forward first, unless it says otherwise. The update of a shard takes that part of its layers'
    update which it has of their weights. A reduction reads the gradient of each of ``replicas`` GPUs and writes one; a
    norm reads one; what an update moves is said in :meth:`~traces.costs.Costs.update_bytes`.
    """

    def __init__(self, costs: Costs, machine: Machine, replicas: int) -> None:
        self._costs, self._replicas, self._shards = costs, replicas, Shards(costs, replicas)
        self.threads = costs.trace.threads
        self._host_speed = machine.host.speed
        self._speeds = [gpu.speed for gpu in machine.gpus]
        self._known: dict[tuple[object, ...], int] = {}

    def compute_ns(self, task: Task) -> int:
        """How long a forward, backward or update lasts."""
        like = (task.kind, task.gpu, task.layer_first, task.layer_last, task.batch_size, task.recompute, task.shard)
        duration = self._known.get(like)
        if duration is None:
            duration = self._known[like] = self._work_out(task)
        return duration

    def _work_out(self, task: Task) -> int:
        costs, first, last = self._costs, task.layer_first, task.layer_last
        speed = self._host_speed if task.gpu is None else self._speeds[task.gpu]
        duration: float
        match task.kind:
            case TaskKind.FORWARD | TaskKind.RECOMPUTE:
                duration = costs.forward_ns(first, last, task.batch_size)
            case TaskKind.BACKWARD:
                duration = costs.backward_ns(first, last, task.batch_size) + recompute_ns(task, costs)
            case TaskKind.BACKWARD_INPUT:
                duration = costs.backward_input_ns(first, last, task.batch_size) + recompute_ns(task, costs)
            case TaskKind.BACKWARD_WEIGHT:
                duration = costs.backward_weight_ns(first, last, task.batch_size)
            case TaskKind.UPDATE:
                phase = Phase.UPDATE_CPU if task.gpu is None else Phase.UPDATE_GPU
                duration = costs.update_ns(first, last, phase) * self._updated(task)
            case _:
                raise ValueError(f"{task} does not compute")
        return round(duration / speed)

    def _updated(self, task: Task) -> float:
        return 1 if task.shard is None else self._shards.updated((task.layer_first, task.layer_last), task.shard)

    def host_bytes(self, task: Task) -> int:
        """Bytes of host memory that an update, a reduction or a norm in the host reads and writes."""
        if task.kind in (TaskKind.REDUCE, TaskKind.NORM):
            gradients = 1 if task.kind is TaskKind.NORM else self._replicas + 1
            return gradients * self._costs.gradient_bytes(task.layer_first, task.layer_last)
        return round(self._costs.update_bytes(task.layer_first, task.layer_last) * self._updated(task))


def recompute_ns(task: Task, costs: Costs) -> int:
    """What the forward inside a backward takes."""
    return costs.forward_ns(task.layer_first, task.layer_last, task.batch_size) if task.recompute else 0


def forward_share(task: Task, costs: Costs) -> float:
    """Part of a backward's time that its forward takes (0 … 1)."""
    forward = recompute_ns(task, costs)
    backward_ns = costs.backward_input_ns if task.kind is TaskKind.BACKWARD_INPUT else costs.backward_ns
    total = forward + backward_ns(task.layer_first, task.layer_last, task.batch_size)
    return forward / total if total else 0.0


def used_durations(tasks: Iterable[Task]) -> set[tuple[Phase, int]]:
    """The (phase, microbatch size) pairs that tasks ask a trace for, as :meth:`Costs.tally` wants them."""
    used: set[tuple[Phase, int]] = set()
    for kind, size, on_host in {(task.kind, task.batch_size, task.gpu is None) for task in tasks}:
        match kind:
            case TaskKind.FORWARD | TaskKind.RECOMPUTE:
                used.add((Phase.FORWARD, size))
            case TaskKind.BACKWARD:
                used |= {(Phase.FORWARD, size), (Phase.BACKWARD, size)}
            case TaskKind.BACKWARD_INPUT:
                used |= {(Phase.FORWARD, size), (Phase.BACKWARD_INPUT, size)}
            case TaskKind.BACKWARD_WEIGHT:
                used.add((Phase.BACKWARD_WEIGHT, size))
            case TaskKind.UPDATE:
                used.add((Phase.UPDATE_CPU if on_host else Phase.UPDATE_GPU, 0))
            case _:
                pass
    return used


class Flow(NamedTuple):
    """Bytes over a route."""

    route: Route
    bytes: float


class Demand(NamedTuple):
    """``delay_ns`` first, then all ``flows`` at once; the task ends with the last of them.

    The flows of work in the host are nanoseconds of one core, and bytes of host memory.
    """

    delay_ns: int
    flows: tuple[Flow, ...]


_COPIES = (TaskKind.SWAP_IN, TaskKind.SWAP_OUT, TaskKind.P2P)


class Demands:
    """What each task of one schedule takes on a machine; worked out once."""

    def __init__(self, machine: Machine, durations: Durations, gpus: int) -> None:
        self.fabric, self.sharing = Fabric(machine), machine.sharing
        self._durations = durations
        self._host, self._ring = machine.host, self.fabric.ring(gpus)
        self._known: dict[int, Demand] = {}
        self._lasting: dict[int, Demand] = {}
        self._copies: dict[tuple[TaskKind, int | None, int | None, int], Demand] = {}

    def of_all(self, tasks: Iterable[Task]) -> list[Demand]:
        """What each of them takes. What lasts equally long, and copies over one route of one size, are one object."""
        return [self.of(task) for task in tasks]

    def of(self, task: Task) -> Demand:
        """What this task takes."""
        demand = self._known.get(task.id)
        if demand is None:
            demand = self._known[task.id] = self._work_out(task)
        return demand

    def _work_out(self, task: Task) -> Demand:
        if task.kind in _COPIES:
            like = (task.kind, task.gpu, task.peer, task.bytes)
            return self._copies.get(like) or self._copies.setdefault(like, self._copy(task))
        if task.gpu is not None:
            duration = self._durations.compute_ns(task)
            return self._lasting.get(duration) or self._lasting.setdefault(duration, Demand(duration, ()))
        match task.kind:
            case TaskKind.ALLREDUCE | TaskKind.REDUCE_SCATTER | TaskKind.ALL_GATHER:
                delay_ns = max((edge.delay_ns for edge in self._ring), default=0)
                return Demand(delay_ns, tuple(Flow(edge, task.bytes / len(self._ring)) for edge in self._ring))
            case TaskKind.REDUCE | TaskKind.NORM:
                size = self._durations.host_bytes(task)
                return self._in_host(size / self._host.dram_bandwidth * NS_PER_S, size)
            case _:
                return self._in_host(self._durations.compute_ns(task), self._durations.host_bytes(task))

    def _copy(self, task: Task) -> Demand:
        route = self._route(task)
        return Demand(route.delay_ns, (Flow(route, task.bytes),))

    def _in_host(self, alone_ns: float, size: int) -> Demand:
        """Work in the host that takes ``alone_ns`` when it is alone."""
        if not alone_ns:
            return Demand(0, ())
        flows = []
        if self._host.cores is not None and self._durations.threads:
            threads = min(self._durations.threads, self._host.cores)
            flows.append(Flow(self.fabric.host_cores(threads), threads * alone_ns))
        if self._host.dram_bandwidth < math.inf and size:
            moved = min(size, self._host.dram_bandwidth * alone_ns / NS_PER_S)
            flows.append(Flow(self.fabric.host_memory(moved / alone_ns * NS_PER_S), moved))
        return Demand(0, tuple(flows)) if flows else Demand(round(alone_ns), ())

    def uncontended_ns(self, demand: Demand) -> int:
        """The least time in which it is done: as if its flows were alone, rounded down."""
        seconds = [size / self.fabric.uncontended_rate(route, size) for route, size in demand.flows]
        return demand.delay_ns + floor_ns(max(seconds, default=0.0))

    def _route(self, task: Task) -> Route:
        match task.kind, task.gpu, task.peer:
            case TaskKind.SWAP_IN, int(gpu), None:
                return self.fabric.swap_in(gpu)
            case TaskKind.SWAP_OUT, int(gpu), None:
                return self.fabric.swap_out(gpu)
            case TaskKind.P2P, int(sender), int(receiver):
                return self.fabric.p2p(sender, receiver)
            case _:
                raise ValueError(f"{task} names no GPU to copy to or from")


def floor_ns(seconds: float) -> int:
    """Whole nanoseconds in ``seconds``; a whole number spoilt by rounding counts as whole, as in the simulation."""
    return math.floor(seconds * NS_PER_S + SLACK_NS)
