"""Every candidate is a plan that goes with its trace and machine; sizes are those that the trace covers."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.hardware.machine import Machine
from sim.plan import HarmonyPlan, Policy, Reduce, UpdateOn, Writeback
from sim.planner.candidates import Candidates, Sizes, paged_candidates
from sim.planner.estimates import Estimator
from sim.planner.harmony_candidates import harmony_candidates
from sim.planner.packing import Packer
from sim.planner.refusals import Refusals
from sim.planner.space import Space
from tests.sim.handmade import machine as separate_links
from tests.sim.planner.test_estimates import machines
from tests.strategies import linear_traces
from traces.costs import Costs
from traces.errors import TraceError
from traces.schema import Phase, Trace
from traces.synthetic import uniform_trace

TRACE = uniform_trace(4)  # covers microbatches of 1 to 8
DP, PP = Policy.HARMONY_DP, Policy.HARMONY_PP


def harmony(policy: Policy, trace: Trace, minibatch: int, machine: Machine, space: Space | None = None) -> Candidates:
    return harmony_candidates(policy, minibatch, Costs(trace), machine, space or Space(), Refusals())


def plans(candidates: Candidates) -> list[HarmonyPlan]:
    made = [candidates.plan(number) for number in range(candidates.count)]
    return [plan for plan in made if isinstance(plan, HarmonyPlan)]


@settings(max_examples=15, deadline=None)
@given(linear_traces(tied=True, frozen=True, max_layers=5), machines(), st.integers(3, 6), st.sampled_from((DP, PP)))
def test_every_candidate_is_a_plan_of_its_own_whose_packs_fit(
    trace: Trace, machine: Machine, minibatch: int, policy: Policy
) -> None:
    """Making a plan checks that its packs cover all layers."""
    costs, gpus = Costs(trace), len(machine.gpus)
    candidates = harmony(policy, trace, minibatch, machine)
    made = plans(candidates)
    assert len(set(made)) == len(made) == candidates.count == len(candidates.hints_ns)
    cap = min(gpu.usable_bytes for gpu in machine.gpus)
    for plan in made:
        assert (plan.policy, plan.minibatch, plan.gpus, plan.layer_count) == (
            policy,
            minibatch,
            gpus,
            len(trace.layers),
        )
        backward = Packer(costs, plan.u_bwd, Phase.BACKWARD, cap, update=plan.update)
        assert plan.packs_bwd == backward.balanced(len(plan.packs_bwd), plan.layer_count)
        forward = Packer(costs, plan.u_fwd, Phase.FORWARD, cap)
        assert plan.packs_fwd == forward.balanced(len(plan.packs_fwd), plan.packs_bwd[-1][0])


def test_figures_belong_to_the_plan_of_the_same_number() -> None:
    """A space of just that plan has one candidate, with the same bound, hint and expectation."""
    machine = separate_links(gpus=2)
    for policy in (DP, PP):
        candidates = harmony(policy, TRACE, 4, machine)
        for number in range(0, candidates.count, 7):
            plan = candidates.plan(number)
            assert isinstance(plan, HarmonyPlan)
            space = Space(
                u_fwd=(plan.u_fwd,), u_bwd=(plan.u_bwd,), packs_fwd=(plan.packs_fwd,), packs_bwd=(plan.packs_bwd,),
                update=(plan.update,),
            )  # fmt: skip
            alone = harmony(policy, TRACE, 4, machine, space)
            assert alone.count == 1
            assert alone.plan(0) == plan
            assert alone.bounds_ns[0] == candidates.bounds_ns[number]
            assert alone.hints_ns[0] == candidates.hints_ns[number]
            assert alone.expected_ns(0) == candidates.expected_ns(number)


def test_options_multiply_only_where_they_matter() -> None:
    """A pipeline reduces nothing, data parallel has no slots."""
    space = Space(reduce=(Reduce.RING, Reduce.HOST), slots=(None, 1, 2))
    machine = separate_links(gpus=2)
    once = {policy: harmony(policy, TRACE, 4, machine).count for policy in (DP, PP)}
    assert harmony(DP, TRACE, 4, machine, space).count == 2 * once[DP]
    assert harmony(PP, TRACE, 4, machine, space).count == 3 * once[PP]
    assert harmony(PP, TRACE, 4, machine).open_slots
    assert not harmony(PP, TRACE, 4, machine, space).open_slots
    assert not harmony(PP, TRACE, 4, separate_links()).open_slots


def test_layers_that_depend_on_the_cut_have_one_size() -> None:
    sensitive = replace(
        TRACE, layers=(*TRACE.layers[:2], replace(TRACE.layers[2], cut_sensitive=True), TRACE.layers[3])
    )
    candidates = harmony(PP, sensitive, 4, separate_links(gpus=2))
    assert {(plan.u_fwd, plan.u_bwd) for plan in plans(candidates)} == {(u, u) for u in (1, 2, 3, 4)}
    assert any("u_fwd = u_bwd" in note for note in candidates.notes)


def test_updates_run_where_the_trace_says_how_long_they_take() -> None:
    def without(*phases: Phase) -> Trace:
        return replace(TRACE, times=tuple(row for row in TRACE.times if row.phase not in phases))

    machine = separate_links(gpus=2)
    on_gpus = harmony(DP, without(Phase.UPDATE_CPU), 4, machine)
    assert {plan.update for plan in plans(on_gpus)} == {UpdateOn.GPU}
    with pytest.raises(TraceError):
        harmony(DP, without(Phase.UPDATE_CPU, Phase.UPDATE_GPU), 4, machine)
    with pytest.raises(TraceError):
        harmony(DP, without(Phase.UPDATE_GPU), 4, machine, Space(update=(UpdateOn.GPU,)))
    with pytest.raises(TraceError):
        paged_candidates(
            Policy.DP_SWAP, 4, 2, Costs(without(Phase.UPDATE_GPU)), Space(), Estimator(Costs(TRACE), machine)
        )


def test_sizes_reach_to_the_largest_share() -> None:
    assert Sizes(Costs(TRACE), [3, 2]).of(Phase.FORWARD, None) == [1, 2, 3]
    assert Sizes(Costs(TRACE), [3, 2]).of(Phase.FORWARD, (2, 5, 9)) == [2, 3]


def test_sizes_far_beyond_the_trace_are_left_out_without_a_look_at_each() -> None:
    few, many = (Sizes(Costs(TRACE), [samples]) for samples in (60, 60 * 10**12))
    assert many.of(Phase.FORWARD, None) == few.of(Phase.FORWARD, None)
    assert many.uncovered == {min(few.uncovered), 60 * 10**12}


def test_sizes_that_the_trace_lacks_are_left_out_and_said_or_refused() -> None:
    sizes = Sizes(Costs(TRACE), [11])
    assert sizes.of(Phase.BACKWARD, None) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sizes.notes() == [
        "microbatch sizes 9-11 are not all covered by the trace and left out; --extrapolate guesses them"
    ]
    with pytest.raises(TraceError):
        sizes.of(Phase.BACKWARD, (4, 10))
    assert Sizes(Costs(TRACE, extrapolate=True), [11]).of(Phase.BACKWARD, None) == list(range(1, 12))


def test_a_size_whose_remainder_the_trace_lacks_is_left_out() -> None:
    coarse = uniform_trace(4, microbatches=(2, 4))
    assert Sizes(Costs(coarse), [7]).of(Phase.FORWARD, None) == [4]  # 2 and 3 leave a microbatch of 1


@pytest.mark.parametrize(("space", "sizes"), [(Space(u_fwd=(1, 2)), {1, 2}), (Space(u_fwd=(1, 2), u_bwd=(2, 3)), {2})])
def test_paged_plans_cut_both_ways_alike(space: Space, sizes: set[int]) -> None:
    machine = separate_links(gpus=2)
    candidates = paged_candidates(Policy.DP_SWAP, 8, 2, Costs(TRACE), space, Estimator(Costs(TRACE), machine))
    assert {(plan.u_fwd, plan.u_bwd) for plan in map(candidates.plan, range(candidates.count))} == {
        (u, u) for u in sizes
    }


@pytest.mark.parametrize(
    ("policy", "most"), [(Policy.DP_SWAP, 2), (Policy.GPIPE_SWAP, 4), (Policy.ONE_F_ONE_B_SWAP, 4)]
)
def test_a_baseline_is_tried_with_every_size_with_and_without_recompute_and_prefetch(policy: Policy, most: int) -> None:
    """Of a GPU's share, or in a pipeline of the minibatch."""
    machine = separate_links(gpus=2)
    candidates = paged_candidates(policy, 4, 2, Costs(TRACE), Space(), Estimator(Costs(TRACE), machine))
    found = [candidates.plan(number) for number in range(candidates.count)]
    assert {plan.policy for plan in found} == {policy}
    tried = {(plan.u_fwd, plan.writeback, plan.recompute, plan.prefetch_depth) for plan in found}
    assert tried == set(product(range(1, most + 1), Writeback, (True, False), (0, 1, 4, 16)))
    assert len(found) == len(tried)
