"""What a step moves, in closed form, and what a schedule moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sim.plan import HarmonyPlan, PagedPlan, Plan, Policy, Reduce, Residency, UpdateOn, Writeback, pieces, shares
from sim.schedule import Schedule, TaskKind, TensorKind
from traces.costs import Costs

Moved = dict[TaskKind, Counter[TensorKind]]
"""Bytes by kind of copy and kind of tensor, all GPUs together."""

_COPIES = [kind for kind in TaskKind if kind.is_copy]


def moved(schedule: Schedule) -> Moved:
    """Counted copy by copy."""
    totals: Moved = {kind: Counter() for kind in _COPIES}
    for task in schedule.copies(*_COPIES):
        assert task.tensor_kind is not None
        totals[task.kind][task.tensor_kind] += task.bytes
    return totals


def closed_forms(plan: Plan, costs: Costs) -> Moved:
    """For untied, trained layers whose sizes grow in proportion to the microbatch.

    Harmony plans of at least two backward packs, with enough slots; ``dp-swap``
    with ``residency`` none or (at least two layers) next.
    """
    letters = Letters(plan, costs)
    if isinstance(plan, PagedPlan):
        return _dp_swap(plan, letters)
    in_pipeline = plan.policy is Policy.HARMONY_PP and plan.gpus > 1
    return _pipeline(plan, letters) if in_pipeline else _data_parallel(plan, letters)


class Letters:
    """The letters of the closed forms for one trace and plan."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs, self.last = plan, costs, costs.layer_count - 1
        self.w = costs.weight_bytes(0, self.last)
        self.b = costs.buffer_bytes(0, self.last)
        self.dw = costs.gradient_bytes(0, self.last)
        self.k = costs.optimizer_state_bytes(0, self.last)
        self.labels = costs.label_bytes(1) * plan.minibatch
        self.b_changed = sum(layer.buffer_bytes for layer in costs.trace.layers if layer.changes_buffers)

    def x(self, layer: int) -> int:
        """x(layer) over the whole minibatch."""
        return self.costs.input_bytes(layer, 1) * self.plan.minibatch

    def g(self, layer: int) -> int:
        """g(layer) over the whole minibatch."""
        return self.costs.input_gradient_bytes(layer, 1) * self.plan.minibatch


def _firsts(packs: Iterable[tuple[int, int]]) -> list[int]:
    return [first for first, _ in packs]


def _data_parallel(plan: HarmonyPlan, s: Letters) -> Moved:
    fused = plan.packs_bwd[-1]
    forward_firsts, stash_points = _firsts(plan.packs_fwd[1:]), _firsts(plan.packs_bwd[1:-1])
    boundaries = sum(map(s.x, [*forward_firsts, fused[0]]))
    gradients = sum(map(s.g, _firsts(plan.packs_bwd[1:])))
    by_host = plan.reduce is Reduce.HOST and plan.gpus > 1
    on_gpu = plan.update is UpdateOn.GPU
    updated = {TensorKind.WEIGHT: s.w, TensorKind.OPTIMIZER_STATE: s.k} if on_gpu else {}
    both_ways = {TensorKind.ACTIVATION: boundaries, TensorKind.ACTIVATION_GRADIENT: gradients}
    return {
        TaskKind.SWAP_IN: Counter(
            {
                TensorKind.WEIGHT: plan.gpus * (2 * s.w - s.costs.weight_bytes(*fused)),
                TensorKind.BUFFER: plan.gpus * (2 * s.b - s.costs.buffer_bytes(*fused)),
                TensorKind.GRADIENT: s.dw if on_gpu and by_host else 0,
                TensorKind.OPTIMIZER_STATE: s.k if on_gpu else 0,
                TensorKind.STASH: sum(map(s.x, stash_points)),
                TensorKind.DATA: 2 * s.x(0) + s.labels,
                **both_ways,
            }
        ),
        TaskKind.SWAP_OUT: Counter(
            {
                **updated,
                TensorKind.BUFFER: s.b_changed,
                TensorKind.GRADIENT: plan.gpus * s.dw if by_host else 0 if on_gpu else s.dw,
                TensorKind.STASH: sum(s.x(point) for point in stash_points if point not in forward_firsts),
                **both_ways,
            }
        ),
        TaskKind.P2P: Counter(),
        TaskKind.ALLREDUCE: Counter({TensorKind.GRADIENT: 0 if by_host else 2 * (plan.gpus - 1) * s.dw}),
    }


