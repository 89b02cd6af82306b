"""What a step moves, in closed form, and what a schedule moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sim.builders.stages import cut_stages
from sim.plan import (
    HarmonyPlan,
    PagedPlan,
    Plan,
    Policy,
    Reduce,
    Residency,
    ShardedPlan,
    StashPlace,
    UpdateOn,
    UpdateWhen,
    Writeback,
    pieces,
    shares,
)
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

    Harmony plans of at least two backward packs, with enough slots; baselines without prefetch, with ``residency`` none
    or (at least two layers a GPU) next.
    """
    if isinstance(plan, PagedPlan):
        return _paged(plan, costs)
    letters = Letters(plan, costs)
    if isinstance(plan, ShardedPlan):
        return _sharded(plan, letters)
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

    def weights(self, layers: Iterable[int]) -> int:
        """Bytes of the layers' weights, as often as they occur."""
        return sum(self.costs.weight_bytes(layer, layer) for layer in layers)

    def buffers(self, layers: Iterable[int]) -> int:
        """Bytes of the layers' module buffers, as often as they occur."""
        return sum(self.costs.buffer_bytes(layer, layer) for layer in layers)

    def x(self, layer: int) -> int:
        """x(layer) over the whole minibatch."""
        return self.costs.input_bytes(layer, 1) * self.plan.minibatch

    def g(self, layer: int) -> int:
        """g(layer) over the whole minibatch."""
        return self.costs.input_gradient_bytes(layer, 1) * self.plan.minibatch


def _firsts(packs: Iterable[tuple[int, int]]) -> list[int]:
    return [first for first, _ in packs]


def _stashed(plan: HarmonyPlan, place: StashPlace) -> list[int]:
    """Layers whose input is a stash that waits there."""
    return [plan.packs_bwd[index][0] for index, where in plan.stash_places.items() if where is place]


def _crosses(plan: HarmonyPlan, layer: int) -> bool:
    """Whether a pipeline makes the stash x(layer) on another GPU than that of its backward pack."""
    made = next(index for index, (first, last) in enumerate(plan.packs_fwd) if first < layer <= last + 1)
    return plan.gpu_of_turn(made) != _backward_gpu(plan, layer)


def _backward_gpu(plan: HarmonyPlan, first: int) -> int:
    """GPU of a pipeline's backward pack, by its first layer."""
    return plan.gpu_of_turn(len(plan.packs_fwd) + _firsts(reversed(plan.packs_bwd)).index(first))


class _Again(NamedTuple):
    """What is repeated because stashes are not kept: layers, over and over, and the inputs to begin from.

    ``swapped`` inputs come from the host, ``crossing`` ones wait on another GPU; both are layers, 0 for the data.
    """

    layers: list[int]
    swapped: list[int]
    crossing: list[int]


def _again(plan: HarmonyPlan) -> _Again:
    again = _Again([], [], [])
    have = {0: StashPlace.SWAP} | {plan.packs_bwd[index][0]: place for index, place in plan.stash_places.items()}
    for layer in _stashed(plan, StashPlace.RECOMPUTE):
        start = max(at for at, place in have.items() if at < layer and place is not StashPlace.RECOMPUTE)
        again.layers.extend(range(start, layer))
        if have[start] is StashPlace.SWAP:
            again.swapped.append(start)
        elif _backward_gpu(plan, start) != _backward_gpu(plan, layer):
            again.crossing.append(start)
    return again


class _Resident(NamedTuple):
    """Bytes of weights that need not come in or go out, because they stay; and of optimizer state, either way."""

    weights_in: int
    weights_out: int
    state: int


