"""Harmony plans as pairs of a backward half (microbatch size, packs) and a forward half (the same).

For every pair the halves' busy times add up to a bound. What has not been looked at so closely waits in the queue with
a bound that holds for all of it::

    backward half ──► with each forward size ──► with each number of forward packs ──► plan
    least forward     packs cut, exact sums      bounded as a whole                    turn comes: simulate
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from traces.costs import Costs
from traces.errors import TraceError
from traces.schema import Phase

from ..errors import DoesNotFit, PlanError
from ..hardware.machine import Machine
from ..plan import HarmonyPlan, Pack, Policy, Reduce, UpdateOn, shares
from .candidates import Candidate, Candidates, Sizes, Source
from .choice import Packing
from .estimates import Estimator
from .halves import Busy, Halves
from .packing import Packer
from .refusals import Reason, Refusals
from .space import ALL_COUNTS, Space, pack_counts


def harmony_candidates(
    policy: Policy,
    minibatch: int,
    costs: Costs,
    machine: Machine,
    space: Space,
    estimator: Estimator,
    refusals: Refusals,
) -> Candidates:
    """All plans of this policy and space; microbatch sizes of which no cut into packs fits are ``refusals``.

    Raises TraceError if the trace covers no microbatch size, or one that the space demands, or no update.
    """
    return _Enumeration(policy, minibatch, costs, machine, space, estimator, refusals).candidates()


class _Options(NamedTuple):
    """What a plan has besides microbatch sizes and packs."""

    update: UpdateOn
    reduce: Reduce
    prefetch: bool
    slots: int | None


@dataclass(frozen=True)
class _ForwardHalves:
    """All forward halves of some layers and one microbatch size: packs, busy times, deals."""

    packs: list[tuple[Pack, ...]]
    busy: Busy
    deals: NDArray[np.int64]


class _Enumeration:
    """What the candidates of one search and policy have in common."""

    def __init__(
        self,
        policy: Policy,
        minibatch: int,
        costs: Costs,
        machine: Machine,
        space: Space,
        estimator: Estimator,
        refusals: Refusals,
    ) -> None:
        self.policy, self.minibatch, self.gpus = policy, minibatch, len(machine.gpus)
        self.costs, self._machine, self._space = costs, machine, space
        self.estimator, self.refusals = estimator, refusals
        self.parallel = policy is Policy.HARMONY_DP or self.gpus == 1
        self._cap = min(gpu.usable_bytes for gpu in machine.gpus)
        self._tightest = min(range(self.gpus), key=lambda gpu: machine.gpus[gpu].usable_bytes)
        samples = [stop - start for start, stop in shares(minibatch, self.gpus)] if self.parallel else [minibatch]
        self._sizes = Sizes(costs, samples)
        self.same_size = any(layer.cut_sensitive for layer in costs.trace.layers)
        self._forward_packers: dict[int, Packer] = {}
        self._forward_packings: dict[tuple[int, int], list[Packing]] = {}
        self._forward_halves: dict[tuple[int, int], _ForwardHalves] = {}
        self._least: dict[tuple[int, int], Busy] = {}
        self._busy = self._halves(UpdateOn.CPU, Reduce.RING)  # forward halves are alike for all updates and reductions
        self._thinned = False

    def candidates(self) -> Candidates:
        """All of them."""
        space = self._space
        self._forward_sizes = self._sizes.of(Phase.FORWARD, space.u_fwd)
        backward_sizes = self._sizes.of(Phase.BACKWARD, space.u_bwd)
        if self.same_size:
            backward_sizes = [u for u in backward_sizes if u in self._forward_sizes]
        halves: list[Source | Candidate] = []
        count = 0
        for update in self._updates():
            cuts = [(u, packs) for u in backward_sizes for packs in self._backward_cuts(u, update)]
            for reduce, prefetch, slots in product(self._reduces(), space.prefetch, self._slots()):
                busy = self._halves(update, reduce)
                options = _Options(update, reduce, prefetch, slots)
                for u, packs in cuts:
                    half = _BackwardHalf(self, options, u, packs, busy.backward(u, packs))
                    if half.count:
                        halves.append(half)
                        count += half.count
        notes = self._sizes.notes()
        if self._thinned:
            notes.append(f"of more than {ALL_COUNTS} possible numbers of packs only some were tried")
        if self.same_size:
            notes.append("some layers depend on how the minibatch is cut, or on chance: u_fwd = u_bwd")
        return Candidates(count, halves, notes)

    def forward_sizes(self, stop: int, u_bwd: int) -> list[int]:
        """Microbatch sizes that the layers before ``stop`` may have in forward; without layers just the backward's."""
        if stop == 0 or self.same_size:
            return [u_bwd]
        return self._forward_sizes

    def least_forward(self, stop: int, u: int) -> Busy:
        """What all forward halves of the layers before ``stop`` have in common."""
        key = stop, u
        if key not in self._least:
            self._least[key] = self._busy.least_forward(stop, u) if stop else self._busy.no_forward
        return self._least[key]

    def forward_packings(self, stop: int, u: int) -> list[Packing]:
        """Numbers of packs, or packs, to try for the layers before ``stop``."""
        key = stop, u
        if key not in self._forward_packings:
            if stop == 0 and self._space.packs_fwd is None:
                self._forward_packings[key] = [()]
            else:
                packer = self._forward_packer(u)
                self._forward_packings[key] = self._packings(packer, self._space.packs_fwd, stop, Phase.FORWARD)
        return self._forward_packings[key]

    def forward_halves(self, stop: int, u: int) -> _ForwardHalves:
        """All forward halves of the layers before ``stop`` and this microbatch size."""
        key = stop, u
        if key not in self._forward_halves:
            packer = self._forward_packer(u)
            packs = [_cut(packer, packing, stop) for packing in self.forward_packings(stop, u)]
            busy = np.array([self._busy.forward(u, each) if each else self._busy.no_forward for each in packs])
            deals = np.array([len(each) % self.gpus for each in packs])
            self._forward_halves[key] = _ForwardHalves(packs, busy, deals)
        return self._forward_halves[key]

    @property
    def slots_are_open(self) -> bool:
        """Whether plans that do not fit may do with fewer slots."""
        return not self.parallel and self._space.slots is None

    def _backward_cuts(self, u: int, update: UpdateOn) -> Iterator[tuple[Pack, ...]]:
        stop = self.costs.layer_count
        packer = Packer(self.costs, u, Phase.BACKWARD, self._cap, update=update)
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
                self.refusals.add(self.policy, Reason.PLAN, error)
        if wanted is not None and not numbers:
            return explicit
        smallest = packer.smallest_count(stop)
        if smallest is None:
            pack, held = packer.hungriest(stop)
            what = f"the {phase.value} of one microbatch"
            self.refusals.add(self.policy, Reason.PACKS, DoesNotFit(self._tightest, pack, what, held, self._cap))
            return explicit
        if wanted is None:
            numbers = list(pack_counts(smallest, stop, self.gpus))
            self._thinned |= len(numbers) < stop - smallest + 1
        return explicit + [number for number in numbers if packer.bottleneck_ns(number, stop) is not None]

    def _halves(self, update: UpdateOn, reduce: Reduce) -> Halves:
        return Halves(
            self.costs,
            self._machine,
            parallel=self.parallel,
            minibatch=self.minibatch,
            update=update,
            reduce=reduce,
        )

    def _forward_packer(self, u: int) -> Packer:
        if u not in self._forward_packers:
            self._forward_packers[u] = Packer(self.costs, u, Phase.FORWARD, self._cap)
        return self._forward_packers[u]

    def _updates(self) -> tuple[UpdateOn, ...]:
        """Where updates may run: as the space says, else wherever the trace says how long they take."""
        wanted = self._space.update
        known = []
        refusal: TraceError | None = None
        for update in wanted or tuple(UpdateOn):
            phase = Phase.UPDATE_CPU if update is UpdateOn.CPU else Phase.UPDATE_GPU
            try:
                self.costs.update_ns(0, self.costs.layer_count - 1, phase)
                known.append(update)
            except TraceError as error:
                if wanted is not None:
                    raise
                refusal = refusal or error
        if refusal and not known:
            raise refusal
        return tuple(known)

    def _reduces(self) -> tuple[Reduce, ...]:
        return self._space.reduce if self.parallel and self.gpus > 1 else self._space.reduce[:1]

    def _slots(self) -> tuple[int | None, ...]:
        return (None,) if self.parallel or self._space.slots is None else self._space.slots


