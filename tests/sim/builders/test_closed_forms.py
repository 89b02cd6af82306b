"""Byte counts of Harmony schedules equal the closed forms of the published analysis, exactly, for every tensor kind."""

from collections import Counter
from itertools import product

import pytest
from msgspec.structs import replace

from sim.builders import build_from_costs
from sim.hardware.machine import Gpu, Host, Machine
from sim.plan import HarmonyPlan, Policy, Reduce, UpdateOn, pieces, shares
from sim.schedule import Schedule, TaskKind, TensorKind
from traces.costs import Costs
from traces.synthetic import skewed_trace

PACKINGS = [
    (((0, 0), (1, 2), (3, 4)), ((0, 1), (2, 4), (5, 6))),  # a stash point inside a forward pack, one at its end
    (((0, 2), (3, 4)), ((0, 2), (3, 4), (5, 6))),  # same cuts
    (((0, 4),), ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6))),  # many stash points inside one pack
    (((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5)), ((0, 5), (6, 6))),
]


def machine(gpus: int) -> Machine:
    gpu = Gpu(name="0", memory_bytes=10**12, bandwidth=1e9)
    return Machine(name="roomy", host=Host(memory_bytes=None, dram_bandwidth=1e10, cores=2), gpus=(gpu,)).with_gpus(
        gpus
    )


def moved(schedule: Schedule) -> dict[TaskKind, Counter[TensorKind]]:
    """Bytes by kind of copy and kind of tensor."""
    totals: dict[TaskKind, Counter[TensorKind]] = {kind: Counter() for kind in TaskKind if kind.is_copy}
    for task in schedule.tasks:
        if task.kind.is_copy and task.tensor_kind is not None:
            totals[task.kind][task.tensor_kind] += task.bytes
    return totals


class Sums:
    """The letters of the closed forms for one trace and plan."""

    def __init__(self, costs: Costs, plan: HarmonyPlan) -> None:
        last = costs.layer_count - 1
        self.costs, self.plan = costs, plan
        self.w, self.dw = costs.weight_bytes(0, last), costs.gradient_bytes(0, last)
        self.k = costs.optimizer_state_bytes(0, last)
        self.w_fused = costs.weight_bytes(*plan.packs_bwd[-1])
        self.fused = plan.packs_bwd[-1][0]
        self.stash_points = [first for first, _ in plan.packs_bwd[1:-1]]
        self.forward_firsts = [first for first, _ in plan.packs_fwd[1:]]

    def x(self, layer: int) -> int:
        """x(layer) over the whole minibatch."""
        return self.costs.input_bytes(layer, 1) * self.plan.minibatch

    def g(self, layer: int) -> int:
        return self.costs.input_gradient_bytes(layer, 1) * self.plan.minibatch

    @property
    def labels(self) -> int:
        return self.costs.label_bytes(1) * self.plan.minibatch

    @property
    def edges(self) -> int:
        """E: boundary activations between forward packs, and into the fused pack."""
        return sum(map(self.x, self.forward_firsts)) + self.x(self.fused)

    @property
    def gradient_edges(self) -> int:
        return sum(self.g(first) for first, _ in self.plan.packs_bwd[1:])


CASES = list(product(range(len(PACKINGS)), UpdateOn, Reduce, [(3, 3), (4, 2), (2, 8)], [0]))


@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize(("packing", "update", "reduce", "sizes", "seed"), CASES)
def test_data_parallel(packing, update, reduce, sizes, seed, gpus):
    costs = Costs(skewed_trace(seed, 7))
    forward, backward = PACKINGS[packing]
    plan = HarmonyPlan(
        policy=Policy.HARMONY_DP, minibatch=8, gpus=gpus, u_fwd=sizes[0], u_bwd=sizes[1], packs_fwd=forward,
        packs_bwd=backward, update=update, reduce=reduce,
    )  # fmt: skip
    s, out = Sums(costs, plan), moved(build_from_costs(plan, costs, machine(gpus)))
    swap_in, swap_out = out[TaskKind.SWAP_IN], out[TaskKind.SWAP_OUT]
    by_host = reduce is Reduce.HOST and gpus > 1
    on_gpu = update is UpdateOn.GPU
    assert swap_in[TensorKind.WEIGHT] == gpus * (2 * s.w - s.w_fused)
    assert swap_out[TensorKind.WEIGHT] == (s.w if on_gpu else 0)
    assert swap_in[TensorKind.GRADIENT] == (s.dw if on_gpu and by_host else 0)
    assert swap_out[TensorKind.GRADIENT] == (gpus * s.dw if by_host else 0 if on_gpu else s.dw)
    assert swap_in[TensorKind.OPTIMIZER_STATE] == swap_out[TensorKind.OPTIMIZER_STATE] == (s.k if on_gpu else 0)
    assert swap_in[TensorKind.STASH] == sum(map(s.x, s.stash_points))
    assert swap_out[TensorKind.STASH] == sum(s.x(b) for b in s.stash_points if b not in s.forward_firsts)
    assert swap_in[TensorKind.ACTIVATION] == swap_out[TensorKind.ACTIVATION] == s.edges
    assert swap_in[TensorKind.ACTIVATION_GRADIENT] == swap_out[TensorKind.ACTIVATION_GRADIENT] == s.gradient_edges
    assert swap_in[TensorKind.DATA] == 2 * s.x(0) + s.labels
    assert out[TaskKind.P2P].total() == 0
    assert out[TaskKind.ALLREDUCE].total() == (0 if by_host else 2 * (gpus - 1) * s.dw)