def _pipeline(plan: HarmonyPlan, s: Letters) -> Moved:
    fused = plan.packs_bwd[-1]
    stash = sum(map(s.x, _firsts(plan.packs_bwd[1:-1])))
    through_host = s.x(fused[0]) if plan.u_fwd != plan.u_bwd else 0
    on_gpu = plan.update is UpdateOn.GPU
    return {
        TaskKind.SWAP_IN: Counter(
            {
                TensorKind.WEIGHT: 2 * s.w - s.costs.weight_bytes(*fused),
                TensorKind.BUFFER: 2 * s.b - s.costs.buffer_bytes(*fused),
                TensorKind.OPTIMIZER_STATE: s.k if on_gpu else 0,
                TensorKind.STASH: stash,
                TensorKind.ACTIVATION: through_host,
                TensorKind.DATA: 2 * s.x(0) + s.labels,
            }
        ),
        TaskKind.SWAP_OUT: Counter(
            {
                TensorKind.WEIGHT: s.w if on_gpu else 0,
                TensorKind.BUFFER: s.b_changed,
                TensorKind.GRADIENT: 0 if on_gpu else s.dw,
                TensorKind.OPTIMIZER_STATE: s.k if on_gpu else 0,
                TensorKind.STASH: stash,
                TensorKind.ACTIVATION: through_host,
            }
        ),
        TaskKind.P2P: Counter(
            {
                TensorKind.ACTIVATION: sum(map(s.x, [*_firsts(plan.packs_fwd[1:]), fused[0]])) - through_host,
                TensorKind.ACTIVATION_GRADIENT: sum(map(s.g, _firsts(plan.packs_bwd[1:]))),
            }
        ),
        TaskKind.ALLREDUCE: Counter(),
    }


def _dp_swap(plan: PagedPlan, s: Letters) -> Moved:
    gpus, last = plan.gpus, s.last
    m = sum(len(pieces(*share, plan.u_bwd)) for share in shares(plan.minibatch, gpus))
    always = plan.writeback is Writeback.ALWAYS
    swapped_in = {
        TensorKind.WEIGHT: (2 * m + gpus) * s.w,
        TensorKind.BUFFER: 2 * m * s.b,
        TensorKind.GRADIENT: m * s.dw,
        TensorKind.OPTIMIZER_STATE: gpus * s.k,
        TensorKind.STASH: sum(map(s.x, range(1, last + 1))),
        TensorKind.DATA: 2 * s.x(0) + s.labels,
    }
    swapped_out = {
        **swapped_in,
        TensorKind.WEIGHT: (2 * m + gpus) * s.w if always else gpus * s.w,
        TensorKind.BUFFER: 2 * m * s.b if always else m * s.b_changed,
        TensorKind.DATA: s.x(0) if always else 0,
    }
    if plan.residency is Residency.NEXT:
        first, end = (0, 0), (last, last)
        kept = {
            TensorKind.WEIGHT: m * (s.costs.weight_bytes(*first) + s.costs.weight_bytes(*end)),
            TensorKind.BUFFER: m * s.costs.buffer_bytes(*end) + (m - gpus) * s.costs.buffer_bytes(*first),
            TensorKind.GRADIENT: gpus * s.costs.gradient_bytes(*first),
            TensorKind.STASH: s.x(last),
        }
        for kind, size in kept.items():
            swapped_in[kind] -= size
            if always or kind in (TensorKind.GRADIENT, TensorKind.STASH):  # weights and buffers that stay are clean
                swapped_out[kind] -= size
    return {
        TaskKind.SWAP_IN: Counter(swapped_in),
        TaskKind.SWAP_OUT: Counter(swapped_out),
        TaskKind.P2P: Counter(),
        TaskKind.ALLREDUCE: Counter({TensorKind.GRADIENT: 2 * (gpus - 1) * s.dw}),
    }
