"""Copies as fluid flows that share resources max-min fairly.

Every flow loads some resources (a link's direction, the host's DRAM, …) and may have a cap of its own. At any time
the rates are the max-min fair ones: nobody's rate can grow without taking from someone who has no more. They are
found by progressive filling: raise all rates together; when a resource is full, or a flow at its cap, those flows stay
at that level; go on with the others (Bertsekas and Gallager, *Data Networks*, 2nd edition, section 6.5.2). Rates hold
from one start or end to the next.

    capacity 12 B/ns     A, 120 B   ├── 6 ──┤── 12 ─┤        B ends at 10 ns,
                         B,  60 B   ├── 6 ──┤                A at 15 ns

Flows of a lower ``rank`` go first: they share as if the others were not there, and leave them what is over. So B of
rank 0 and A of rank 1 would have B end at 5 ns and A, which waits till then, at 15 ns.

Times are float nanoseconds inside. :func:`whole_ns` gives the integer that a clock of whole nanoseconds shows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ..units import NS_PER_S

_SAME_LEVEL = 1.0 + 1e-12  # what fills up at levels this close fills up together
_NO_ROOM = 1e-12  # of a capacity: less than that is rounding
SLACK_NS = 1e-3  # flows that end this close end together: far below a tick, above the rounding of hours
_COUNT_BITS = 32  # more flows of one class than that can count fit into no memory
_REMEMBERED = 1 << 16  # sets of flows in flight whose rates are kept


def whole_ns(time_ns: float) -> int:
    """The first whole nanosecond at which :meth:`Fluid.advance` reports a flow that ends at ``time_ns``."""
    return math.ceil(time_ns - SLACK_NS)


Loads = tuple[tuple[int, float], ...]
"""(resource, how often each byte of a flow passes it): 2.0 for a flow that takes it twice, 0.5 for one that sends half
of its bytes another way. Each resource is named once."""


class FlowClass(NamedTuple):
    """What decides a flow's rate: its loads, its own cap (as capacities), and its rank."""

    loads: Loads
    cap: float
    rank: int = 0


def max_min_rates(
    capacities: Sequence[float], classes: Sequence[FlowClass], counts: Mapping[int, int]
) -> dict[int, float]:
    """Max-min fair rate of each flow, by class: ``counts`` says how many flows of ``classes[i]`` there are.

    Rates are in the unit of ``capacities``; a flow of no rate has nothing left by those of lower ranks.
    """
    room = list(capacities)
    rates: dict[int, float] = {}
    for rank in sorted({classes[i].rank for i in counts}):
        _fill(room, classes, {i: count for i, count in counts.items() if classes[i].rank == rank}, rates)
        room = [0.0 if left < _NO_ROOM * whole else left for left, whole in zip(room, capacities, strict=True)]
    return rates


def _fill(room: list[float], classes: Sequence[FlowClass], counts: Mapping[int, int], rates: dict[int, float]) -> None:
    """Add these flows' ``rates``, and take them from the ``room`` that each resource has."""
    slope: dict[int, float] = {}  # load of the flows whose rate is not settled, as a multiple of their common rate
    users: dict[int, list[int]] = {}
    for i, count in counts.items():
        for resource, times in classes[i].loads:
            slope[resource] = slope.get(resource, 0.0) + times * count
            users.setdefault(resource, []).append(i)
    rising = {resource: len(kinds) for resource, kinds in users.items()}  # classes among these flows
    capped = sorted([i for i in counts if classes[i].cap < math.inf], key=lambda i: classes[i].cap, reverse=True)
    todo = set(counts)
    level = 0.0
    while todo:
        full_at = [(room[resource] / slope[resource], resource) for resource in rising]
        lowest = min([*full_at, (classes[capped[-1]].cap, -1)] if capped else full_at)[0]
        level = max(level, lowest)  # levels never fall, but for rounding
        reach = level * _SAME_LEVEL
        settled = [i for at, resource in full_at if at <= reach for i in users[resource]]
        while capped and classes[capped[-1]].cap <= reach:
            settled.append(capped.pop())
        for i in settled:
            if i not in todo:
                continue
            todo.remove(i)
            rates[i] = level
            for resource, times in classes[i].loads:
                room[resource] -= times * counts[i] * level
                slope[resource] -= times * counts[i]
                rising[resource] -= 1
                if not rising[resource]:
                    del rising[resource]


class _Flow:
    """A flow in flight. It has had ``rate`` (bytes/ns) since ``since_ns``, when ``left`` bytes were to be sent."""

    __slots__ = ("ends_ns", "kind", "left", "rate", "since_ns", "total")

    def __init__(self, kind: int, total: float, now_ns: float) -> None:
        self.kind, self.total, self.left, self.since_ns = kind, total, total, now_ns
        self.rate, self.ends_ns = 0.0, math.inf

    def left_at(self, now_ns: float) -> float:
        return self.left - self.rate * (now_ns - self.since_ns)