@pytest.mark.parametrize("gpus", [2, 3, 4])
@pytest.mark.parametrize(("packing", "update", "reduce", "sizes", "seed"), CASES)
def test_pipeline(packing, update, reduce, sizes, seed, gpus):
    costs = Costs(skewed_trace(seed, 7))
    forward, backward = PACKINGS[packing]
    plan = HarmonyPlan(
        policy=Policy.HARMONY_PP, minibatch=8, gpus=gpus, u_fwd=sizes[0], u_bwd=sizes[1], packs_fwd=forward,
        packs_bwd=backward, update=update, reduce=reduce,
    )  # fmt: skip
    s, out = Sums(costs, plan), moved(build_from_costs(plan, costs, machine(gpus)))
    swap_in, swap_out = out[TaskKind.SWAP_IN], out[TaskKind.SWAP_OUT]
    on_gpu = update is UpdateOn.GPU
    through_host = s.x(s.fused) if sizes[0] != sizes[1] else 0
    assert swap_in[TensorKind.WEIGHT] == 2 * s.w - s.w_fused
    assert swap_out[TensorKind.WEIGHT] == (s.w if on_gpu else 0)
    assert swap_in[TensorKind.GRADIENT] == 0
    assert swap_out[TensorKind.GRADIENT] == (0 if on_gpu else s.dw)
    assert swap_in[TensorKind.OPTIMIZER_STATE] == swap_out[TensorKind.OPTIMIZER_STATE] == (s.k if on_gpu else 0)
    assert swap_in[TensorKind.STASH] == swap_out[TensorKind.STASH] == sum(map(s.x, s.stash_points))
    assert swap_in[TensorKind.ACTIVATION] == swap_out[TensorKind.ACTIVATION] == through_host
    assert swap_in[TensorKind.ACTIVATION_GRADIENT] == swap_out[TensorKind.ACTIVATION_GRADIENT] == 0
    assert swap_in[TensorKind.DATA] == 2 * s.x(0) + s.labels
    assert out[TaskKind.P2P].total() == s.edges + s.gradient_edges - through_host


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("packing", range(len(PACKINGS)))
@pytest.mark.parametrize("gpus", [2, 3])
def test_what_finds_no_slot_travels_through_the_host_and_serves_as_the_stash(slots, packing, gpus):
    costs = Costs(skewed_trace(3, 7))
    forward, backward = PACKINGS[packing]
    free_plan = HarmonyPlan(
        policy=Policy.HARMONY_PP, minibatch=8, gpus=gpus, u_fwd=2, u_bwd=2, packs_fwd=forward, packs_bwd=backward
    )
    free = build_from_costs(free_plan, costs, machine(gpus))
    tight = build_from_costs(replace(free_plan, slots=slots), costs, machine(gpus))
    plenty, few = moved(free), moved(tight)
    spilled = {
        kind: few[TaskKind.SWAP_IN][kind] - plenty[TaskKind.SWAP_IN][kind]
        for kind in (TensorKind.ACTIVATION, TensorKind.ACTIVATION_GRADIENT)
    }
    for kind, amount in spilled.items():
        assert few[TaskKind.SWAP_OUT][kind] - plenty[TaskKind.SWAP_OUT][kind] == amount
        assert plenty[TaskKind.P2P][kind] - few[TaskKind.P2P][kind] == amount
    stash_points = {first for first, _ in backward[1:-1]} & {first for first, _ in forward[1:]}
    spilled_stash = sum(
        task.bytes
        for task in tight.copies(TaskKind.SWAP_OUT)
        if task.tensor_kind is TensorKind.ACTIVATION and task.layer_first in stash_points
    )
    assert plenty[TaskKind.SWAP_OUT][TensorKind.STASH] - few[TaskKind.SWAP_OUT][TensorKind.STASH] == spilled_stash
    assert few[TaskKind.SWAP_IN][TensorKind.STASH] == plenty[TaskKind.SWAP_IN][TensorKind.STASH]
    if slots == 1 and len(forward) > 2:
        assert sum(spilled.values()) > 0


def test_a_pack_of_everything_has_no_forward_task_and_no_stash():
    costs = Costs(skewed_trace(5, 7))
    plan = HarmonyPlan(
        policy=Policy.HARMONY_PP, minibatch=8, gpus=2, u_fwd=3, u_bwd=3, packs_fwd=(), packs_bwd=((0, 6),)
    )
    schedule = build_from_costs(plan, costs, machine(2))
    out = moved(schedule)
    assert out[TaskKind.SWAP_IN][TensorKind.WEIGHT] == costs.weight_bytes(0, 6)
    assert out[TaskKind.SWAP_IN][TensorKind.DATA] == 8 * (costs.input_bytes(0, 1) + costs.label_bytes(1))
    assert [task.batch_size for task in schedule.copies(TaskKind.BACKWARD)] == [3, 3, 2]
    assert not any(task.gpu == 1 for task in schedule.tasks)


def test_shares_and_pieces_are_the_ones_of_the_definition():
    assert shares(8, 3) == [(0, 3), (3, 6), (6, 8)]
    assert pieces(0, 8, 3) == [(0, 3), (3, 6), (6, 8)]
