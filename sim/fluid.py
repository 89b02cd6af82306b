"""Copies as fluid flows that share resources max-min fairly.

Every flow takes some resources (a link's direction, the host's DRAM, …) and may have a cap of its own. At any time
the rates are the max-min fair ones: nobody's rate can grow without taking from someone who has no more. They are
found by progressive filling: raise all rates together; when a resource is full, or a flow at its cap, those flows stay
at that level; go on with the others (Bertsekas and Gallager, *Data Networks*, 2nd edition, section 6.5.2). Rates hold
from one start or finish to the next.

    capacity 12      A ──────────────┐ 6       A ── 12
                     B ──────────────┘ 6       (B is done)

Times are float nanoseconds inside. :func:`whole_ns` gives the integer a clock of whole nanoseconds shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from .units import NS_PER_S

_SAME_LEVEL = 1.0 + 1e-12  # resources that fill up at levels this close fill up together
_SLACK_NS = 1e-3  # flows that end this close end together: far below a tick, far above rounding
_MEMORY = 1 << 16  # sets of flows in flight whose rates are remembered


class FlowClass(NamedTuple):
    """What decides a flow's rate: how often it takes each resource, and its own cap."""

    uses: tuple[tuple[int, int], ...]
    cap: float


def _slack(time_ns: float) -> float:
    """How far from ``time_ns`` an end still counts as being at it: :data:`_SLACK_NS`, or what a float resolves."""
    return max(_SLACK_NS, 8 * math.ulp(time_ns))


def whole_ns(time_ns: float) -> int:
    """The first whole nanosecond at which :meth:`Fluid.advance` reports a flow that ends at ``time_ns``."""
    return math.ceil(time_ns - _slack(time_ns))


def max_min_rates(capacities: Sequence[float], flows: Iterable[tuple[FlowClass, int]]) -> dict[FlowClass, float]:
    """Max-min fair rates of classes of equal flows: each class with how many flows of it there are.

    Rates are in the unit of ``capacities`` and hold for each single flow. A flow that takes a resource twice loads it
    with twice its rate.
    """
    rising = dict(flows)
    room: dict[int, float] = {}  # capacity less what the flows take whose rate is settled
    load: dict[int, int] = {}  # what the others take together, as a multiple of their common rate
    for kind, count in rising.items():
        for resource, times in kind.uses:
            room[resource] = capacities[resource]
            load[resource] = load.get(resource, 0) + times * count
    rates: dict[FlowClass, float] = {}
    level = 0.0
    while rising:
        full_at = {resource: room[resource] / times for resource, times in load.items()}
        lowest = min(min(full_at.values(), default=math.inf), min(kind.cap for kind in rising))
        level = max(level, lowest)  # levels never fall, but for rounding
        reach = level * _SAME_LEVEL
        settled = [
            kind for kind in rising if kind.cap <= reach or any(full_at[resource] <= reach for resource, _ in kind.uses)
        ]
        for kind in settled:
            rates[kind] = level
            count = rising.pop(kind)
            for resource, times in kind.uses:
                room[resource] -= times * count * level
                load[resource] -= times * count
                if not load[resource]:
                    del load[resource]
    return rates


class _Flow:
    """A flow in flight: bytes in all, bytes left, and its rate (bytes/ns) at present."""

    __slots__ = ("kind", "left", "rate", "total")

    def __init__(self, kind: FlowClass, total: float) -> None:
        self.kind, self.total, self.left, self.rate = kind, total, total, 0.0


