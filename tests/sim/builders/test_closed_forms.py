"""Byte counts of Harmony schedules equal the closed forms of the published analysis, exactly, for every tensor kind."""

from itertools import cycle, islice, product

import pytest
from msgspec.structs import replace

from sim.builders import build_from_costs
from sim.hardware.machine import Gpu, Host, Machine
from sim.plan import HarmonyPlan, Policy, Reduce, StashPlace, UpdateOn, UpdateWhen, pieces, shares
from sim.schedule import TaskKind, TensorKind
from sim.validation.validate import validate
from tests.sim.closed_forms import closed_forms, moved
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


def costs_of(seed: int) -> Costs:
    """Seven layers, some with buffers; the forwards of two change them."""
    trace = skewed_trace(seed, 7)
    layers = tuple(
        replace(layer, buffer_bytes=layer.buffer_bytes or 30_000, changes_buffers=True) if index in (1, 5) else layer
        for index, layer in enumerate(trace.layers)
    )
    return Costs(replace(trace, layers=layers))


CASES = list(product(range(len(PACKINGS)), UpdateOn, Reduce, [(3, 3), (4, 2), (2, 8)], [0]))


@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP])
@pytest.mark.parametrize(("packing", "update", "reduce", "sizes", "seed"), CASES)
def test_a_step_moves_what_the_closed_forms_say(packing, update, reduce, sizes, seed, policy, gpus):
    if policy is Policy.HARMONY_PP:
        gpus += 1  # on one GPU it is data parallel
    costs = costs_of(seed)
    forward, backward = PACKINGS[packing]
    plan = HarmonyPlan(
        policy=policy, minibatch=8, gpus=gpus, u_fwd=sizes[0], u_bwd=sizes[1], packs_fwd=forward,
        packs_bwd=backward, update=update, reduce=reduce,
    )  # fmt: skip
    assert moved(build_from_costs(plan, costs, machine(gpus))) == closed_forms(plan, costs)


@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP])
@pytest.mark.parametrize("packing", range(len(PACKINGS)))
@pytest.mark.parametrize(
    "places",
    [
        (StashPlace.KEEP,),
        (StashPlace.RECOMPUTE,),
        (StashPlace.SWAP, StashPlace.KEEP, StashPlace.RECOMPUTE, StashPlace.RECOMPUTE),
        (StashPlace.RECOMPUTE, StashPlace.SWAP, StashPlace.RECOMPUTE, StashPlace.KEEP),
    ],
)
def test_stashes_may_stay_on_gpus_or_be_made_again(places, packing, policy, gpus):
    costs = costs_of(1)
    forward, backward = PACKINGS[packing]
    plan = HarmonyPlan(
        policy=policy, minibatch=8, gpus=gpus, u_fwd=3 if StashPlace.KEEP in places else 4, u_bwd=3,
        packs_fwd=forward, packs_bwd=backward,
        stash=tuple(islice(cycle(places), max(0, len(backward) - 2))),
    )  # fmt: skip
    schedule = build_from_costs(plan, costs, machine(gpus))
    validate(schedule, costs.trace)
    assert moved(schedule) == closed_forms(plan, costs)


@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP])
@pytest.mark.parametrize("packing", range(len(PACKINGS)))
@pytest.mark.parametrize(
    ("update", "stash", "reduce"),
    [
        (UpdateOn.CPU, StashPlace.SWAP, Reduce.RING),
        (UpdateOn.GPU, StashPlace.RECOMPUTE, Reduce.RING),
        (UpdateOn.GPU, StashPlace.KEEP, Reduce.HOST),
        (UpdateOn.GPU, StashPlace.SWAP, Reduce.SCATTER),
    ],
)
@pytest.mark.parametrize("which", ["last", "all"])
def test_what_stays_from_step_to_step_need_not_be_swapped(which, update, stash, reduce, packing, policy, gpus):
    costs = costs_of(2)
    forward, backward = PACKINGS[packing]
    every = tuple(range(len(backward)))
    packs = every if which == "all" else every[-1:]
    plan = HarmonyPlan(
        policy=policy, minibatch=8, gpus=gpus, u_fwd=3, u_bwd=3, packs_fwd=forward, packs_bwd=backward, update=update,
        reduce=reduce, stash=stash, resident_weights=packs, resident_state=packs if update is UpdateOn.GPU else (),
    )  # fmt: skip
    schedule = build_from_costs(plan, costs, machine(gpus))
    validate(schedule, costs.trace)
    assert moved(schedule) == closed_forms(plan, costs)


@pytest.mark.parametrize("gpus", [1, 2, 3])
@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP])
@pytest.mark.parametrize("packing", range(len(PACKINGS)))
@pytest.mark.parametrize("update", UpdateOn)
@pytest.mark.parametrize("reduce", Reduce)
@pytest.mark.parametrize("stays", [False, True])
def test_updates_at_the_end_take_all_gradients_home_and_on_gpus_back(stays, reduce, update, packing, policy, gpus):
    """On the host a step moves no more than with updates just in time; on GPUs dW out, and W and dW in, come on top."""
    costs = costs_of(4)
    forward, backward = PACKINGS[packing]
    some = tuple(range(0, len(backward), 2)) if stays else ()
    plan = HarmonyPlan(
        policy=policy, minibatch=8, gpus=gpus, u_fwd=4, u_bwd=3, packs_fwd=forward, packs_bwd=backward, update=update,
        update_when=UpdateWhen.END, reduce=reduce, resident_weights=some,
        resident_state=some if update is UpdateOn.GPU else (),
    )  # fmt: skip
    schedule = build_from_costs(plan, costs, machine(gpus))
    validate(schedule, costs.trace)
    assert moved(schedule) == closed_forms(plan, costs)
    if update is UpdateOn.CPU:
        assert moved(schedule) == closed_forms(replace(plan, update_when=UpdateWhen.JIT), costs)


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