def _resident(plan: HarmonyPlan, s: Letters) -> _Resident:
    """A pack whose weights stay comes in once after its update, wherever that is not; and not for the forward, the
    backward and what is repeated. It does not go home if it is used on one GPU alone."""
    gpus = plan.gpus
    in_pipeline = plan.policy is Policy.HARMONY_PP and gpus > 1
    on_gpu = plan.update is UpdateOn.GPU
    in_place = on_gpu and (gpus == 1 or plan.reduce is not Reduce.SCATTER)
    weights_in = weights_out = 0
    again = [index for packs in map(plan.packs_again, range(len(plan.packs_bwd))) for index in packs]
    for pack in plan.resident_weights:
        first, last = plan.packs_bwd[pack]
        weight = s.costs.weight_bytes(first, last)
        if not in_pipeline:
            forward = pack < len(plan.packs_bwd) - 1
            weights_in += weight * (gpus * (1 + forward + again.count(pack)) - gpus + in_place)
            weights_out += weight if on_gpu and gpus == 1 else 0
            continue
        own = _backward_gpu(plan, first)
        weights_in += weight * on_gpu
        repeated_on = [
            _backward_gpu(plan, plan.packs_bwd[index][0])
            for index in range(len(plan.packs_bwd))
            if pack in plan.packs_again(index)
        ]
        weights_in += weight * repeated_on.count(own)
        for layer in range(first, last + 1):
            forward_on = [plan.gpu_of_turn(at) for at, (a, b) in enumerate(plan.packs_fwd) if a <= layer <= b]
            size = s.costs.weight_bytes(layer, layer)
            weights_in += size * forward_on.count(own)
            weights_out += size * (on_gpu and {own} == {own, *forward_on, *repeated_on})
    state = sum(s.costs.optimizer_state_bytes(*plan.packs_bwd[pack]) for pack in plan.resident_state)
    return _Resident(weights_in, weights_out, state)


class _AtEnd(NamedTuple):
    """Whether gradients wait in the host for the end of the step, and bytes that come in then for updates on GPUs."""

    gradients_wait: bool
    weights_in: int
    gradients_in: int


def _at_end(plan: HarmonyPlan, s: Letters) -> _AtEnd:
    """Weights that stay are where the update is."""
    if plan.update_when is UpdateWhen.JIT:
        return _AtEnd(False, 0, 0)
    if plan.update is UpdateOn.CPU:
        return _AtEnd(True, 0, 0)
    stay = sum(s.costs.weight_bytes(*plan.packs_bwd[pack]) for pack in plan.resident_weights)
    return _AtEnd(True, s.w - stay, s.dw)


def _data_parallel(plan: HarmonyPlan, s: Letters) -> Moved:
    fused, again, resident = plan.packs_bwd[-1], _again(plan), _resident(plan, s)
    forward_firsts, stash_points = _firsts(plan.packs_fwd[1:]), _stashed(plan, StashPlace.SWAP)
    boundaries = sum(map(s.x, [*forward_firsts, fused[0]]))
    gradients = sum(map(s.g, _firsts(plan.packs_bwd[1:])))
    by_host = plan.reduce is Reduce.HOST and plan.gpus > 1
    end = _at_end(plan, s)
    on_gpu = plan.update is UpdateOn.GPU
    updated = {TensorKind.WEIGHT: s.w - resident.weights_out, TensorKind.OPTIMIZER_STATE: s.k - resident.state}
    both_ways = {TensorKind.ACTIVATION: boundaries, TensorKind.ACTIVATION_GRADIENT: gradients}
    return {
        TaskKind.SWAP_IN: Counter(
            {
                TensorKind.WEIGHT: plan.gpus * (2 * s.w - s.costs.weight_bytes(*fused) + s.weights(again.layers))
                - resident.weights_in
                + end.weights_in,
                TensorKind.BUFFER: plan.gpus * (2 * s.b - s.costs.buffer_bytes(*fused) + s.buffers(again.layers)),
                TensorKind.GRADIENT: end.gradients_in or (s.dw if on_gpu and by_host else 0),
                TensorKind.OPTIMIZER_STATE: s.k - resident.state if on_gpu else 0,
                TensorKind.STASH: sum(map(s.x, [*stash_points, *filter(None, again.swapped)])),
                TensorKind.DATA: (2 + again.swapped.count(0)) * s.x(0) + s.labels,
                **both_ways,
            }
        ),
        TaskKind.SWAP_OUT: Counter(
            {
                **(updated if on_gpu else {}),
                TensorKind.BUFFER: s.b_changed,
                TensorKind.GRADIENT: plan.gpus * s.dw if by_host else s.dw if end.gradients_wait or not on_gpu else 0,
                TensorKind.STASH: sum(s.x(point) for point in stash_points if point not in forward_firsts),
                **both_ways,
            }
        ),
        TaskKind.P2P: Counter(),
        **_collectives(plan.reduce, (plan.gpus - 1) * s.dw),
    }