class Fluid:
    """Flows in flight over resources of ``capacities`` (bytes/s each).

    Flows are known by any hashable name. Those that have ended are in ``finished`` (name → exact end, ns), from which
    the caller may remove what it has seen. A time before the latest one seen counts as the latest, so threads may read
    a common clock first and then take their lock; the class itself has no lock.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        if not all(capacity > 0 for capacity in capacities):
            raise ValueError(f"capacities must be positive, got {list(capacities)}")
        self.finished: dict[Any, float] = {}
        self._capacities = tuple(capacity / NS_PER_S for capacity in capacities)
        self._now = 0.0
        self._flows: dict[Hashable, _Flow] = {}
        self._mix = 0  # how many flows of each class are in flight, in so many bits for each
        self._stale = False  # flows came or went since the rates were set
        self._next_end = math.inf
        self._classes: list[FlowClass] = []
        self._class_of: dict[tuple[Loads, float, int], int] = {}
        self._known_rates: dict[int, dict[int, float]] = {}  # by mix

    def __len__(self) -> int:
        """Flows in flight."""
        return len(self._flows)

    def start(
        self, now_ns: float, flow: Hashable, loads: Loads, bytes: float, cap: float = math.inf, rank: int = 0
    ) -> None:
        """Let ``flow`` send ``bytes`` over the resources that it loads at no more than ``cap`` bytes/s.

        A flow without bytes ends at once. Raises ValueError for a flow already in flight, negative or infinite
        bytes, a cap of zero, or a flow that nothing limits.
        """
        if flow in self._flows:
            raise ValueError(f"flow {flow!r} is in flight already")
        if not 0 <= bytes < math.inf:
            raise ValueError(f"flow {flow!r} has {bytes} bytes to send")
        kind = self._class(loads, cap / NS_PER_S, rank)
        if now_ns > self._now:
            self.advance(now_ns)
        if bytes == 0:
            self.finished[flow] = self._now
            return
        self._flows[flow] = _Flow(kind, bytes, self._now)
        self._count(kind, 1)

    def rerank(self, now_ns: float, flow: Hashable, rank: int) -> None:
        """Give ``flow`` another rank from now on; nothing happens if it is not in flight (any more)."""
        self.advance(now_ns)
        state = self._flows.get(flow)
        if state is not None:
            self._count(state.kind, -1)
            loads, cap, _ = self._classes[state.kind]
            state.kind = self._class(loads, cap, rank)
            self._count(state.kind, 1)

    def advance(self, now_ns: float) -> None:
        """Let time pass until ``now_ns``; flows that end by then move to ``finished``, in the order of their ends."""
        while self.next_end() <= now_ns + SLACK_NS:
            self._now = max(self._now, self._next_end)
            self._end_flows()
        if now_ns > self._now:
            self._now = now_ns

    def next_end(self) -> float:
        """When the next flow ends (ns) if none starts before; infinity if nothing is in flight."""
        if self._stale:
            self._set_rates()
        return self._next_end

    def progress(self, flow: Hashable) -> float:
        """Bytes that ``flow`` has sent, as of the latest time. Raises KeyError if it is not in flight (any more)."""
        state = self._flows[flow]
        return state.total - state.left_at(self._now)

    def rates(self) -> dict[Hashable, float]:
        """Present rate of every flow in flight, bytes/s."""
        if self._stale:
            self._set_rates()
        return {name: flow.rate * NS_PER_S for name, flow in self._flows.items()}

    def _class(self, loads: Loads, cap: float, rank: int) -> int:
        """Index of the class of such flows; ``cap`` in bytes/ns."""
        kind = self._class_of.get((loads, cap, rank))
        if kind is None:
            if not cap > 0:
                raise ValueError(f"a flow's cap must be positive, got {cap}")
            if len({resource for resource, _ in loads}) < len(loads) or not all(times > 0 for _, times in loads):
                raise ValueError(f"loads must name each resource once, more than 0 times each; got {loads}")
            if math.isinf(cap) and all(math.isinf(self._capacities[resource]) for resource, _ in loads):
                raise ValueError(f"nothing limits a flow over {loads}: give it a cap or a resource")
            kind = self._class_of[loads, cap, rank] = len(self._classes)
            self._classes.append(FlowClass(loads, cap, rank))
        return kind

    def _count(self, kind: int, change: int) -> None:
        """One flow more or less of this class."""
        self._mix += change << (_COUNT_BITS * kind)
        self._stale = True

    def _set_rates(self) -> None:
        """Bring rates and ends up to date. A flow whose rate stays keeps its end, to the last bit."""
        self._stale = False
        rates, now, next_end = self._rates(), self._now, math.inf
        for flow in self._flows.values():
            rate = rates[flow.kind]
            if rate != flow.rate:
                flow.left -= flow.rate * (now - flow.since_ns)
                flow.since_ns, flow.rate = now, rate
                flow.ends_ns = now + flow.left / rate if rate else math.inf
            if flow.ends_ns < next_end:
                next_end = flow.ends_ns
        self._next_end = next_end

    def _rates(self) -> dict[int, float]:
        """Rate of each class in flight (bytes/ns)."""
        rates = self._known_rates.get(self._mix)
        if rates is None:
            if len(self._known_rates) >= _REMEMBERED:
                self._known_rates.clear()
            counts = Counter(flow.kind for flow in self._flows.values())
            rates = self._known_rates[self._mix] = max_min_rates(self._capacities, self._classes, counts)
        return rates

    def _end_flows(self) -> None:
        """Move the flows that end now to ``finished``."""
        latest = self._now + SLACK_NS
        for name in [name for name, flow in self._flows.items() if flow.ends_ns <= latest]:
            self._count(self._flows.pop(name).kind, -1)
            self.finished[name] = self._now
