"""Ways of copies over a machine's fabric: what a copy takes that is alone, and what it loads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..hardware.fabric import Fabric, Route
from ..hardware.machine import Machine
from ..units import NS_PER_S

Loads = NDArray[np.float64]
"""Bytes by resource of the fabric (last axis)."""


class Way:
    """A route: ``load`` is how often each byte loads each resource. ``users``: if at the same time others load them."""

    def __init__(self, fabric: Fabric, route: Route, users: Loads | None = None) -> None:
        self._route = route
        loads = [(i, times if users is None else max(times, users[i])) for i, times in route.loads]
        self._ns_per_byte = NS_PER_S * max([times / fabric.capacities[i] for i, times in loads], default=0.0)
        self.load: Loads = np.zeros(len(fabric.resources))
        for resource, times in route.loads:
            self.load[resource] = times

    def ns(self, size: float) -> float:
        """Time of one copy of ``size`` bytes; a copy of none does not happen."""
        if not size:
            return 0.0
        return self._route.delay_ns + size * max(self._ns_per_byte, NS_PER_S / self._route.cap_for(size))


class Ways:
    """All ways on a machine: ``into`` and ``out`` of each GPU from and to the host (their loads also as matrices over
    GPUs), and ``between`` two GPUs. ``together``: all GPUs swap at the same time, in the same direction."""

    def __init__(self, machine: Machine, *, together: bool = False) -> None:
        fabric = Fabric(machine)
        gpus = range(len(machine.gpus))
        self.into = _swaps(fabric, [fabric.swap_in(gpu) for gpu in gpus], together)
        self.out = _swaps(fabric, [fabric.swap_out(gpu) for gpu in gpus], together)
        self.between = {(a, b): Way(fabric, fabric.p2p(a, b)) for a in gpus for b in gpus if a != b}
        self.into_loads: Loads = np.array([way.load for way in self.into])
        self.out_loads: Loads = np.array([way.load for way in self.out])
        self._ring = [Way(fabric, edge) for edge in fabric.ring(len(gpus))]
        self._ns_per_byte = NS_PER_S / np.array(fabric.capacities)
        self.nothing: Loads = np.zeros_like(self._ns_per_byte)

    def drain_ns(self, loads: Loads) -> Loads:
        """How long each resource needs to pass these bytes."""
        return loads * self._ns_per_byte

    def either_load(self, source: int, target: int) -> Loads:
        """The load that a byte between two GPUs is for certain if it may also go through the host."""
        return np.minimum(self.between[source, target].load, self.out[source].load + self.into[target].load)

    def ring_load(self, sent_bytes: int) -> Loads:
        """Load of collectives in which all GPUs together send so many bytes."""
        if not self._ring:
            return self.nothing
        edges: Loads = np.sum([edge.load for edge in self._ring], axis=0)
        return edges * (sent_bytes / len(self._ring))

    def ring_ns(self, sent_bytes: int) -> float:
        """Time of a collective in which all GPUs together send so many bytes."""
        drained = float(self.drain_ns(self.ring_load(sent_bytes)).max())
        return max([drained, *(edge.ns(sent_bytes / len(self._ring)) for edge in self._ring)])


def _swaps(fabric: Fabric, routes: list[Route], together: bool) -> list[Way]:
    alone = [Way(fabric, route) for route in routes]
    users = np.sum([way.load for way in alone], axis=0)
    return [Way(fabric, route, users) for route in routes] if together else alone