def _cut(packer: Packer, packing: Packing, stop: int) -> tuple[Pack, ...]:
    if isinstance(packing, tuple):
        return packing
    packs = packer.balanced(packing, stop)
    assert packs is not None, "only numbers that fit are listed"
    return packs


class _BackwardHalf:
    """A backward half with all forward halves that go with it."""

    def __init__(self, common: _Enumeration, options: _Options, u: int, packs: tuple[Pack, ...], busy: Busy) -> None:
        self.common, self.options, self.u, self.packs, self.busy = common, options, u, packs, busy
        self.stop = packs[-1][0]
        sizes = [v for v in common.forward_sizes(self.stop, u) if common.forward_packings(self.stop, v)]
        self.count = sum(len(common.forward_packings(self.stop, v)) for v in sizes)
        self._sized = [_WithForwardSize(self, v) for v in sizes]
        self.bound_ns = min((each.bound_ns for each in self._sized), default=np.inf)

    def split(self) -> Sequence[Source]:
        """By forward microbatch size."""
        return self._sized


class _WithForwardSize:
    """A backward half with all forward halves of one microbatch size."""

    def __init__(self, half: _BackwardHalf, u: int) -> None:
        self._half, self._u = half, u
        least = half.common.least_forward(half.stop, u)
        self.bound_ns = float((least + half.busy).max(axis=-1).min())

    def split(self) -> Sequence[Source]:
        """The forward halves, by bound."""
        forward = self._half.common.forward_halves(self._half.stop, self._u)
        bounds = (forward.busy + self._half.busy[forward.deals % len(self._half.busy)]).max(axis=-1)
        order = np.argsort(bounds, kind="stable")
        return [_Pairs(self._half, self._u, [forward.packs[at] for at in order], bounds[order].tolist())]


class _Pairs:
    """A backward half with some forward halves, by bound."""

    def __init__(self, half: _BackwardHalf, u: int, packs: list[tuple[Pack, ...]], bounds: list[float]) -> None:
        self._half, self._u, self._packs, self._bounds = half, u, packs, bounds
        self.bound_ns = bounds[0]

    def split(self) -> Iterator[Source | Candidate]:
        """The first of them as a plan, and the others."""
        common, options = self._half.common, self._half.options
        plan = HarmonyPlan(
            policy=common.policy,
            minibatch=common.minibatch,
            gpus=common.gpus,
            u_fwd=self._u,
            u_bwd=self._half.u,
            packs_fwd=self._packs[0],
            packs_bwd=self._half.packs,
            update=options.update,
            reduce=options.reduce,
            slots=options.slots,
            prefetch=options.prefetch,
        )
        slots = common.slots_are_open
        bound = common.estimator.lower_bound_ns(replace(plan, slots=1) if slots else plan)
        yield Candidate(plan, max(self.bound_ns, bound), slots)
        if len(self._packs) > 1:
            yield _Pairs(self._half, self._u, self._packs[1:], self._bounds[1:])
