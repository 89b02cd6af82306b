"""The Plan: a point in the search space, from which a Schedule is built.

Three families: :class:`HarmonyPlan` (grouped microbatches, packs, just-in-time updates), and two of baselines,
:class:`PagedPlan` (a plain schedule run over a pager) and :class:`ShardedPlan` (state cut into shards). A pack is a run
of consecutive layers, ``(first, last)``, both included.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import Annotated

import msgspec

from .errors import PlanError

Count = Annotated[int, msgspec.Meta(ge=1)]
Pack = tuple[int, int]


class Policy(Enum):
    """How a training step is laid out over GPUs."""

    HARMONY_DP = "harmony-dp"
    HARMONY_PP = "harmony-pp"
    DP_SWAP = "dp-swap"
    GPIPE_SWAP = "gpipe-swap"
    ONE_F_ONE_B_SWAP = "1f1b-swap"
    ZERO3_OFFLOAD = "zero3-offload"

    @property
    def is_harmony(self) -> bool:
        """Whether it is one of Harmony's own, no baseline."""
        return self in (Policy.HARMONY_DP, Policy.HARMONY_PP)

    @property
    def is_paged(self) -> bool:
        """Whether it is a plain schedule over a pager."""
        return not self.is_harmony and self is not Policy.ZERO3_OFFLOAD

    @property
    def splits_minibatch(self) -> bool:
        """Whether every GPU runs all layers on a share of the minibatch, rather than some layers on all of it."""
        return self in (Policy.HARMONY_DP, Policy.DP_SWAP, Policy.ZERO3_OFFLOAD)

    @property
    def has_private_stores(self) -> bool:
        """Whether every GPU has a copy of all state in the host, as separate processes have."""
        return self is Policy.DP_SWAP


class UpdateOn(Enum):
    """Where the optimizer runs."""

    CPU = "cpu"
    GPU = "gpu"


class UpdateWhen(Enum):
    """When the optimizer runs: for each pack just after its backward; or for all after the last backward, when the host
    has taken the norm of the whole gradient, which waits there (clipping by that norm and skipping steps need it)."""

    JIT = "jit"
    END = "end"


class Reduce(Enum):
    """How data-parallel gradients are added: by a ring all-reduce between GPUs; in host memory in rank order; or by a
    reduce-scatter between GPUs, after which each GPU sends home, or updates, its shard of the sum."""

    RING = "ring"
    HOST = "host"
    SCATTER = "scatter"


class StashPlace(Enum):
    """Where a backward pack's stash waits: out to the host and in again, or on the GPU of its backward; or nowhere,
    as layers from the stash before it (or the data) on run forward once more."""

    SWAP = "swap"
    KEEP = "keep"
    RECOMPUTE = "recompute"


class Residency(Enum):
    """What a pager evicts after each task: everything; everything the next task does not touch; or only when it must
    (least recently used)."""

    NONE = "none"
    NEXT = "next"
    LRU = "lru"


class Writeback(Enum):
    """Whether evicting copies out every tensor, or only those changed since they came in."""

    ALWAYS = "always"
    DROP = "drop"