class Fluid:
    """Flows in flight over resources of ``capacities`` (bytes/s each).

    Flows are known by any hashable name. Those that have ended are in ``finished`` (name → exact end, ns), from which
    the caller may remove what it has seen. A time before the latest one seen counts as the latest, so threads may read
    a common clock first and then take their lock; the class itself has no lock.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        if not all(capacity > 0 for capacity in capacities):
            raise ValueError(f"capacities must be positive, got {list(capacities)}")
        self.finished: dict[Hashable, float] = {}
        self._capacities = tuple(capacity / NS_PER_S for capacity in capacities)
        self._now = 0.0
        self._flows: dict[Hashable, _Flow] = {}
        self._in_flight: Counter[FlowClass] = Counter()
        self._stale = False  # flows came or went since the rates were set
        self._known_rates: dict[frozenset[tuple[FlowClass, int]], dict[FlowClass, float]] = {}
        self._kinds: dict[tuple[tuple[int, ...], float], FlowClass] = {}

    def __len__(self) -> int:
        """Flows in flight."""
        return len(self._flows)

    def start(self, now_ns: float, flow: Hashable, route: Sequence[int], bytes: float, cap: float = math.inf) -> None:
        """Let ``flow`` send ``bytes`` over the resources ``route`` (indices) at no more than ``cap`` bytes/s.

        A flow without bytes ends at once. Raises ValueError for a flow already in flight, negative or infinite
        bytes, a cap of zero, or a flow that nothing limits.
        """
        if flow in self._flows:
            raise ValueError(f"flow {flow!r} is in flight already")
        if not 0 <= bytes < math.inf:
            raise ValueError(f"flow {flow!r} has {bytes} bytes to send")
        kind = self._kind(tuple(route), cap)
        self.advance(now_ns)
        if bytes == 0:
            self.finished[flow] = self._now
            return
        self._flows[flow] = _Flow(kind, bytes)
        self._in_flight[kind] += 1
        self._stale = True

    def advance(self, now_ns: float) -> None:
        """Let time pass until ``now_ns``; flows that end by then move to ``finished``, in the order of their ends."""
        while self._flows:
            gap = self._gap()
            if gap > now_ns - self._now + _slack(now_ns):
                break
            self._pass(gap)
            self._finish()
        if now_ns > self._now:
            self._pass(now_ns - self._now)
            self._now = now_ns  # exactly

    def next_finish(self) -> tuple[float, Hashable] | None:
        """When the next flow ends (ns) if none starts before, and which: of several, the first started. None: idle."""
        if not self._flows:
            return None
        gap = self._gap()
        slack = _slack(self._now + gap)
        return self._now + gap, next(name for name, f in self._flows.items() if f.left <= f.rate * (gap + slack))

    def progress(self, flow: Hashable) -> float:
        """Bytes that ``flow`` has sent, as of the latest time. Raises KeyError if it is not in flight (any more)."""
        state = self._flows[flow]
        return state.total - state.left

    def rates(self) -> dict[Hashable, float]:
        """Present rate of every flow in flight, bytes/s."""
        self._set_rates()
        return {name: flow.rate * NS_PER_S for name, flow in self._flows.items()}

    def _kind(self, route: tuple[int, ...], cap: float) -> FlowClass:
        kind = self._kinds.get((route, cap))
        if kind is None:
            if not cap > 0:
                raise ValueError(f"a flow's cap must be positive, got {cap}")
            kind = FlowClass(tuple(sorted(Counter(route).items())), cap / NS_PER_S)
            if math.isinf(cap) and all(math.isinf(self._capacities[resource]) for resource, _ in kind.uses):
                raise ValueError(f"nothing limits a flow over {route}: give it a cap or a resource")
            self._kinds[route, cap] = kind
        return kind

    def _set_rates(self) -> None:
        if not self._stale:
            return
        self._stale = False
        key = frozenset(self._in_flight.items())
        rates = self._known_rates.get(key)
        if rates is None:
            if len(self._known_rates) >= _MEMORY:
                self._known_rates.clear()
            rates = self._known_rates[key] = max_min_rates(self._capacities, self._in_flight.items())
        for flow in self._flows.values():
            flow.rate = rates[flow.kind]

    def _gap(self) -> float:
        """Time from now to the next end (ns). There must be a flow."""
        self._set_rates()
        return min(flow.left / flow.rate for flow in self._flows.values())

    def _pass(self, duration_ns: float) -> None:
        """Let time pass in which no flow ends, or just at its end."""
        self._set_rates()
        for flow in self._flows.values():
            flow.left -= flow.rate * duration_ns
        self._now += duration_ns

    def _finish(self) -> None:
        """End every flow that has nothing left to send now."""
        slack = _slack(self._now)
        ended = [name for name, flow in self._flows.items() if flow.left <= flow.rate * slack]
        for name in ended:
            kind = self._flows.pop(name).kind
            self._in_flight[kind] -= 1
            if not self._in_flight[kind]:
                del self._in_flight[kind]
            self.finished[name] = self._now
        self._stale = True
