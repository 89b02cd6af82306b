"""Placement and total order, drawn out for small plans."""

import pytest
from msgspec.structs import replace

from sim.builders.order import linearize, place_groups, split_packs, steps_by_gpu, takes_update
from sim.errors import PlanError
from sim.plan import HarmonyPlan, Policy, Reduce, UpdateOn
from sim.schedule import TaskKind
from traces.costs import Costs
from traces.synthetic import uniform_trace, with_frozen


def plan(policy: Policy, **overrides) -> HarmonyPlan:
    fields = {
        "policy": policy, "minibatch": 4, "gpus": 2, "u_fwd": 2, "u_bwd": 2,
        "packs_fwd": ((0, 0), (1, 1), (2, 2)), "packs_bwd": ((0, 2), (3, 4)),
    }  # fmt: skip
    return HarmonyPlan(**(fields | overrides))


def drawn(plan: HarmonyPlan, updated: frozenset = frozenset(), split: frozenset = frozenset()) -> str:
    letter = {
        TaskKind.FORWARD: "F",
        TaskKind.BACKWARD: "B",
        TaskKind.BACKWARD_INPUT: "I",
        TaskKind.BACKWARD_WEIGHT: "W",
        TaskKind.UPDATE: "U",
    }
    sequences = steps_by_gpu(plan, place_groups(plan), updated, split)
    steps = linearize(plan, sequences, dict.fromkeys(plan.packs_bwd, frozenset()))
    return " ".join(f"{step.gpu}:{letter[step.kind]}{step.group.pack_index}.{step.microbatch}" for step in steps)


def test_a_pipeline_deals_packs_round_robin_from_forward_into_backward():
    groups = place_groups(plan(Policy.HARMONY_PP))
    assert [(g.kind, g.pack, g.gpu) for g in groups] == [
        (TaskKind.FORWARD, (0, 0), 0),
        (TaskKind.FORWARD, (1, 1), 1),
        (TaskKind.FORWARD, (2, 2), 0),
        (TaskKind.BACKWARD, (3, 4), 1),
        (TaskKind.BACKWARD, (0, 2), 0),
    ]


def test_a_pipeline_deals_packs_in_the_order_of_the_gpus():
    packs = tuple((at, at) for at in range(5))
    crossing = plan(Policy.HARMONY_PP, gpus=4, packs_fwd=packs[:4], packs_bwd=packs, gpu_order=(0, 2, 1, 3))
    assert [g.gpu for g in place_groups(crossing)] == [0, 2, 1, 3, 0, 2, 1, 3, 0]


def test_an_order_names_every_gpu_once():
    for wrong in ((0,), (0, 0), (0, 1, 2), (1, 2)):
        with pytest.raises(PlanError, match="must name each of GPUs 0-1 once"):
            plan(Policy.HARMONY_PP, gpu_order=wrong)


def test_data_parallel_owners_take_turns_in_the_order_of_the_gpus():
    swapped = plan(Policy.HARMONY_DP, gpu_order=(1, 0))
    backwards = [group for group in place_groups(swapped) if group.kind is TaskKind.BACKWARD]
    owners = {group.pack_index: group.gpu for group in backwards if takes_update(swapped, group)}
    assert owners == {0: 1, 1: 0}


def test_pipeline_order_overlaps_what_unit_times_overlap():
    assert drawn(plan(Policy.HARMONY_PP)) == "0:F0.0 0:F0.1 1:F1.0 0:F2.0 1:F1.1 0:F2.1 1:B1.0 0:B0.0 1:B1.1 0:B0.1"


def split_order(apart: int, **overrides) -> str:
    packs = ((0, 0), (1, 1), (2, 2))
    fields = {"u_fwd": 1, "u_bwd": 1, "packs_fwd": packs[:2], "packs_bwd": packs, "minibatch": 3} | overrides
    split = plan(Policy.HARMONY_PP, split_backward=apart, **fields)
    ordered = drawn(split, frozenset({(2, 2), (1, 1)}), frozenset(packs[1:]))
    return ordered[ordered.index("I") - 2 :]


