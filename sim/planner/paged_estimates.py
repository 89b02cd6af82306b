"""Bounds from below on the step time of paged plans, from what any pager must move and from the order of microbatches.

A *sweep* is a microbatch's way through all layers of a GPU, forward or backward; the update is one as well. Whatever a
pager keeps, what a sweep touches less the GPU's memory has to come in during it, or early, during the one before.
``residency=none`` brings in everything that each task touches; ``next`` may spare the layers at which sweeps turn
round.

In a pipeline a GPU starts when the first microbatch has come through the stages before it, and after its last backward
that microbatch still has to go back through them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from traces.costs import Costs
from traces.schema import Phase

from ..builders.stages import Assignment, assignments, turns
from ..hardware.machine import Machine
from ..plan import PagedPlan, Policy, Residency, Writeback
from .ways import Ways


@dataclass(frozen=True)
class _Moved:
    """Bytes that come in and go out of one GPU at least."""

    into: int
    out: int


def paged_bound_ns(plan: PagedPlan, costs: Costs, machine: Machine, ways: Ways) -> float:
    """No schedule of this plan takes less (ns). Raises TraceError where the trace does not cover the plan, PlanError as
    :func:`assignments`."""
    stages = [
        _Stage(plan, costs, own, gpu.usable_bytes, gpu.speed)
        for own, gpu in zip(assignments(plan, costs), machine.gpus, strict=True)
    ]
    moved = [stage.moved() for stage in stages]
    alone = _turns_ns(stages, ways)
    for gpu, (stage, amount) in enumerate(zip(stages, moved, strict=True)):
        in_ns, out_ns = ways.into[gpu].ns(amount.into), ways.out[gpu].ns(amount.out)
        alone = max(alone, in_ns, out_ns)
        if stage.residency is Residency.NONE:
            # Whatever has weights frees them after its task, and what comes in waits for every earlier free.
            alone = max(alone, in_ns + stage.heavy_compute_ns())
    loads = ways.nothing
    if plan.policy.splits_minibatch:
        loads = ways.ring_load(2 * (plan.gpus - 1) * costs.gradient_bytes(0, costs.layer_count - 1))
    for gpu, (stage, amount) in enumerate(zip(stages, moved, strict=True)):
        loads = loads + amount.into * ways.into[gpu].load + amount.out * ways.out[gpu].load
        if stage.own.stage > 0:
            x, g = stage.total(stage.x_bytes), stage.total(stage.g_bytes)
            loads = loads + x * ways.between[gpu - 1, gpu].load + g * ways.between[gpu, gpu - 1].load
    return max(alone, float(ways.drain_ns(loads).max()))


def _turns_ns(stages: Sequence[_Stage], ways: Ways) -> float:
    """All compute tasks of a stage, with what must come before the first and after the last of its microbatches."""
    longest = lead = after = 0.0
    for gpu, stage in enumerate(stages):
        updates = stage.update_ns()
        if stage.own.stage == 0:
            lead, after = 0.0, updates
        else:
            before, x, g = stages[gpu - 1], stage.x_bytes(stage.first_size), stage.g_bytes(stage.end_size)
            there, back = ways.between[gpu - 1, gpu].ns(x), ways.between[gpu, gpu - 1].ns(g)
            lead = lead + before.forward_ns(stage.first_size) + there if x else 0.0
            after = max(updates, back + before.backward_ns(stage.end_size) + after if g else 0.0)
        longest = max(longest, lead + stage.total(stage.forward_ns) + stage.total(stage.backward_ns) + after)
    return longest


class _Stage:
    """What one GPU has to do."""

    def __init__(self, plan: PagedPlan, costs: Costs, own: Assignment, cap: int, speed: float) -> None:
        self._plan, self._costs, self.own, self._cap, self._speed = plan, costs, own, cap, speed
        self._sizes = [stop - start for start, stop in own.microbatches]
        self._layers = range(own.layers[0], own.layers[1] + 1)
        *_, (_, end) = turns(plan.policy, own.stage, own.stages, len(self._sizes))
        self.first_size, self.end_size = self._sizes[0], self._sizes[end]

    @property
    def residency(self) -> Residency:
        """What the pager keeps at most: with prefetch also what the steps ahead touch."""
        if self._plan.prefetch_depth > 1:
            return Residency.LRU
        if self._plan.prefetch_depth == 1 and self._plan.residency is Residency.NONE:
            return Residency.NEXT
        return self._plan.residency

    def x_bytes(self, u: int) -> int:
        """The input of its first layer."""
        return self._costs.input_bytes(self._layers[0], u)

    def g_bytes(self, u: int) -> int:
        """The gradient of that."""
        return self._costs.input_gradient_bytes(self._layers[0], u)

    def total(self, figure: Callable[[int], int]) -> int:
        """Sum over microbatches, of which all but the last have one size."""
        return (len(self._sizes) - 1) * figure(self._sizes[0]) + figure(self._sizes[-1])

    def forward_ns(self, u: int) -> int:
        """A microbatch's way forward."""
        return self._sweep_ns(lambda at: self._costs.forward_ns(at, at, u), self._layers)

    def backward_ns(self, u: int) -> int:
        """A microbatch's way back."""
        return self._sweep_ns(lambda at: self._layer_back_ns(at, u), self._layers)

    def update_ns(self) -> int:
        """All updates."""
        return self._sweep_ns(lambda at: self._costs.update_ns(at, at, Phase.UPDATE_GPU), self._updated)

    def heavy_compute_ns(self) -> int:
        """All tasks of layers that have weights."""
        heavy = [at for at in self._layers if self._costs.weight_bytes(at, at)]

        def both_ways(u: int) -> int:
            forward = self._sweep_ns(lambda at: self._costs.forward_ns(at, at, u), heavy)
            return forward + self._sweep_ns(lambda at: self._layer_back_ns(at, u), heavy)

        return self.total(both_ways) + self.update_ns()

    def moved(self) -> _Moved:
        """What comes in and goes out at least."""
        costs, count = self._costs, len(self._sizes)
        first, last = self._layers[0], self._layers[-1]
        held = costs.weight_bytes(first, last) + costs.buffer_bytes(first, last)
        updated = sum(costs.weight_bytes(at, at) for at in self._updated)
        state = sum(costs.optimizer_state_bytes(at, at) for at in self._updated)
        gradient = costs.gradient_bytes(first, last)
        taken = [user for at in self._updated for user in (at, *costs.tied_partners(at))]
        foreign = 0  # gradients that other GPUs wrote
        match self.residency:
            case Residency.NONE:
                swept = 2 * count * held + updated
                gradients_in = (count - 1) * gradient + sum(costs.gradient_bytes(at, at) for at in taken)
                gradients_out = count * gradient
                foreign = sum(costs.gradient_bytes(at, at) for at in taken if at not in self._layers)
                stash_in = stash_out = self.total(lambda u: self._stash_bytes(self._layers, u))
            case Residency.NEXT:
                ends = {first, last}
                kept = sum(costs.weight_bytes(at, at) + costs.buffer_bytes(at, at) for at in ends)
                swept = 2 * count * (held - kept) + kept
                gradients_in = (count - 1) * (gradient - sum(costs.gradient_bytes(at, at) for at in ends))
                gradients_out = gradients_in
                stash_in = stash_out = self.total(lambda u: self._stash_bytes(self._layers[:-1], u))
            case Residency.LRU:
                swept = held + (count - 1) * self._beyond_memory(held)
                gradients_in = gradients_out = 0
                stash_in, stash_out = self._turned_bytes(held, gradient)
        into = swept + gradients_in + stash_in + state
        if self._plan.writeback is Writeback.DROP:
            return _Moved(into + self._data_bytes(), updated + state + gradients_out + stash_out)
        # What came in goes out again, or went out before and died. Only copies of tied weights go stale unwritten.
        stale = {user for at in range(costs.layer_count) for user in costs.tied_partners(at)} & {*self._layers}
        unwritten = foreign + sum(costs.weight_bytes(at, at) for at in stale)
        return _Moved(into + self._data_bytes(), into - unwritten)

    @property
    def _updated(self) -> list[int]:
        return [at for at in self._layers if self._costs.updates(at)]

    def _turned_bytes(self, held: int, gradient: int) -> tuple[int, int]:
        """What comes in for backward beyond what memory holds when it begins, and what of the stash is out by then."""

        def stash(u: int) -> int:
            return self._stash_bytes(self._layers, u)

        # The first backward finds no gradient yet.
        into = max(0, self.total(lambda u: self._beyond_memory(held + gradient + stash(u))) - gradient)
        out = self.total(lambda u: self._beyond_memory(stash(u)))
        if self._plan.policy is Policy.GPIPE_SWAP:  # all turn round together
            everything = self.total(stash)
            return max(into, self._beyond_memory(held + everything)), self._beyond_memory(everything)
        return into, out

    def _beyond_memory(self, size: int) -> int:
        return max(0, size - self._cap)

    def _stash_bytes(self, layers: Sequence[int], u: int) -> int:
        """What forwards of these layers leave for their backwards, data aside."""
        saved = 0 if self._plan.recompute else sum(self._costs.remainder_bytes(at, u) for at in layers)
        return saved + sum(self._costs.input_bytes(at, u) for at in layers if at > 0)

    def _data_bytes(self) -> int:
        has = self._layers.__contains__
        inputs = self.total(lambda u: self._costs.input_bytes(0, u)) if has(0) else 0
        return inputs + (self.total(self._costs.label_bytes) if has(self._costs.layer_count - 1) else 0)

    def _layer_back_ns(self, layer: int, u: int) -> int:
        again = self._costs.forward_ns(layer, layer, u) if self._plan.recompute else 0
        return again + self._costs.backward_ns(layer, layer, u)

    def _sweep_ns(self, layer_ns: Callable[[int], int], layers: Sequence[int]) -> int:
        return sum(math.floor(layer_ns(at) / self._speed) for at in layers)
