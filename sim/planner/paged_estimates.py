"""Bounds from below on the step time of paged plans, from what any pager must move.

A *sweep* is a microbatch's way through all layers, forward or backward; the update is one as well. Whatever a pager
keeps, what a sweep touches less the GPU's memory has to come in during it. ``residency=none`` brings in everything that
each task touches; ``next`` may spare the layers at which sweeps turn round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from traces.costs import Costs
from traces.schema import Phase

from ..hardware.machine import Machine
from ..plan import PagedPlan, Residency, Writeback, pieces, shares
from .ways import Ways


@dataclass(frozen=True)
class _Moved:
    """Bytes that come in and go out of one GPU at least."""

    into: int
    out: int


def paged_bound_ns(plan: PagedPlan, costs: Costs, machine: Machine, ways: Ways) -> float:
    """No schedule of this plan takes less (ns). Raises TraceError where the trace does not cover the plan."""
    moved, alone = [], 0.0
    for gpu, share in enumerate(shares(plan.minibatch, plan.gpus)):
        sizes = [stop - start for start, stop in pieces(*share, plan.u_fwd)]
        moved.append(_moved(plan, costs, sizes, machine.gpus[gpu].usable_bytes))
        compute_ns = _compute_ns(costs, sizes, machine.gpus[gpu].speed, every_layer=True)
        in_ns, out_ns = ways.into[gpu].ns(moved[-1].into), ways.out[gpu].ns(moved[-1].out)
        alone = max(alone, compute_ns, in_ns, out_ns)
        if plan.residency is Residency.NONE:
            # Whatever has weights frees them after its task, and what comes in waits for every earlier free.
            alone = max(alone, in_ns + _compute_ns(costs, sizes, machine.gpus[gpu].speed, every_layer=False))
    loads = ways.ring_load(costs.gradient_bytes(0, costs.layer_count - 1))
    for gpu, amount in enumerate(moved):
        loads = loads + amount.into * ways.into[gpu].load + amount.out * ways.out[gpu].load
    return max(alone, float(ways.drain_ns(loads).max()))


def _compute_ns(costs: Costs, sizes: list[int], speed: float, *, every_layer: bool) -> float:
    """Compute tasks of one GPU, of every layer or only those with weights."""
    layers = [at for at in range(costs.layer_count) if every_layer or costs.weight_bytes(at, at)]

    def microbatch_ns(u: int) -> int:
        forward = [costs.forward_ns(at, at, u) for at in layers]
        backward = [costs.backward_ns(at, at, u) for at in layers]
        return sum(math.floor(f / speed) + math.floor((f + b) / speed) for f, b in zip(forward, backward, strict=True))

    updates = sum(math.floor(costs.update_ns(at, at, Phase.UPDATE_GPU) / speed) for at in layers if costs.updates(at))
    return _over(sizes, microbatch_ns) + updates


def _over(sizes: list[int], figure: Callable[[int], int]) -> int:
    """Sum over microbatches, of which all but the last have one size."""
    return (len(sizes) - 1) * figure(sizes[0]) + figure(sizes[-1])


def _moved(plan: PagedPlan, costs: Costs, sizes: list[int], cap: int) -> _Moved:
    last, count = costs.layer_count - 1, len(sizes)
    layers = range(costs.layer_count)
    held = costs.weight_bytes(0, last) + costs.buffer_bytes(0, last)
    gradient = costs.gradient_bytes(0, last)
    updated = sum(costs.weight_bytes(at, at) for at in layers if costs.updates(at))
    state = sum(costs.optimizer_state_bytes(at, at) for at in layers if costs.updates(at))
    data = _over(sizes, lambda u: costs.input_bytes(0, u) + costs.label_bytes(u))
    stash = 0
    match plan.residency:
        case Residency.NONE:
            swept, gradients = 2 * count * held + updated, count * gradient
            stash = _over(sizes, lambda u: sum(costs.input_bytes(at, u) for at in layers[1:]))
        case Residency.NEXT:
            ends = {0, last}
            kept = sum(costs.weight_bytes(at, at) + costs.buffer_bytes(at, at) for at in ends)
            swept = 2 * count * (held - kept) + kept
            gradients = (count - 1) * (gradient - sum(costs.gradient_bytes(at, at) for at in ends))
        case Residency.LRU:
            forward, backward = max(0, held - cap), max(0, held + gradient - cap)
            swept = held + (count - 1) * forward + max(0, held - cap) + (count - 1) * backward
            gradients = 0
    into = swept + gradients + stash + state
    if plan.writeback is Writeback.ALWAYS:
        # What came in goes out again, or went out before and died. Only copies of tied weights go stale unwritten.
        stale = {partner for at in layers for partner in costs.tied_partners(at)}
        return _Moved(into + data, into - sum(costs.weight_bytes(at, at) for at in stale))
    return _Moved(into + data, updated + state + gradients + stash)