class _PlanBase(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every plan has: the minibatch of all GPUs together (samples), and how many GPUs."""

    minibatch: Count
    gpus: Count


class HarmonyPlan(_PlanBase, frozen=True, tag_field="family", tag="harmony"):
    """A Harmony step. ``packs_bwd`` cover all layers; ``packs_fwd`` those before the last (fused) backward pack.

    ``slots`` bounds the boundary buffers a GPU holds that others sent it (pipeline only; None: as many as
    microbatches, which never spills). ``prefetch`` brings the next weights and inputs in while the current ones are
    computed on, as memory allows. ``stash``: one place for all stashes, or one for each backward pack that has one, in
    order: all but the first (its input is data) and the last.
    ``gpu_order`` names every GPU once, in the order in which they take turns: packs of a pipeline are dealt in it,
    data-parallel packs are updated in it (None: ascending).

    ``split_backward`` (pipeline only; 0: not) does backwards in two parts, so that the next pack's can start after the
    first: the gradient of the pack's input, and later, where the GPU would wait, those of its parameters. The first
    part is at most so many microbatches ahead of the second, and what the second needs is held meanwhile.

    ``overlap_steps``: no barrier between steps; a task starts as soon as what it needs of the step before is there.
    """

    policy: Policy
    u_fwd: Count
    u_bwd: Count
    packs_fwd: tuple[Pack, ...]
    packs_bwd: tuple[Pack, ...]
    update: UpdateOn = UpdateOn.CPU
    update_when: UpdateWhen = UpdateWhen.JIT
    reduce: Reduce = Reduce.RING
    slots: Count | None = None
    prefetch: bool = True
    stash: StashPlace | tuple[StashPlace, ...] = StashPlace.SWAP
    gpu_order: tuple[int, ...] | None = None
    split_backward: Annotated[int, msgspec.Meta(ge=0)] = 0
    overlap_steps: bool = False
    resident_weights: tuple[int, ...] = ()
    resident_state: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Check the fields against each other."""
        if not self.policy.is_harmony:
            raise PlanError(f"policy {self.policy.value} is not a Harmony policy; use harmony-dp or harmony-pp")
        _check_minibatch(self, self.policy)
        if not self.packs_bwd:
            raise PlanError("packs_bwd is empty; it must cover all layers")
        _check_run("packs_bwd", self.packs_bwd, self.packs_bwd[-1][1])
        _check_run("packs_fwd", self.packs_fwd, self.packs_bwd[-1][0] - 1)
        self._check_stash()
        self._check_residents()
        if self.gpu_order is not None and sorted(self.gpu_order) != list(range(self.gpus)):
            raise PlanError(
                f"gpu_order {','.join(map(str, self.gpu_order))} must name each of GPUs 0-{self.gpus - 1} once"
            )

    def gpu_of_turn(self, turn: int) -> int:
        """The GPU whose turn it is, as they take turns round and round; turns count from 0."""
        place = turn % self.gpus
        return place if self.gpu_order is None else self.gpu_order[place]

    @property
    def layer_count(self) -> int:
        """Layers the plan covers."""
        return self.packs_bwd[-1][1] + 1

    @property
    def stash_places(self) -> dict[int, StashPlace]:
        """Where each stash waits, by the index of its backward pack."""
        return stash_places(self.packs_bwd, self.stash)

    def packs_again(self, index: int) -> range:
        """Backward packs whose forwards must be repeated to make the input of this one, on its GPU."""
        places = self.stash_places
        start = index
        while places.get(start) is StashPlace.RECOMPUTE:
            start -= 1
        return range(start, index)

    def _check_residents(self) -> None:
        for name, indices in (("resident_weights", self.resident_weights), ("resident_state", self.resident_state)):
            if sorted(set(indices) & set(range(len(self.packs_bwd)))) != list(indices):
                raise PlanError(
                    f"{name}: {', '.join(map(str, indices))} must be backward packs, each once and in ascending order; "
                    f"there are packs 0-{len(self.packs_bwd) - 1}"
                )
        if self.overlap_steps and (self.resident_weights or self.resident_state):
            raise PlanError("overlap_steps: steps that overlap cannot leave weights or optimizer state on GPUs")
        if self.resident_state and self.update is UpdateOn.CPU:
            raise PlanError("resident_state: optimizer state is on GPUs only if they update; use update gpu")

    def _check_stash(self) -> None:
        if StashPlace.KEEP in self.stash_places.values() and self.u_fwd != self.u_bwd:
            raise PlanError(
                "stash: what stays on a GPU is used as the forward cut it, so keep needs u_fwd = u_bwd; got "
                f"{self.u_fwd} and {self.u_bwd}"
            )


class PagedPlan(_PlanBase, frozen=True, tag_field="family", tag="paged"):
    """A baseline: a plain schedule, layer by layer, over one pager per GPU. The update is on the GPU, after all
    backwards of that GPU, without a norm of the whole gradient. A plain schedule cuts forward and backward alike, so
    ``u_fwd`` equals ``u_bwd``.

    With ``recompute`` a backward repeats its layer's forward; else it takes what autograd saved in the first one.
    ``prefetch_depth``: of so many steps ahead the pager brings in what they touch, as memory allows.
    """

    policy: Policy
    u_fwd: Count
    u_bwd: Count
    residency: Residency = Residency.LRU
    writeback: Writeback = Writeback.ALWAYS
    recompute: bool = True
    prefetch_depth: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def overlap_steps(self) -> bool:
        """A baseline's steps never do."""
        return False

    def __post_init__(self) -> None:
        """Check the fields against each other."""
        if not self.policy.is_paged:
            known = ", ".join(policy.value for policy in Policy if policy.is_paged)
            raise PlanError(f"policy {self.policy.value} is not a paged baseline; use one of {known}")
        _check_same_size(self.policy, self.u_fwd, self.u_bwd)
        _check_minibatch(self, self.policy)


class ShardedPlan(_PlanBase, frozen=True, tag_field="family", tag="sharded"):
    """A baseline: data parallel over state that is cut into one shard for each GPU (``builders/sharded.py``). Layer by
    layer, weights are gathered from the shards and gradients scattered to them; the update is on the CPU, after all
    backwards in any case, and with ``update_when`` end after the norm. Forward and backward are cut alike, so ``u_fwd``
    equals ``u_bwd``.

    ``prefetch_depth``: so many steps ahead (a layer, one way) weights come in and are gathered, as memory allows.
    """

    policy: Policy
    u_fwd: Count
    u_bwd: Count
    update_when: UpdateWhen = UpdateWhen.JIT
    prefetch_depth: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def overlap_steps(self) -> bool:
        """A baseline's steps never do."""
        return False

    def __post_init__(self) -> None:
        """Check the fields against each other."""
        if self.policy is not Policy.ZERO3_OFFLOAD:
            raise PlanError(f"policy {self.policy.value} does not shard its state; use {Policy.ZERO3_OFFLOAD.value}")
        _check_same_size(self.policy, self.u_fwd, self.u_bwd)
        _check_minibatch(self, self.policy)


Plan = HarmonyPlan | PagedPlan | ShardedPlan


def fields_of(policy: Policy) -> tuple[str, ...]:
    """Names of the fields that mean something in plans of this policy."""
    if policy.is_paged:
        return PagedPlan.__struct_fields__
    if not policy.is_harmony:
        return ShardedPlan.__struct_fields__
    meaningless = ("reduce",) if policy is Policy.HARMONY_PP else ("slots", "split_backward")
    return tuple(name for name in HarmonyPlan.__struct_fields__ if name not in meaningless)


def stash_places(packs_bwd: Sequence[Pack], stash: StashPlace | tuple[StashPlace, ...]) -> dict[int, StashPlace]:
    """Where each stash waits, by the index of its backward pack. Raises PlanError if there are more or fewer."""
    packs = range(1, len(packs_bwd) - 1)
    if isinstance(stash, StashPlace):
        return dict.fromkeys(packs, stash)
    if len(stash) != len(packs):
        raise PlanError(
            f"stash: {len(stash)} places for {len(packs)} stashes; give one place for all, or one for each of the "
            f"{len(packs_bwd)} backward packs but the first and the last"
        )
    return dict(zip(packs, stash, strict=True))


def _check_minibatch(plan: _PlanBase, policy: Policy) -> None:
    if policy.splits_minibatch and plan.minibatch < plan.gpus:
        raise PlanError(
            f"{policy.value} gives each GPU a share of the minibatch: {plan.minibatch} samples are fewer than "
            f"{plan.gpus} GPUs; use a larger minibatch or fewer GPUs"
        )


def _check_same_size(policy: Policy, u_fwd: int, u_bwd: int) -> None:
    if u_fwd != u_bwd:
        raise PlanError(f"{policy.value} needs u_fwd = u_bwd; got {u_fwd} and {u_bwd}")


def _check_run(name: str, packs: tuple[Pack, ...], last_layer: int) -> None:
    """Packs must be consecutive, non-empty runs that cover 0…last_layer."""
    expected = 0
    for first, last in packs:
        if first != expected or last < first:
            raise PlanError(f"{name}: pack {first}-{last} should start at layer {expected} and hold at least one layer")
        expected = last + 1
    if expected != last_layer + 1:
        raise PlanError(f"{name}: the packs end at layer {expected - 1}, they must end at layer {last_layer}")


def pieces(start: int, stop: int, size: int) -> list[tuple[int, int]]:
    """Cut samples ``start … stop - 1`` into microbatches of ``size``; the last may be smaller (3, 3, 2)."""
    return [(at, min(at + size, stop)) for at in range(start, stop, size)]


def shares(minibatch: int, gpus: int) -> list[tuple[int, int]]:
    """Contiguous shares of the minibatch, one per GPU; the first ``minibatch % gpus`` get one sample more."""
    base, extra = divmod(minibatch, gpus)
    starts = [gpu * base + min(gpu, extra) for gpu in range(gpus + 1)]
    return list(pairwise(starts))
