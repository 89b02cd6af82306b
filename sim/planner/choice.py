"""What someone has fixed of a plan, the rest being open. ``completion`` makes one plan of it; it restricts a search."""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import PlanError
from ..plan import Pack, Policy, Reduce, Residency, StashPlace, UpdateOn, UpdateWhen, Writeback, fields_of

Packing = int | tuple[Pack, ...]
"""A count of packs, to be balanced by time, or the packs themselves."""


class PlanChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a plan but for its policy, minibatch and GPUs; None leaves one open."""

    u_fwd: int | None = None
    u_bwd: int | None = None
    packs_fwd: Packing | None = None
    packs_bwd: Packing | None = None
    update: UpdateOn | None = None
    update_when: UpdateWhen | None = None
    reduce: Reduce | None = None
    slots: int | None = None
    prefetch: bool | None = None
    stash: StashPlace | tuple[StashPlace, ...] | None = None
    resident_weights: tuple[int, ...] | None = None
    resident_state: tuple[int, ...] | None = None
    gpu_order: tuple[int, ...] | None = None
    split_backward: int | None = None
    overlap_steps: bool | None = None
    residency: Residency | None = None
    writeback: Writeback | None = None
    recompute: bool | None = None
    prefetch_depth: int | None = None

    def fixed(self) -> dict[str, Any]:
        """Just the fields that are fixed."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}

    def fixed_for(self, policy: Policy) -> dict[str, Any]:
        """The same, for a plan of this policy. Raises PlanError if such plans lack a field that is fixed."""
        fixed = self.fixed()
        known = fields_of(policy)
        foreign = [f"--{name.replace('_', '-')}" for name in fixed if name not in known]
        if foreign:
            raise PlanError(f"{', '.join(foreign)} is not an option of {policy.value} plans; leave it out")
        return fixed