class TestBackwardsInTwoParts:
    def test_make_weight_gradients_where_the_gpu_would_wait_or_at_the_end_of_the_group(self):
        """The second GPU is busy with forwards when the first one hands it gradients."""
        assert split_order(3) == (
            "0:I2.0 1:F1.2 0:I2.1 1:I1.0 0:I2.2 1:I1.1 0:W2.0 1:I1.2 0:W2.1 1:W1.0 0:W2.2 1:W1.1 0:B0.0 1:W1.2 "
            "0:B0.1 0:B0.2"
        )

    def test_run_ahead_by_no_more_than_they_may(self):
        assert split_order(1) == (
            "0:I2.0 1:F1.2 0:W2.0 1:I1.0 0:I2.1 1:W1.0 0:W2.1 1:I1.1 0:I2.2 1:W1.1 0:W2.2 1:I1.2 0:B0.0 1:W1.2 "
            "0:B0.1 0:B0.2"
        )

    def test_end_before_the_update(self):
        assert "1:W1.2 1:U1" in split_order(2, update=UpdateOn.GPU).replace(" 0:B0.0", "").replace(" 0:B0.1", "")

    def test_are_of_packs_that_others_wait_for_and_that_have_weights(self):
        packs = tuple((at, at) for at in range(5))
        split = plan(Policy.HARMONY_PP, split_backward=1, packs_fwd=packs[:4], packs_bwd=packs)
        costs = Costs(with_frozen(uniform_trace(5), [2]))
        assert split_packs(split, costs) == {(1, 1), (3, 3)}  # pack 4 is the loss, pack 0 has data as its input
        assert split_packs(replace(split, split_backward=0), costs) == frozenset()
        assert split_packs(replace(split, policy=Policy.HARMONY_DP), costs) == frozenset()


def test_a_backward_microbatch_waits_for_the_forward_ones_that_cover_it():
    coarse = plan(Policy.HARMONY_PP, u_fwd=3, u_bwd=2, packs_fwd=((0, 2),))
    assert drawn(coarse) == "0:F0.0 0:F0.1 1:B1.0 0:B0.0 1:B1.1 0:B0.1"


def test_data_parallel_gpus_run_the_same_packs_on_their_shares():
    uneven = plan(Policy.HARMONY_DP, minibatch=5, packs_fwd=((0, 2),))
    groups = place_groups(uneven)
    assert [g.pieces for g in groups if g.kind is TaskKind.FORWARD] == [((0, 2), (2, 3)), ((3, 5),)]
    assert drawn(uneven) == "0:F0.0 1:F0.0 0:F0.1 1:B1.0 0:B1.0 1:B0.0 0:B1.1 0:B0.0 0:B0.1"


def test_data_parallel_owners_take_turns_and_update_after_everyones_backward():
    both = plan(Policy.HARMONY_DP, update=UpdateOn.GPU, minibatch=2, u_fwd=1, u_bwd=1, packs_fwd=((0, 2),))
    backwards = [group for group in place_groups(both) if group.kind is TaskKind.BACKWARD]
    assert [(group.pack_index, group.gpu) for group in backwards if takes_update(both, group)] == [(1, 1), (0, 0)]
    assert drawn(both, frozenset(both.packs_bwd)) == "0:F0.0 1:F0.0 0:B1.0 1:B1.0 0:B0.0 1:U1.1 1:B0.0 0:U0.1"


def test_where_gradients_are_scattered_every_gpu_updates_its_shard_of_every_pack():
    each = plan(
        Policy.HARMONY_DP, update=UpdateOn.GPU, reduce=Reduce.SCATTER, minibatch=2, u_fwd=1, u_bwd=1,
        packs_fwd=((0, 2),),
    )  # fmt: skip
    order = "0:F0.0 1:F0.0 0:B1.0 1:B1.0 0:U1.1 1:U1.1 0:B0.0 1:B0.0 0:U0.1 1:U0.1"
    assert drawn(each, frozenset(each.packs_bwd)) == order


def test_a_pipeline_over_one_gpu_is_data_parallel_over_one_gpu():
    def alone(policy):
        return drawn(plan(policy, gpus=1))

    assert alone(Policy.HARMONY_PP) == alone(Policy.HARMONY_DP)