def _pipeline(plan: HarmonyPlan, s: Letters) -> Moved:
    fused, again, resident = plan.packs_bwd[-1], _again(plan), _resident(plan, s)
    stash = sum(map(s.x, _stashed(plan, StashPlace.SWAP)))
    crossing = [layer for layer in _stashed(plan, StashPlace.KEEP) if _crosses(plan, layer)]
    through_host = s.x(fused[0]) if plan.u_fwd != plan.u_bwd else 0
    end = _at_end(plan, s)
    on_gpu = plan.update is UpdateOn.GPU
    return {
        TaskKind.SWAP_IN: Counter(
            {
                TensorKind.WEIGHT: 2 * s.w
                - s.costs.weight_bytes(*fused)
                + s.weights(again.layers)
                - resident.weights_in
                + end.weights_in,
                TensorKind.GRADIENT: end.gradients_in,
                TensorKind.BUFFER: 2 * s.b - s.costs.buffer_bytes(*fused) + s.buffers(again.layers),
                TensorKind.OPTIMIZER_STATE: s.k - resident.state if on_gpu else 0,
                TensorKind.STASH: stash + sum(map(s.x, filter(None, again.swapped))),
                TensorKind.ACTIVATION: through_host,
                TensorKind.DATA: (2 + again.swapped.count(0)) * s.x(0) + s.labels,
            }
        ),
        TaskKind.SWAP_OUT: Counter(
            {
                TensorKind.WEIGHT: s.w - resident.weights_out if on_gpu else 0,
                TensorKind.BUFFER: s.b_changed,
                TensorKind.GRADIENT: s.dw if end.gradients_wait or not on_gpu else 0,
                TensorKind.OPTIMIZER_STATE: s.k - resident.state if on_gpu else 0,
                TensorKind.STASH: stash,
                TensorKind.ACTIVATION: through_host,
            }
        ),
        TaskKind.P2P: Counter(
            {
                TensorKind.ACTIVATION: sum(map(s.x, [*_firsts(plan.packs_fwd[1:]), fused[0]])) - through_host,
                TensorKind.ACTIVATION_GRADIENT: sum(map(s.g, _firsts(plan.packs_bwd[1:]))),
                TensorKind.STASH: sum(map(s.x, [*crossing, *again.crossing])),
            }
        ),
        **_collectives(None, 0),
    }


def _collectives(reduce: Reduce | None, sent: int) -> Moved:
    """``sent``: what the GPUs together send when a gradient goes round the ring once."""
    return {
        TaskKind.ALLREDUCE: Counter({TensorKind.GRADIENT: 2 * sent} if reduce is Reduce.RING else {}),
        TaskKind.REDUCE_SCATTER: Counter({TensorKind.GRADIENT: sent} if reduce is Reduce.SCATTER else {}),
        TaskKind.ALL_GATHER: Counter(),
    }


def _sharded(plan: ShardedPlan, s: Letters) -> Moved:
    rounds = len(pieces(*shares(plan.minibatch, plan.gpus)[0], plan.u_fwd))
    return {
        TaskKind.SWAP_IN: Counter(
            {
                TensorKind.WEIGHT: 2 * rounds * s.w,
                TensorKind.GRADIENT: (rounds - 1) * s.dw,
                TensorKind.BUFFER: plan.gpus * s.b,
                TensorKind.DATA: s.x(0) + s.labels,
            }
        ),
        TaskKind.SWAP_OUT: Counter({TensorKind.GRADIENT: rounds * s.dw, TensorKind.BUFFER: s.b_changed}),
        TaskKind.P2P: Counter(),
        TaskKind.ALLREDUCE: Counter(),
        TaskKind.REDUCE_SCATTER: Counter({TensorKind.GRADIENT: rounds * (plan.gpus - 1) * s.dw}),
        TaskKind.ALL_GATHER: Counter({TensorKind.WEIGHT: 2 * rounds * (plan.gpus - 1) * s.w}),
    }


class _Stage(NamedTuple):
    """What one GPU of a plain schedule has: its layers, its microbatches, and how many of them it starts ahead."""

    first: int
    last: int
    sizes: list[int]
    ahead: int

    @property
    def turns_round(self) -> int:
        """How often a backward of the last layer follows a forward of it; a forward of the first layer follows a
        backward of it once less."""
        return max(1, len(self.sizes) - self.ahead)


def _turned_round(stage: _Stage, policy: Policy) -> int:
    """Samples whose own backward follows their forward through the last layer."""
    if policy is Policy.GPIPE_SWAP:
        return stage.sizes[-1]
    return sum(stage.sizes) if not stage.ahead or len(stage.sizes) == 1 else 0


