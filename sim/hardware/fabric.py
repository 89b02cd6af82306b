"""The Fabric: which resources of a machine each kind of copy loads.

Resources are directions of links, DRAM, the host's cores, and whatever else can be full. *Down* is away from the host.

    swap in    dram, links down, gpu down
    swap out   gpu up, links up, dram
    p2p        gpu up, links up to where the two ways meet, links down, gpu down
               without P2P access: gpu up, links up, dram twice, links down, gpu down
    in the host dram for what is read and written, and cores: work there is a flow of nanoseconds of one core

A link whose two directions together are capped adds a third resource, taken by copies in either direction. Two GPUs
joined by NVLink use that alone. Between sockets, the interconnect's direction comes on top: a copy between a GPU and
host memory sends there the share of its bytes that lies on other sockets, a copy between GPUs of two sockets all.
What copies at once do to each other is :class:`~sim.hardware.fluid.Fluid`'s matter.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations
from typing import NamedTuple

from ..errors import MachineError
from ..units import NS_PER_S
from .fluid import Fluid, Loads, whole_ns
from .machine import HOST, Efficiency, Gpu, Link, Machine

__all__ = ["Fabric", "Fluid", "Resource", "Route", "ring_edge_bytes", "whole_ns"]


class _Direction(Enum):
    """Which way a copy takes a link."""

    DOWN = "down"
    UP = "up"


@dataclass(frozen=True)
class Resource:
    """Something that copies share: its name as reports show it (``"gpu0 down"``), and its capacity in bytes/s (of the
    cores, in nanoseconds of one core per second)."""

    name: str
    capacity: float


@dataclass(frozen=True)
class Route:
    """What one copy takes: its load on resources (indices), the bytes/s that those give to a copy that is alone, a cap
    of its own in bytes/s, and the time before its first byte (latencies along the way and the GPU's overhead for
    starting a copy). ``slow_starts`` are bandwidths along the way with what a copy reaches of them by its size."""

    loads: Loads
    alone: float = math.inf
    cap: float = math.inf
    delay_ns: int = 0
    slow_starts: tuple[tuple[float, Efficiency], ...] = ()

    def cap_for(self, bytes: float) -> float:
        """The cap of a copy of this size (bytes/s)."""
        if not self.slow_starts:
            return self.cap
        return min(self.cap, *(bandwidth * reached(points, bytes) for bandwidth, points in self.slow_starts))


def reached(efficiency: Efficiency, bytes: float) -> float:
    """Share of the bandwidth that a copy of this size reaches. Between two known sizes its *time* is interpolated, so
    that a larger copy never takes less."""
    at = bisect_left(efficiency, bytes, key=lambda point: point[0])
    if at in (0, len(efficiency)):
        return efficiency[max(0, at - 1)][1]
    (size, share), (larger, its_share) = efficiency[at - 1 : at + 1]
    beyond = (bytes - size) / (larger - size)
    return bytes / ((1 - beyond) * size / share + beyond * larger / its_share)


def ring_edge_bytes(gradient_bytes: int, gpus: int) -> float:
    """Bytes over each edge of a ring all-reduce of ``gradient_bytes``: 2(N-1)/N of them.

    Reduce-scatter and all-gather each send N-1 of N parts (Patarasuk and Yuan 2009). All N edges together carry
    2(N-1) times ``gradient_bytes``.
    """
    return 2 * (gpus - 1) * gradient_bytes / gpus


class Fabric:
    """Routes of a machine's copies. ``resources`` lists what they share; a :class:`Route` holds indices into it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._links = {link.name: link for link in machine.links}
        self._resources: list[Resource] = []
        self._dram = self._add(Resource("dram", machine.host.dram_bandwidth))
        self._cores = self._add(Resource("cores", (machine.host.cores or math.inf) * NS_PER_S))
        self._directions: dict[tuple[str, _Direction], list[int]] = {}
        ends: list[tuple[str, Link | Gpu]] = [(link.name, link) for link in machine.links]
        for name, end in [*ends, *((_gpu_name(number), gpu) for number, gpu in enumerate(machine.gpus))]:
            down, up = Resource(f"{name} down", end.bandwidth), Resource(f"{name} up", end.rate_up)
            ways = self._add_both_ways(down, up, f"{name} both", end.both_directions)
            self._directions[name, _Direction.DOWN], self._directions[name, _Direction.UP] = ways
        self._nvlinks: dict[tuple[int, int], _Stretch] = {}
        for edge in machine.nvlinks:
            for source, target in (edge.gpus, edge.gpus[::-1]):
                resource = self._add(Resource(f"nvlink {source}-{target}", edge.bandwidth))
                slow_starts = [(edge.bandwidth, edge.efficiency)] if edge.efficiency else []
                self._nvlinks[source, target] = _Stretch([(resource, 1.0)], slow_starts=slow_starts)
        self._crossings: dict[tuple[int, int], list[int]] = {}
        if (joint := machine.interconnect) is not None:
            for a, b in combinations(range(machine.host.sockets), 2):
                there, back = (Resource(f"socket {way}", joint.bandwidth) for way in (f"{a}-{b}", f"{b}-{a}"))
                ways = self._add_both_ways(there, back, f"sockets {a} and {b}", joint.both_directions)
                self._crossings[a, b], self._crossings[b, a] = ways
        self.resources = tuple(self._resources)
        self.capacities = tuple(resource.capacity for resource in self.resources)

    def fluid(self) -> Fluid:
        """A fluid over these resources, with no copy in flight."""
        return Fluid(self.capacities)

    def swap_in(self, gpu: int) -> Route:
        """Host memory to GPU."""
        return self._swap(gpu, _Direction.DOWN)

    def swap_out(self, gpu: int) -> Route:
        """GPU to host memory."""
        return self._swap(gpu, _Direction.UP)

    def p2p(self, source: int, target: int) -> Route:
        """GPU to another GPU: over NVLink if there is one, else over the tree, else (no P2P access) through the host.

        ``copy_overhead_ns`` is the sender's; through the host there are two copies, so the receiver's is added.
        """
        if source == target:
            raise MachineError(f"machine {self._machine.name}: a copy from GPU {source} to itself needs no route")
        sender, receiver = self._machine.gpus[source], self._machine.gpus[target]
        if (source, target) in self._nvlinks:
            return self._route([self._nvlinks[source, target]], delay_ns=sender.copy_overhead_ns)
        up, down = self._way(source), self._way(target)
        if sender.p2p and receiver.p2p:
            up, down = [link for link in up if link not in down], [link for link in down if link not in up]
            sockets = self._socket(source), self._socket(target)
            between = [self._across([sockets] if sockets[0] != sockets[1] else [], 1.0)]
            delay_ns = sender.copy_overhead_ns
        else:
            between = [self._memory(_Direction.UP, source), self._memory(_Direction.DOWN, target)]
            delay_ns = sender.copy_overhead_ns + receiver.copy_overhead_ns
        return self._route(
            [self._along(_Direction.UP, up, source), *between, self._along(_Direction.DOWN, down, target)],
            cap=min(gpu.p2p_bandwidth or math.inf for gpu in (sender, receiver)),
            delay_ns=delay_ns,
        )

    def ring(self, gpus: int | Sequence[int]) -> tuple[Route, ...]:
        """Edges i → i+1 of a ring over these GPUs (a count: the first ones); none for a single GPU. All edges of an
        all-reduce send at once, each :func:`ring_edge_bytes`."""
        members = range(gpus) if isinstance(gpus, int) else gpus
        if len(members) < 2:
            return ()
        return tuple(
            self.p2p(source, target) for source, target in zip(members, [*members[1:], members[0]], strict=True)
        )

    def host_memory(self, cap: float = math.inf) -> Route:
        """Reading and writing host memory, without a copy to a GPU, at no more than ``cap`` bytes/s."""
        return self._route([_Stretch([(self._dram, 1.0)])], cap=cap)

    def host_cores(self, threads: float) -> Route:
        """Calculating in the host on no more than this many cores; its bytes are nanoseconds of one core."""
        return self._route([_Stretch([(self._cores, 1.0)])], cap=threads * NS_PER_S)

    def uncontended_rate(self, route: Route, bytes: float = math.inf) -> float:
        """Bytes/s of a copy of this size (without one: a very large one) that is alone."""
        return min(route.alone, route.cap_for(bytes))

    def uncontended_ns(self, route: Route, bytes: float) -> int:
        """How long a copy takes that is alone, its delay included (ns)."""
        return route.delay_ns + whole_ns(bytes / self.uncontended_rate(route, bytes) * NS_PER_S)

    def _add(self, resource: Resource) -> int:
        self._resources.append(resource)
        return len(self._resources) - 1

    def _add_both_ways(
        self, there: Resource, back: Resource, both: str, both_directions: float | None
    ) -> tuple[list[int], list[int]]:
        """A link's resources: those taken on the way there, and those on the way back."""
        ways = self._add(there), self._add(back)
        together = [] if both_directions is None else [self._add(Resource(both, both_directions))]
        return [ways[0], *together], [ways[1], *together]

    def _swap(self, gpu: int, direction: _Direction) -> Route:
        stretches = [self._along(direction, self._way(gpu), gpu), self._memory(direction, gpu)]
        return self._route(stretches, delay_ns=self._machine.gpus[gpu].copy_overhead_ns)

    def _way(self, gpu: int) -> list[Link]:
        """Links between a GPU's own and the host, the GPU's side first."""
        links, at = [], self._machine.gpus[gpu].link
        while at != HOST:
            links.append(self._links[at])
            at = links[-1].parent
        return links

    def _socket(self, gpu: int) -> int:
        return [self._machine.gpus[gpu], *self._way(gpu)][-1].socket

    def _along(self, direction: _Direction, links: Sequence[Link], gpu: int) -> _Stretch:
        """The GPU's own link and ``links``, in one direction."""
        names, ends = [_gpu_name(gpu), *(link.name for link in links)], [self._machine.gpus[gpu], *links]
        rates = [end.bandwidth if direction is _Direction.DOWN else end.rate_up for end in ends]
        return _Stretch(
            loads=[(resource, 1.0) for name in names for resource in self._directions[name, direction]],
            latency_ns=sum(link.latency_ns for link in links),
            slow_starts=[(rate, end.efficiency) for rate, end in zip(rates, ends, strict=True) if end.efficiency],
        )

    def _memory(self, direction: _Direction, gpu: int) -> _Stretch:
        """Host memory, and the interconnect for what lies on other sockets than the GPU's."""
        homes, at = self._machine.host.memory_sockets, self._socket(gpu)
        crossings = [(home, at) if direction is _Direction.DOWN else (at, home) for home in homes if home != at]
        across = self._across(crossings, 1 / len(homes))
        return across._replace(loads=[(self._dram, 1.0), *across.loads])

    def _across(self, crossings: Sequence[tuple[int, int]], share: float) -> _Stretch:
        """From one socket to another, for each of ``crossings``: ``share`` of the bytes."""
        joint = self._machine.interconnect
        latency_ns = joint.latency_ns if joint is not None and crossings else 0
        return _Stretch([(resource, share) for pair in crossings for resource in self._crossings[pair]], latency_ns)

    def _route(self, stretches: Sequence[_Stretch], *, delay_ns: int = 0, cap: float = math.inf) -> Route:
        """One stretch after the other."""
        loads: dict[int, float] = {}
        for stretch in stretches:
            for resource, times in stretch.loads:
                loads[resource] = loads.get(resource, 0.0) + times
        return Route(
            tuple(sorted(loads.items())),
            min(self.capacities[resource] / times for resource, times in loads.items()),
            cap,
            delay_ns + sum(stretch.latency_ns for stretch in stretches),
            tuple(slow for stretch in stretches for slow in stretch.slow_starts),
        )


class _Stretch(NamedTuple):
    """A part of a copy's way."""

    loads: list[tuple[int, float]]
    latency_ns: int = 0
    slow_starts: Sequence[tuple[float, Efficiency]] = ()


def _gpu_name(gpu: int) -> str:
    return f"gpu{gpu}"
