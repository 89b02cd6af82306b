"""The Space: which plans a search looks at, by the values that each field of a plan may have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from ..plan import Policy, Reduce, Residency, StashPlace, UpdateOn, UpdateWhen, Writeback, fields_of
from .choice import Packing, PlanChoice

ALL_COUNTS = 32
"""So many pack counts are tried one by one; where there are more, ever fewer of the larger ones are."""

_ONE_BY_ONE = 8
_GROWTH = 1.3


@dataclass(frozen=True, kw_only=True)
class Space:
    """Allowed values of each field of a plan; None: all that make sense.

    That is, for microbatch sizes every one up to the share of a GPU (in a pipeline: to the minibatch) that the trace
    covers; for packs every count from the fewest that fit on (:func:`pack_counts` thins out many); for ``update`` the
    CPU, and the GPU if the trace says how long that takes; for ``slots`` as many as never spill, and where that does
    not fit half of them, a quarter and so on. ``gpu_order`` is ascending, ``split_backward`` 0, and steps do not
    overlap, but for variations of the best plans (``variations.py``).
    """

    u_fwd: tuple[int, ...] | None = None
    u_bwd: tuple[int, ...] | None = None
    packs_fwd: tuple[Packing, ...] | None = None
    packs_bwd: tuple[Packing, ...] | None = None
    update: tuple[UpdateOn, ...] | None = None
    update_when: tuple[UpdateWhen, ...] = (UpdateWhen.JIT,)
    reduce: tuple[Reduce, ...] = (Reduce.RING,)
    slots: tuple[int | None, ...] | None = None
    prefetch: tuple[bool, ...] = (True,)
    stash: tuple[StashPlace | tuple[StashPlace, ...], ...] | None = None
    resident_weights: tuple[tuple[int, ...], ...] | None = None
    resident_state: tuple[tuple[int, ...], ...] | None = None
    gpu_order: tuple[tuple[int, ...] | None, ...] | None = None
    split_backward: tuple[int, ...] | None = None
    overlap_steps: tuple[bool, ...] | None = None
    residency: tuple[Residency, ...] = (Residency.LRU,)
    writeback: tuple[Writeback, ...] = (Writeback.ALWAYS, Writeback.DROP)
    recompute: tuple[bool, ...] = (True, False)
    prefetch_depth: tuple[int, ...] = (0, 1, 4, 16)

    @classmethod
    def of(cls, choice: PlanChoice) -> Space:
        """The space in which all that is fixed has its value, and all else is open."""
        return cls(**{name: (value,) for name, value in choice.fixed().items()})

    def leaves_open(self, field: str) -> bool:
        """Whether a field of plans may have any value."""
        return getattr(self, field) is None

    def check(self, policies: tuple[Policy, ...]) -> None:
        """Raises PlanError for restrictions that concern none of the policies."""
        known: set[str] = set()
        for policy in policies:
            known.update(fields_of(policy))
        foreign = [name for name, value in self._restrictions().items() if name not in known]
        if foreign:
            names = ", ".join(policy.value for policy in policies)
            raise PlanError(f"{', '.join(foreign)}: not a field of {names} plans; leave it out")

    def _restrictions(self) -> dict[str, Any]:
        open_space = Space()
        return {name: value for name, value in vars(self).items() if value != getattr(open_space, name)}


def pack_counts(smallest: int, most: int, gpus: int) -> tuple[int, ...]:
    """Numbers of packs to try, from the ``smallest`` that fits to ``most``.

    If there are many, the first are tried one by one, and then ever fewer, each about 30 % larger than the one before:
    multiples of ``gpus`` and their neighbours, since packs are dealt round robin.
    """
    if most - smallest < ALL_COUNTS:
        return tuple(range(smallest, most + 1))
    counts = set(range(smallest, smallest + _ONE_BY_ONE))
    at = float(smallest + _ONE_BY_ONE)
    while at < most:
        multiple, around = round(at / gpus) * gpus, int(gpus > 1)
        counts.update(range(multiple - around, multiple + around + 1))
        at *= _GROWTH
    return tuple(sorted(count for count in {*counts, most} if smallest <= count <= most))
