"""Variations: plans that differ from a plan in one option that a search does not enumerate.

With every such option, the candidates of a search would double. So the search enumerates plans with defaults, and then
climbs from the best of them: it simulates their variations, and the variations of those, while that leads on.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from traces.costs import Costs

from ..builders.order import split_packs
from ..errors import PlanError
from ..hardware.machine import Machine
from ..hardware.switches import cross_order
from ..plan import HarmonyPlan, Plan, StashPlace, UpdateOn, fields_of, pieces
from .space import Space

_Values = Callable[[HarmonyPlan, Costs, Machine], Iterable[Any]]
"""Values worth trying in one field of a plan; they may depend on the rest of the plan."""


def _gpu_orders(plan: HarmonyPlan, costs: Costs, machine: Machine) -> list[tuple[int, ...] | None]:
    """Ascending, and crossing switches."""
    crossing = cross_order(machine)
    return [None] if list(crossing) == sorted(crossing) else [None, crossing]


def _splits(plan: HarmonyPlan, costs: Costs, machine: Machine) -> Iterator[int]:
    """Backwards in one, and in two parts that are one microbatch apart, two, four, and so on to all."""
    yield 0
    if not split_packs(replace(plan, split_backward=1), costs):
        return
    microbatches = len(pieces(0, plan.minibatch, plan.u_bwd))
    apart = 1
    while apart < 2 * microbatches:
        yield min(apart, microbatches)
        apart *= 2


def _overlaps(plan: HarmonyPlan, costs: Costs, machine: Machine) -> list[bool]:
    return [False, True]


def _stashes(plan: HarmonyPlan, costs: Costs, machine: Machine) -> list[StashPlace | tuple[StashPlace, ...]]:
    """All in one place; or on GPUs only those of the last half, quarter, … of the packs, which wait the least."""
    count = len(plan.stash_places)
    partly = [(StashPlace.SWAP,) * (count - kept) + (StashPlace.KEEP,) * kept for kept in _halved(count // 2)]
    return [*StashPlace, *partly] if count else []


def _residents(plan: HarmonyPlan, costs: Costs, machine: Machine) -> list[tuple[int, ...]]:
    """None, all backward packs, or the last half of them, quarter, …; dealt round robin, these are on all GPUs."""
    count = len(plan.packs_bwd)
    return [(), *(tuple(range(count - stay, count)) for stay in _halved(count))]


def _resident_states(plan: HarmonyPlan, costs: Costs, machine: Machine) -> list[tuple[int, ...]]:
    return _residents(plan, costs, machine) if plan.update is UpdateOn.GPU else [()]


def _halved(count: int) -> Iterator[int]:
    """``count``, its half, … down to 1."""
    while count:
        yield count
        count //= 2


_VARIED: Mapping[str, _Values] = {
    "gpu_order": _gpu_orders,
    "split_backward": _splits,
    "stash": _stashes,
    "resident_weights": _residents,
    "resident_state": _resident_states,
    "overlap_steps": _overlaps,
}
"""By field."""

LAST = frozenset({"overlap_steps"})
"""Fields that are tried last, on the best alone: steps that overlap take several times as long to simulate, and what
they gain hardly depends on the rest of a plan."""

CLIMBED = frozenset(_VARIED) - LAST
"""Fields that a search climbs by."""


def variations(
    plan: Plan, costs: Costs, machine: Machine, space: Space, fields: Container[str] = CLIMBED | LAST
) -> Iterator[Plan]:
    """Of a plan, in those of the ``fields`` that mean something in it and that the space leaves open.

    What contradicts the rest of the plan is passed over.
    """
    if not isinstance(plan, HarmonyPlan):
        return
    for name in fields_of(plan.policy):
        if name not in _VARIED or name not in fields or not space.leaves_open(name):
            continue
        for value in _VARIED[name](plan, costs, machine):
            if value != getattr(plan, name):
                try:
                    yield replace(plan, **{name: value})
                except PlanError:
                    continue
