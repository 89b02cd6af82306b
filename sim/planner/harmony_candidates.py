"""Harmony plans as pairs of a backward half (microbatch size, packs) and a forward half (the same).

There are few halves and many pairs. What a half makes GPUs and links do at least, and what it will probably take, is
worked out once; for all pairs it is just added up. Only pairs that are looked at more closely become plans.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.costs import Costs
from traces.errors import TraceError
from traces.schema import Phase

from ..errors import DoesNotFit, PlanError
from ..hardware.machine import Machine
from ..plan import HarmonyPlan, Pack, Policy, Reduce, StashPlace, UpdateOn, UpdateWhen, shares, stash_places
from .candidates import Candidates, Sizes, Times
from .choice import Packing
from .expectations import Expectations
from .halves import Busy, Halves
from .packing import Packer, packing_gpu
from .refusals import Reason, Refusals
from .space import ALL_COUNTS, Space, pack_counts


def harmony_candidates(
    policy: Policy,
    minibatch: int,
    costs: Costs,
    machine: Machine,
    space: Space,
    refusals: Refusals,
) -> Candidates:
    """All plans of this policy and space; microbatch sizes of which no cut into packs fits are ``refusals``.

    Raises TraceError if the trace covers no microbatch size, or one that the space demands, or no update.
    """
    return _Enumeration(policy, minibatch, costs, machine, space, refusals).candidates()


GpuOrder = tuple[int, ...] | None


class _Options(NamedTuple):
    """What a plan has besides microbatch sizes and packs."""

    update: UpdateOn
    reduce: Reduce
    prefetch: bool
    slots: int | None
    gpu_order: GpuOrder = None
    update_when: UpdateWhen = UpdateWhen.JIT
    overlap_steps: bool = False
    stash: StashPlace | tuple[StashPlace, ...] = StashPlace.SWAP
    split_backward: int = 0
    resident_weights: tuple[int, ...] = ()
    resident_state: tuple[int, ...] = ()


@dataclass(frozen=True)
class _ForwardHalves:
    """All forward halves of some layers and one microbatch size: packs, deals, busy and expected times."""

    u: int
    packs: list[tuple[Pack, ...]]
    deals: NDArray[np.int64]
    busy: Busy
    expected_ns: Times


@dataclass(frozen=True)
class _BackwardHalf:
    """A backward half."""

    options: _Options
    u: int
    packs: tuple[Pack, ...]
    busy: Busy
    expected_ns: float

    @property
    def keeps(self) -> bool:
        """Whether a stash stays on a GPU, which demands equal microbatch sizes."""
        return StashPlace.KEEP in stash_places(self.packs, self.options.stash).values()

    @property
    def stop(self) -> int:
        """Its forward halves hold the layers before this one."""
        return self.packs[-1][0]


class _Enumeration:
    """What the candidates of one search and policy have in common."""

    def __init__(
        self,
        policy: Policy,
        minibatch: int,
        costs: Costs,
        machine: Machine,
        space: Space,
        refusals: Refusals,
    ) -> None:
        self._policy, self._minibatch, self._gpus = policy, minibatch, len(machine.gpus)
        self._costs, self._machine, self._space, self._refusals = costs, machine, space, refusals
        self._parallel = policy is Policy.HARMONY_DP or self._gpus == 1
        samples = [stop - start for start, stop in shares(minibatch, self._gpus)] if self._parallel else [minibatch]
        self._sizes = Sizes(costs, samples)
        smallest_u = self._sizes.of(Phase.BACKWARD, space.u_bwd)[0]
        self._tightest = packing_gpu(costs, machine, smallest_u, in_pipeline=not self._parallel)
        self._cap = machine.gpus[self._tightest].usable_bytes
        self._same_size = any(layer.cut_sensitive for layer in costs.trace.layers)
        self._forward_packers: dict[int, Packer] = {}
        self._forward: dict[tuple[int, int, GpuOrder], _ForwardHalves] = {}
        self._known_halves: dict[tuple[object, ...], Halves] = {}
        self._stays = any((*(space.resident_weights or ()), *(space.resident_state or ())))
        self._expectations = Expectations(costs, machine, parallel=self._parallel)
        self._thinned = False

    def candidates(self) -> Candidates:
        """All of them."""
        forward_sizes = self._sizes.of(Phase.FORWARD, self._space.u_fwd)
        pairs = []
        for half in self._backward_halves(forward_sizes):
            # Without layers in forward, or if sizes matter, the only forward size is the backward's.
            sizes = [u for u in forward_sizes if u == half.u] if half.keeps else forward_sizes
            for u in [half.u] if half.stop == 0 or self._same_size else sizes:
                forward = self._forward_halves(half.stop, u, half.options.gpu_order)
                if forward.packs:
                    pairs.append((half, forward))
        notes = self._sizes.notes()
        if self._thinned:
            notes.append(f"of more than {ALL_COUNTS} possible numbers of packs only some were tried")
        if self._same_size:
            notes.append("some layers depend on how the minibatch is cut, or on chance: u_fwd = u_bwd")
        if not pairs:
            return Candidates(notes=tuple(notes))
        bounds = [(fwd.busy + bwd.busy[fwd.deals % len(bwd.busy)]).max(axis=-1) for bwd, fwd in pairs]
        hints = [fwd.expected_ns + bwd.expected_ns for bwd, fwd in pairs]
        starts = [0, *accumulate(len(fwd.packs) for _, fwd in pairs)]

        def plan(number: int) -> HarmonyPlan:
            at = bisect_right(starts, number) - 1
            backward, forward = pairs[at]
            packs_fwd = forward.packs[number - starts[at]]
            return self._plan(forward.u, packs_fwd, backward.u, backward.packs, backward.options)

        return Candidates(
            bounds_ns=np.concatenate(bounds),
            hints_ns=np.concatenate(hints),
            plan=plan,
            expected_ns=lambda number: self._expectations.plan_ns(plan(number)),
            open_slots=not self._parallel and self._space.slots is None,
            notes=tuple(notes),
        )

    def _plan(
        self, u_fwd: int, packs_fwd: tuple[Pack, ...], u_bwd: int, packs_bwd: tuple[Pack, ...], options: _Options
    ) -> HarmonyPlan:
        return HarmonyPlan(
            policy=self._policy,
            minibatch=self._minibatch,
            gpus=self._gpus,
            u_fwd=u_fwd,
            u_bwd=u_bwd,
            packs_fwd=packs_fwd,
            packs_bwd=packs_bwd,
            **options._asdict(),
        )

    def _backward_halves(self, forward_sizes: list[int]) -> Iterator[_BackwardHalf]:
        sizes = self._sizes.of(Phase.BACKWARD, self._space.u_bwd)
        if self._same_size:
            sizes = [u for u in sizes if u in forward_sizes]
        for update in self._updates():
            cuts = [(u, packs) for u in sizes for packs in self._backward_cuts(u, update)]
            splits = (self._space.split_backward or (0,)) if not self._parallel else (0,)
            choices = product(
                [update],
                self._reduces(),
                self._space.prefetch,
                self._slots(),
                self._space.gpu_order or (None,),
                self._space.update_when,
                self._space.overlap_steps or (False,),
                self._space.stash or (StashPlace.SWAP,),
                splits,
                self._space.resident_weights or ((),),
                self._space.resident_state or ((),),
            )
            for options in map(_Options._make, choices):
                halves = self._halves(options)
                for u, packs in cuts:
                    try:
                        plan = self._plan(u, _one_pack(packs[-1][0]), u, packs, options)
                    except PlanError as error:
                        self._refusals.add(self._policy, Reason.PLAN, error)
                        continue
                    busy = halves.backward(u, packs, plan.stash_places)
                    yield _BackwardHalf(options, u, packs, busy, self._expectations.backward_ns(plan))

    def _forward_halves(self, stop: int, u: int, gpu_order: GpuOrder) -> _ForwardHalves:
        """All forward halves of the layers before ``stop`` and this microbatch size; alike for all other options."""
        key = stop, u, gpu_order
        if key not in self._forward:
            if stop == 0 and self._space.packs_fwd is None:
                cuts: list[tuple[Pack, ...]] = [()]
            else:
                packer = self._forward_packer(u)
                packings = self._packings(packer, self._space.packs_fwd, stop, Phase.FORWARD)
                cuts = [_cut(packer, packing, stop) for packing in packings]
            after = (*_one_pack(stop), (stop, self._costs.layer_count - 1))
            options = _Options(UpdateOn.CPU, Reduce.RING, prefetch=True, slots=None, gpu_order=gpu_order)
            expected = [self._expectations.forward_ns(self._plan(u, each, u, after, options)) for each in cuts]
            halves = self._halves(options)
            busy = [halves.forward(u, each) if each else halves.no_forward for each in cuts]
            deals = np.array([len(each) % self._gpus for each in cuts])
            self._forward[key] = _ForwardHalves(u, cuts, deals, np.array(busy), np.array(expected))
        return self._forward[key]

    def _backward_cuts(self, u: int, update: UpdateOn) -> Iterator[tuple[Pack, ...]]:
        stop = self._costs.layer_count
        packer = Packer(self._costs, u, Phase.BACKWARD, self._cap, update=update)
        for packing in self._packings(packer, self._space.packs_bwd, stop, Phase.BACKWARD):
            yield _cut(packer, packing, stop)

    def _packings(self, packer: Packer, wanted: tuple[Packing, ...] | None, stop: int, phase: Phase) -> list[Packing]:
        """Numbers of packs to try for the layers before ``stop`` that fit, and packs that are given as such."""
        explicit: list[Packing] = []
        numbers = [packing for packing in wanted or () if isinstance(packing, int)]
        for packs in [packing for packing in wanted or () if isinstance(packing, tuple)]:
            if (packs[-1][1] + 1 if packs else 0) == stop:
                explicit.append(packs)
            else:
                where = (
                    f"must end at layer {stop - 1}" if stop else "must be none, as one backward pack holds all layers"
                )
                error = PlanError(f"{phase.value} packs {packs} {where}")
                self._refusals.add(self._policy, Reason.PLAN, error)
        if wanted is not None and not numbers:
            return explicit
        smallest = packer.smallest_count(stop)
        if smallest is None:
            pack, held = packer.hungriest(stop)
            what = f"the {phase.value} of one microbatch"
            self._refusals.add(self._policy, Reason.PACKS, DoesNotFit(self._tightest, pack, what, held, self._cap))
            return explicit
        if wanted is None:
            numbers = list(pack_counts(smallest, stop, self._gpus))
            self._thinned |= len(numbers) < stop - smallest + 1
        fitting = [number for number in numbers if packer.bottleneck_ns(number, stop) is not None]
        if wanted is not None and not fitting:
            counts = " or ".join(map(str, numbers))
            error = PlanError(
                f"layers before {stop} cannot be cut into {counts} {phase.value} packs that each fit; the fewest that "
                f"fit are {smallest}, the most are {stop}"
            )
            self._refusals.add(self._policy, Reason.PLAN, error)
        return explicit + fitting

    def _halves(self, options: _Options) -> Halves:
        key = options.update, options.update_when, options.reduce, options.gpu_order, options.split_backward > 0
        if key not in self._known_halves:
            self._known_halves[key] = Halves(
                self._costs,
                self._machine,
                parallel=self._parallel,
                minibatch=self._minibatch,
                update=options.update,
                update_when=options.update_when,
                reduce=options.reduce,
                turns=options.gpu_order or range(self._gpus),
                split=options.split_backward > 0,
                stays=self._stays,
            )
        return self._known_halves[key]

    def _forward_packer(self, u: int) -> Packer:
        if u not in self._forward_packers:
            self._forward_packers[u] = Packer(self._costs, u, Phase.FORWARD, self._cap)
        return self._forward_packers[u]

    def _updates(self) -> tuple[UpdateOn, ...]:
        """Where updates may run: as the space says, else wherever the trace says how long they take."""
        wanted = self._space.update
        known = []
        refusal: TraceError | None = None
        for update in wanted or tuple(UpdateOn):
            phase = Phase.UPDATE_CPU if update is UpdateOn.CPU else Phase.UPDATE_GPU
            try:
                self._costs.update_ns(0, self._costs.layer_count - 1, phase)
                known.append(update)
            except TraceError as error:
                if wanted is not None:
                    raise
                refusal = refusal or error
        if refusal and not known:
            raise refusal
        return tuple(known)

    def _reduces(self) -> tuple[Reduce, ...]:
        return self._space.reduce if self._parallel and self._gpus > 1 else self._space.reduce[:1]

    def _slots(self) -> tuple[int | None, ...]:
        return (None,) if self._parallel or self._space.slots is None else self._space.slots


def _one_pack(stop: int) -> tuple[Pack, ...]:
    """The layers before ``stop`` in one pack; none if there are no layers."""
    return ((0, stop - 1),) if stop else ()


def _cut(packer: Packer, packing: Packing, stop: int) -> tuple[Pack, ...]:
    if isinstance(packing, tuple):
        return packing
    packs = packer.balanced(packing, stop)
    assert packs is not None, "only numbers that fit are listed"
    return packs
