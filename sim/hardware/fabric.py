"""The Fabric: which resources of a machine each kind of copy takes.

Resources are directions of links, DRAM, and whatever else can be full. *Down* is away from the host.

    swap in    dram, links down, gpu down
    swap out   gpu up, links up, dram
    p2p        gpu up, links up to where the two ways meet, links down, gpu down
               without P2P access: gpu up, links up, dram twice, links down, gpu down

A link whose two directions together are capped adds a third resource, taken by copies in either direction. Two GPUs
joined by NVLink use that alone. What copies at once do to each other is :class:`~sim.fluid.Fluid`'s matter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..errors import MachineError
from ..units import NS_PER_S
from .fluid import Fluid, whole_ns
from .machine import HOST, Gpu, Link, Machine

__all__ = ["Fabric", "Fluid", "Resource", "Route", "ring_edge_bytes", "whole_ns"]


class _Direction(Enum):
    """Which copies take a link's resource."""

    DOWN = "down"
    UP = "up"
    BOTH = "both"


@dataclass(frozen=True)
class Resource:
    """Something that copies share: its name as reports show it (``"gpu0 down"``), and its capacity in bytes/s."""

    name: str
    capacity: float


@dataclass(frozen=True)
class Route:
    """What one copy takes: indices of resources (twice if used twice), a cap of its own in bytes/s, and the time
    before its first byte (latencies along the way and the GPU's overhead for starting a copy)."""

    resources: tuple[int, ...]
    cap: float = math.inf
    delay_ns: int = 0


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
        resources = [Resource("dram", machine.host.dram_bandwidth)]
        self._dram = 0
        self._directions: dict[tuple[str, _Direction], int] = {}
        self._nvlinks: dict[tuple[int, int], int] = {}
        ends: list[tuple[str, Link | Gpu]] = [(link.name, link) for link in machine.links]
        for name, end in [*ends, *((_gpu_name(number), gpu) for number, gpu in enumerate(machine.gpus))]:
            for direction, capacity in (
                (_Direction.DOWN, end.bandwidth),
                (_Direction.UP, end.bandwidth),
                (_Direction.BOTH, end.both_directions),
            ):
                if capacity is not None:
                    self._directions[name, direction] = len(resources)
                    resources.append(Resource(f"{name} {direction.value}", capacity))
        for edge in machine.nvlinks:
            for source, target in (edge.gpus, edge.gpus[::-1]):
                self._nvlinks[source, target] = len(resources)
                resources.append(Resource(f"nvlink {source}-{target}", edge.bandwidth))
        self.resources = tuple(resources)
        self.capacities = tuple(resource.capacity for resource in resources)

    def fluid(self) -> Fluid:
        """A fluid over these resources, with no copy in flight."""
        return Fluid(self.capacities)

    def swap_in(self, gpu: int) -> Route:
        """Host memory to GPU."""
        links = self._way(gpu)
        resources = [*self._take(_Direction.DOWN, links, gpu), self._dram]
        return Route(tuple(resources), delay_ns=_latency(links) + self._machine.gpus[gpu].copy_overhead_ns)

    def swap_out(self, gpu: int) -> Route:
        """GPU to host memory."""
        links = self._way(gpu)
        resources = [*self._take(_Direction.UP, links, gpu), self._dram]
        return Route(tuple(resources), delay_ns=_latency(links) + self._machine.gpus[gpu].copy_overhead_ns)

    def p2p(self, source: int, target: int) -> Route:
        """GPU to another GPU: over NVLink if there is one, else over the tree, else (no P2P access) through the host.

        ``copy_overhead_ns`` is the sender's; through the host there are two copies, so the receiver's is added.
        """
        if source == target:
            raise MachineError(f"machine {self._machine.name}: a copy from GPU {source} to itself needs no route")
        sender, receiver = self._machine.gpus[source], self._machine.gpus[target]
        if (edge := self._nvlinks.get((source, target))) is not None:
            return Route((edge,), delay_ns=sender.copy_overhead_ns)
        up, down = self._way(source), self._way(target)
        delay_ns = sender.copy_overhead_ns
        through_host: list[int] = []
        if sender.p2p and receiver.p2p:
            up, down = [k for k in up if k not in down], [k for k in down if k not in up]
        else:
            through_host = [self._dram] * 2
            delay_ns += receiver.copy_overhead_ns
        return Route(
            (*self._take(_Direction.UP, up, source), *through_host, *self._take(_Direction.DOWN, down, target)),
            cap=min(gpu.p2p_bandwidth or math.inf for gpu in (sender, receiver)),
            delay_ns=_latency(up) + _latency(down) + delay_ns,
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

    def host_memory(self) -> Route:
        """Reading and writing host memory, without a copy to a GPU."""
        return Route((self._dram,))

    def uncontended_rate(self, route: Route) -> float:
        """Bytes/s of a copy that is alone."""
        limits = [self.capacities[resource] / route.resources.count(resource) for resource in route.resources]
        return min([route.cap, *limits])

    def uncontended_ns(self, route: Route, bytes: float) -> int:
        """How long a copy takes that is alone, its delay included (ns)."""
        return route.delay_ns + whole_ns(bytes / self.uncontended_rate(route) * NS_PER_S)

    def _way(self, gpu: int) -> list[Link]:
        """Links between a GPU's own and the host, the GPU's side first."""
        links, at = [], self._machine.gpus[gpu].link
        while at != HOST:
            links.append(self._links[at])
            at = links[-1].parent
        return links

    def _take(self, direction: _Direction, links: Sequence[Link], gpu: int) -> list[int]:
        """Resources of the GPU's own link and ``links`` in one direction."""
        names = [_gpu_name(gpu), *(link.name for link in links)]
        wanted = [(name, which) for name in names for which in (direction, _Direction.BOTH)]
        return [self._directions[key] for key in wanted if key in self._directions]


def _gpu_name(gpu: int) -> str:
    return f"gpu{gpu}"


def _latency(links: Sequence[Link]) -> int:
    return sum(link.latency_ns for link in links)
