"""Links that copies share in real time: the fabric's fluid, driven by the clock of this process.

A copy is some *loads* (bytes over a route) that start together. Its real memcpy goes on in pieces, and after each piece
it waits until its loads have got as far in the fluid; it ends when they have. Each wait aims at a time on the clock, so
that overshooting does not add up: the time at which the copy is due, or at which another one will end, as rates change
then. A copy that joins delays both, so the others wake too early, and look again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from sim.hardware.fabric import Fabric, Route
from sim.units import NS_PER_S

from .facade import Aborted


class Clock(Protocol):
    """The time by which copies move."""

    def now_ns(self) -> int:
        """Now, from any origin."""

    def wait(self, changed: threading.Condition, ahead_ns: float) -> None:
        """Let time pass; return early when notified."""


class RealClock:
    """The clock of this process."""

    def now_ns(self) -> int:
        """``time.perf_counter_ns``."""
        return time.perf_counter_ns()

    def wait(self, changed: threading.Condition, ahead_ns: float) -> None:
        """Sleep. Overshoots by some 80 µs."""
        changed.wait(ahead_ns / NS_PER_S)


class Load(NamedTuple):
    """What a copy puts on the links: bytes over a route. The route's delay is not played."""

    route: Route
    bytes: float


class _Flow(NamedTuple):
    number: int
    bytes: float


Transit = tuple[_Flow, ...]
"""A copy on its way."""


class SharedLinks:
    """The links of a fabric, used from many threads."""

    def __init__(self, fabric: Fabric, clock: Clock | None = None) -> None:
        self._fabric = fabric
        self._clock = clock or RealClock()
        self._fluid = fabric.fluid()
        self._changed = threading.Condition()
        self._closed = False
        self._numbers = count()

    def carry(self, loads: Sequence[Load], work: Iterable[float]) -> None:
        """Start the loads and do the ``work``, which yields the share (0 to 1) that it has done after each piece.

        Goes on with the next piece when all loads have got that far, and returns when they and the work have ended.
        Raises Aborted if the links are closed meanwhile.
        """
        transit = self.start(loads)
        for share in work:
            with self._changed:
                self._wait(transit, share)
        with self._changed:
            self._wait(transit, 1.0)
            self._end(transit)

    def start(self, loads: Sequence[Load]) -> Transit:
        """Put loads on the links, from now on."""
        with self._changed:
            now = self._clock.now_ns()
            transit = tuple(_Flow(next(self._numbers), load.bytes) for load in loads)
            for flow, load in zip(transit, loads, strict=True):
                self._fluid.start(now, flow.number, load.route.loads, load.bytes, load.route.cap_for(load.bytes))
            return transit

    def due_ns(self, transit: Transit, share: float) -> float:
        """When the last of a copy's loads will have got as far as ``share``, if no other copy starts or ends; a time
        that is not in the future if it has."""
        with self._changed:
            return self._due_ns(transit, share, self._clock.now_ns())

    def end(self, transit: Transit) -> None:
        """Forget a copy that is through."""
        with self._changed:
            self._end(transit)

    def close(self) -> None:
        """Let every copy under way raise Aborted, and every later one too, until :meth:`reopen`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def reopen(self) -> None:
        """Start anew with empty links."""
        with self._changed:
            self._closed = False
            self._fluid = self._fabric.fluid()

    def _wait(self, transit: Transit, share: float) -> None:
        while not self._closed:
            now = self._clock.now_ns()
            due = self._due_ns(transit, share, now)
            if due <= now:
                return
            self._clock.wait(self._changed, min(due, self._fluid.next_end()) - now)
        raise Aborted

    def _end(self, transit: Transit) -> None:
        for flow in transit:
            self._fluid.finished.pop(flow.number)

    def _due_ns(self, transit: Transit, share: float, now: int) -> float:
        self._fluid.advance(now)
        on_the_way = [flow for flow in transit if flow.number not in self._fluid.finished]
        if not on_the_way:
            return 0.0
        rates = self._fluid.rates()
        behind_ns = [
            (share * flow.bytes - self._fluid.progress(flow.number)) / rates[flow.number] * NS_PER_S
            for flow in on_the_way
        ]
        # Rounding may see a load that is not through as at its end; then the next look will find it finished.
        return now + max(*behind_ns, 1.0 if share >= 1 else 0.0)