def _stages(plan: PagedPlan, costs: Costs) -> Iterator[_Stage]:
    if plan.policy is Policy.DP_SWAP:
        for share in shares(plan.minibatch, plan.gpus):
            yield _Stage(0, costs.layer_count - 1, _sizes(*share, plan.u_fwd), 0)
        return
    sizes = _sizes(0, plan.minibatch, plan.u_fwd)
    for gpu, (first, last) in enumerate(cut_stages(costs, plan.gpus, sizes[0])):
        all_ahead = plan.policy is Policy.GPIPE_SWAP
        yield _Stage(first, last, sizes, len(sizes) - 1 if all_ahead else min(plan.gpus - 1 - gpu, len(sizes)))


def _sizes(start: int, stop: int, u: int) -> list[int]:
    return [end - begin for begin, end in pieces(start, stop, u)]


def _paged(plan: PagedPlan, costs: Costs) -> Moved:
    """The sum over GPUs. With ``residency`` next every one needs two layers."""
    total: Moved = {kind: Counter() for kind in _COPIES}
    for stage in _stages(plan, costs):
        for kind, sizes in _stage_moves(stage, plan, costs).items():
            total[kind].update(sizes)
    if plan.policy is Policy.DP_SWAP:
        gradients = costs.gradient_bytes(0, costs.layer_count - 1)
        total[TaskKind.ALLREDUCE][TensorKind.GRADIENT] = 2 * (plan.gpus - 1) * gradients
    return total


def _stage_moves(stage: _Stage, plan: PagedPlan, costs: Costs) -> Moved:
    first, last, m, samples = stage.first, stage.last, len(stage.sizes), sum(stage.sizes)
    always = plan.writeback is Writeback.ALWAYS
    has_data, has_labels = first == 0, last == costs.layer_count - 1
    data = samples * costs.input_bytes(0, 1) * has_data
    labels = samples * costs.label_bytes(1) * has_labels
    # The loss hands its labels on; other microbatches in between push them out.
    again = sum(stage.sizes[:-1]) * costs.label_bytes(1) * (has_labels and plan.policy is Policy.GPIPE_SWAP)
    weights, buffers = costs.weight_bytes(first, last), costs.buffer_bytes(first, last)
    changed = sum(layer.buffer_bytes for layer in costs.trace.layers[first : last + 1] if layer.changes_buffers)

    def stash(layer: int) -> int:
        """Of a sample."""
        remainder = 0 if plan.recompute else costs.remainder_bytes(layer, 1)
        return remainder + (costs.input_bytes(layer, 1) if layer else 0)

    swapped_in = Counter(
        {
            TensorKind.WEIGHT: (2 * m + 1) * weights,
            TensorKind.BUFFER: 2 * m * buffers,
            TensorKind.GRADIENT: m * costs.gradient_bytes(first, last),
            TensorKind.OPTIMIZER_STATE: costs.optimizer_state_bytes(first, last),
            TensorKind.STASH: samples * sum(map(stash, range(first, last + 1))),
            TensorKind.DATA: 2 * data + labels + again,
        }
    )
    if plan.residency is Residency.NEXT:
        turns, own = stage.turns_round, (last, last)
        swapped_in.subtract(
            {
                TensorKind.WEIGHT: turns * (costs.weight_bytes(first, first) + costs.weight_bytes(*own)),
                TensorKind.BUFFER: turns * costs.buffer_bytes(*own) + (turns - 1) * costs.buffer_bytes(first, first),
                TensorKind.GRADIENT: costs.gradient_bytes(first, first),
                TensorKind.STASH: _turned_round(stage, plan.policy) * stash(last),
            }
        )
    swapped_out = swapped_in.copy()
    swapped_out[TensorKind.DATA] = data + again if always else 0
    if not always:
        swapped_out[TensorKind.WEIGHT], swapped_out[TensorKind.BUFFER] = weights, m * changed
    passed = {
        TensorKind.ACTIVATION: samples * costs.input_bytes(first, 1),
        TensorKind.ACTIVATION_GRADIENT: samples * costs.input_gradient_bytes(first, 1),
    }
    return {
        TaskKind.SWAP_IN: swapped_in,
        TaskKind.SWAP_OUT: swapped_out,
        TaskKind.P2P: Counter(passed if first > 0 else {}),
    }
