"""The search finds what looking at every plan finds, and says truly what it did not look at."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.builders.store_bytes import store_bytes
from sim.errors import PlanError
from sim.hardware.machine import Gpu, Host, Link, Machine
from sim.plan import HarmonyPlan, PagedPlan, Plan, Policy, Reduce, Residency, ShardedPlan, UpdateOn, Writeback, shares
from sim.planner.candidates import paged_candidates, sharded_candidates
from sim.planner.choice import PlanChoice
from sim.planner.estimates import Estimator
from sim.planner.evaluate import Found, evaluate
from sim.planner.harmony_candidates import harmony_candidates
from sim.planner.packing import Packer
from sim.planner.refusals import Reason, Refusals
from sim.planner.result import Counts, SearchResult
from sim.planner.search import NothingFits, search
from sim.planner.space import Space
from tests.sim.handmade import machine as separate_links
from tests.sim.planner.test_estimates import machines
from tests.strategies import linear_traces
from traces.costs import Costs
from traces.errors import TraceError
from traces.schema import Phase, Trace
from traces.synthetic import skewed_trace, uniform_trace, with_frozen, with_tied

EVERYTHING = 10**6
DP, PP, SWAP = Policy.HARMONY_DP, Policy.HARMONY_PP, Policy.DP_SWAP


def one_uplink(gpus: int, *, memory_bytes: int = 10**9, host_bytes: int | None = None) -> Machine:
    """GPUs that share a link to the host no faster than their own; the last one computes at half speed."""
    made = [
        Gpu(name="any", memory_bytes=memory_bytes, bandwidth=2e9, link="up", speed=0.5 if gpu == gpus - 1 else 1.0)
        for gpu in range(gpus)
    ]
    host = Host(memory_bytes=host_bytes, dram_bandwidth=8e9, cores=2)
    return Machine(name="uplink", host=host, gpus=tuple(made), links=(Link(name="up", bandwidth=2e9),))


def all_harmony_plans(policy: Policy, minibatch: int, costs: Costs, machine: Machine) -> Iterator[HarmonyPlan]:
    """Every pair of microbatch sizes with every pair of pack counts, balanced, and every place for the update."""
    gpus, layers = len(machine.gpus), costs.layer_count
    cap = min(gpu.usable_bytes for gpu in machine.gpus)
    most = minibatch if policy is PP else shares(minibatch, gpus)[0][1]
    sizes = range(1, most + 1)
    for u_fwd, u_bwd, update, count in product(sizes, sizes, UpdateOn, range(1, layers + 1)):
        packs_bwd = Packer(costs, u_bwd, Phase.BACKWARD, cap, update=update).balanced(count, layers)
        if packs_bwd is None:
            continue
        stop = packs_bwd[-1][0]
        if stop == 0 and u_fwd != u_bwd:
            continue
        for forward in range(min(1, stop), stop + 1):
            packs_fwd = Packer(costs, u_fwd, Phase.FORWARD, cap).balanced(forward, stop)
            if packs_fwd is not None:
                yield HarmonyPlan(
                    policy=policy, minibatch=minibatch, gpus=gpus, u_fwd=u_fwd, u_bwd=u_bwd, packs_fwd=packs_fwd,
                    packs_bwd=packs_bwd, update=update,
                )  # fmt: skip


def all_paged_plans(policy: Policy, minibatch: int, gpus: int) -> Iterator[PagedPlan]:
    """With every microbatch size, and prefetch as deep as is tried."""
    most = shares(minibatch, gpus)[0][1] if policy is SWAP else minibatch
    for u, writeback, recompute, depth in product(range(1, most + 1), Writeback, (True, False), (0, 1, 4, 16)):
        yield PagedPlan(
            policy=policy, minibatch=minibatch, gpus=gpus, u_fwd=u, u_bwd=u, residency=Residency.LRU,
            writeback=writeback, recompute=recompute, prefetch_depth=depth,
        )  # fmt: skip


def all_plans(policy: Policy, minibatch: int, costs: Costs, machine: Machine) -> list[Plan]:
    if policy.is_paged:
        return list(all_paged_plans(policy, minibatch, len(machine.gpus)))
    if not policy.is_harmony:
        gpus = len(machine.gpus)
        sizes = range(1, shares(minibatch, gpus)[0][1] + 1)
        return [
            ShardedPlan(policy=policy, minibatch=minibatch, gpus=gpus, u_fwd=u, u_bwd=u, prefetch_depth=depth)
            for u, depth in product(sizes, (0, 1, 4, 16))
        ]
    return list(all_harmony_plans(policy, minibatch, costs, machine))


def times_ns(plans: list[Plan], costs: Costs, machine: Machine) -> dict[Plan, int]:
    """Step times of the plans that fit, as they were built (with fewer slots than wanted, if need be)."""
    in_pipeline = {plan: plan.policy is PP and len(machine.gpus) > 1 for plan in plans}
    outcomes = [evaluate(plan, in_pipeline[plan], costs, machine) for plan in plans]
    return {outcome.plan: outcome.step_time_ns for outcome in outcomes if isinstance(outcome, Found)}


TRACES = {
    "uniform": uniform_trace(4),
    "skewed": skewed_trace(5, 4),
    "tied": with_tied(skewed_trace(8, 4), (0, 2), 2_000_000),
    "frozen": with_frozen(skewed_trace(13, 5), (1,)),
    "heavy": uniform_trace(4, weight_bytes=40_000_000, sample_bytes=100_000),
}
MACHINES = {
    "one": separate_links(),
    "two": separate_links(gpus=2),
    "tight": one_uplink(2, memory_bytes=22_000_000),
    "uplink": one_uplink(3),
}
CASES = [
    ("uniform", "one", 4), ("uniform", "two", 4), ("uniform", "tight", 4), ("skewed", "two", 4),
    ("skewed", "uplink", 3), ("tied", "tight", 4), ("tied", "uplink", 3), ("frozen", "tight", 3), ("heavy", "two", 4),
]  # fmt: skip


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(("trace", "machine", "minibatch"), CASES)
def test_the_best_is_the_best_of_all_plans(policy: Policy, trace: str, machine: str, minibatch: int) -> None:
    costs, on = Costs(TRACES[trace]), MACHINES[machine]
    plans = all_plans(policy, minibatch, costs, on)
    expected = times_ns(plans, costs, on)
    wanted = (policy,)
    if not expected:
        with pytest.raises(NothingFits):
            search(costs.trace, on, minibatch, policies=wanted)
        return
    found = search(costs.trace, on, minibatch, policies=wanted, top=3, max_simulated=EVERYTHING, max_variations=0)
    fastest = sorted(expected.values())
    assert [each.step_time_ns for each in found.top] == fastest[:3]
    assert all(expected[each.plan] == each.step_time_ns for each in found.top)
    assert found.best.step_time_ns == found.best.timeline.step_time_ns == fastest[0]
    packless = sum(refusal.count for refusal in found.refusals if refusal.reason is Reason.PACKS)
    assert found.counts.candidates - packless == len(set(plans))


def tight_search(**options: Any) -> SearchResult:
    """All policies where memory is short; some plans do not fit, others do."""
    return search(TRACES["uniform"], MACHINES["tight"], 4, policies=tuple(Policy), **{"max_variations": 0, **options})


@pytest.fixture(scope="module")
def without_limit() -> SearchResult:
    return tight_search(top=20, max_simulated=EVERYTHING)


@settings(max_examples=12, deadline=None)
@given(linear_traces(3, 5, tied=True, frozen=True), machines(), st.integers(3, 6), st.sampled_from(Policy))
def test_no_candidate_beats_any_bound(trace: Trace, machine: Machine, minibatch: int, policy: Policy) -> None:
    """Bounds of pairs of halves too, which are looser than those of plans."""
    costs, backwards = Costs(trace), tuple(reversed(range(len(machine.gpus))))
    estimator = Estimator(costs, machine)
    if policy.is_paged:
        candidates = paged_candidates(policy, minibatch, len(machine.gpus), costs, Space(), estimator)
    elif not policy.is_harmony:
        candidates = sharded_candidates(policy, minibatch, len(machine.gpus), costs, Space(), estimator)
    else:
        candidates = harmony_candidates(policy, minibatch, costs, machine, Space(gpu_order=(backwards,)), Refusals())
    for number in range(0, candidates.count, 1 + candidates.count // 12):
        outcome = evaluate(candidates.plan(number), candidates.open_slots, costs, machine)
        if isinstance(outcome, Found):
            assert candidates.bounds_ns[number] <= outcome.step_time_ns
            assert estimator.lower_bound_ns(outcome.plan) <= outcome.step_time_ns


def test_the_top_is_sorted_and_distinct_and_as_long_as_asked_for(without_limit: SearchResult) -> None:
    found = without_limit
    assert len(found.top) == 20
    assert [each.step_time_ns for each in found.top] == sorted(each.step_time_ns for each in found.top)
    assert len({each.plan for each in found.top}) == 20
    assert found.top[0] == found.best.found
    assert found.best.plan == found.best.schedule.plan == found.top[0].plan
    fitting = [policy for policy in Policy if policy is not Policy.ZERO3_OFFLOAD]  # it keeps whole layers on a GPU
    assert {policy: best.plan.policy for policy, best in found.best_by_policy.items()} == {p: p for p in fitting}


def test_a_short_list_prunes_more_and_finds_the_same_best(without_limit: SearchResult) -> None:
    long, short = without_limit, tight_search(top=1, max_simulated=EVERYTHING)
    assert short.best.found == long.best.found
    assert short.counts.pruned > long.counts.pruned
    assert short.counts.left == long.counts.left == 0
    assert short.gap == long.gap == 0
    assert short.lower_bound_ns == short.best.step_time_ns


@pytest.mark.parametrize("budget", [1, 5, 12])
def test_the_budget_is_kept_and_the_gap_is_what_it_leaves(budget: int, without_limit: SearchResult) -> None:
    found = tight_search(top=3, max_simulated=budget)
    assert all(counts.simulated <= budget for counts in found.counts_by_policy.values())
    assert found.counts.left > 0
    assert found.lower_bound_ns <= without_limit.best.step_time_ns <= found.best.step_time_ns
    assert found.gap == pytest.approx(1 - found.lower_bound_ns / found.best.step_time_ns)


def test_a_larger_budget_finds_nothing_slower() -> None:
    times = [tight_search(max_simulated=budget, top=1).best.step_time_ns for budget in (1, 4, 16)]
    assert times == sorted(times, reverse=True)


def test_every_candidate_is_accounted_for_and_every_refusal_has_a_reason(without_limit: SearchResult) -> None:
    for found in (without_limit, tight_search(max_simulated=8)):
        for policy, counts in found.counts_by_policy.items():
            assert counts.candidates == counts.simulated + counts.pruned + counts.infeasible + counts.left
            assert counts.infeasible == sum(each.count for each in found.refusals if each.policy is policy)
        assert all("need" in str(each.nearest) for each in found.refusals)
    assert without_limit.counts.infeasible > 0


def test_a_gpu_too_small_for_any_pack_is_one_error_that_says_what_to_change() -> None:
    with pytest.raises(NothingFits) as refusal:
        search(TRACES["uniform"], one_uplink(2, memory_bytes=5_000_000), 4, policies=tuple(Policy))
    assert str(refusal.value).startswith("no plan fits:\n")
    assert len(refusal.value.reasons) == len(Policy)
    for reason in refusal.value.reasons:
        assert "the cap is 4.77 MiB" in reason
        assert "--gpu-memory" in reason


def test_a_host_too_small_for_all_state_is_an_error_that_says_what_to_change() -> None:
    with pytest.raises(NothingFits) as refusal:
        search(TRACES["uniform"], one_uplink(2, host_bytes=40_000_000), 4, policies=tuple(Policy))
    assert [Reason.HOST.value in reason for reason in refusal.value.reasons] == [True] * len(Policy)
    assert all("--host-memory" in reason for reason in refusal.value.reasons)


def test_a_host_with_room_for_state_alone_ends_the_search_in_time() -> None:
    """Stash and boundary tensors find no place, which only building tells: the search gives up after some tries."""
    trace = uniform_trace(12)
    stored = store_bytes(Costs(trace), 8, copies=1)
    with pytest.raises(NothingFits, match=r"none of the plans tried fits, \d+ more were not tried") as refusal:
        search(
            trace,
            one_uplink(2, host_bytes=stored + 1),
            8,
            policies=(DP,),
            choice=Space(packs_bwd=(4, 6)),
            max_simulated=2,
        )
    assert refusal.value.left > 0


def test_fewer_samples_than_gpus_leave_only_the_pipeline() -> None:
    found = search(TRACES["uniform"], MACHINES["uplink"], 2, policies=(DP, PP))
    assert list(found.best_by_policy) == [PP]
    assert [(each.policy, each.reason) for each in found.refusals] == [(DP, Reason.PLAN)]


def test_fewer_layers_than_gpus_leave_out_the_plain_pipelines() -> None:
    pipelines = (Policy.GPIPE_SWAP, Policy.ONE_F_ONE_B_SWAP)
    found = search(uniform_trace(2), MACHINES["uplink"], 3, policies=(SWAP, *pipelines))
    assert list(found.best_by_policy) == [SWAP]
    assert [(each.policy, each.reason) for each in found.refusals] == [(each, Reason.PLAN) for each in pipelines]


def test_on_one_gpu_a_pipeline_is_not_searched_twice() -> None:
    found = search(TRACES["uniform"], MACHINES["one"], 2, policies=(DP, PP))
    assert list(found.counts_by_policy) == [DP]
    assert found.notes == ("harmony-pp is left out: on one GPU it is the same as harmony-dp",)


def test_progress_grows() -> None:
    shares: list[float] = []
    texts: list[str] = []

    def note(share: float, text: str) -> None:
        shares.append(share)
        texts.append(text)

    tight_search(max_simulated=16, progress=note)
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] <= 1
    assert [policy.value for policy in Policy if any(text.startswith(policy.value) for text in texts)] == [
        policy.value for policy in Policy
    ]
    assert any("best" in text for text in texts)


def agrees(plan: Plan, choice: PlanChoice) -> bool:
    """Whether a plan has what is fixed, as far as such plans have it at all; a number of packs may be fixed alone."""

    def same(wanted: object, found: object) -> bool:
        return len(found) == wanted if isinstance(found, tuple) and isinstance(wanted, int) else found == wanted

    return all(same(value, getattr(plan, name)) for name, value in choice.fixed().items() if hasattr(plan, name))


@pytest.mark.parametrize(
    "choice",
    [
        PlanChoice(u_fwd=2),
        PlanChoice(u_bwd=2, packs_bwd=3),
        PlanChoice(packs_bwd=((0, 1), (2, 3)), update=UpdateOn.GPU),
        PlanChoice(packs_fwd=1, reduce=Reduce.HOST, prefetch=False),
        PlanChoice(packs_bwd=1),
    ],
)
def test_a_choice_is_kept(choice: PlanChoice) -> None:
    """Of what it admits the best is found."""
    trace, machine = TRACES["skewed"], MACHINES["two"]
    kept = search(trace, machine, 4, choice=choice, max_simulated=EVERYTHING, max_variations=0)
    assert all(agrees(each.plan, choice) for each in kept.top)
    allowed = [p for policy in (DP, PP) for p in all_plans(policy, 4, Costs(trace), machine)]
    rest = {name: value for name, value in choice.fixed().items() if name in ("reduce", "prefetch")}
    plans = [replace(plan, **rest) for plan in allowed]
    times = times_ns([plan for plan in plans if agrees(plan, choice)], Costs(trace), machine)
    assert kept.best.step_time_ns == min(times.values())


def test_a_packing_that_is_wanted_twice_is_tried_once() -> None:
    once = search(TRACES["uniform"], MACHINES["two"], 4, policies=(DP,), choice=Space(packs_bwd=(2,)))
    twice = search(TRACES["uniform"], MACHINES["two"], 4, policies=(DP,), choice=Space(packs_bwd=(2, 2)))
    assert twice.top == once.top
    assert twice.counts.simulated == once.counts.simulated


def test_a_policy_of_which_no_plan_is_left_says_why() -> None:
    machine, choice = MACHINES["two"], PlanChoice(packs_bwd=99)
    found = search(TRACES["uniform"], machine, 4, policies=(DP, SWAP), choice=choice, max_simulated=1)
    assert {each.plan.policy for each in found.top} == {SWAP}
    assert any(
        note.startswith("harmony-dp: ") and "cannot be cut into 99 backward packs" in note for note in found.notes
    )
    alone = search(TRACES["uniform"], machine, 1, policies=(DP, PP), max_simulated=1)
    assert any("harmony-dp gives each GPU a share of the minibatch: 1 samples" in note for note in alone.notes)
    with pytest.raises(NothingFits, match="the fewest that fit are"):
        search(TRACES["uniform"], machine, 4, policies=(DP,), choice=choice)


def test_a_wrong_choice_is_refused() -> None:
    with pytest.raises(PlanError, match="residency: not a field of harmony-dp plans"):
        search(TRACES["uniform"], MACHINES["two"], 4, policies=(DP,), choice=PlanChoice(residency=Residency.NEXT))
    with pytest.raises(PlanError, match="no policy"):
        search(TRACES["uniform"], MACHINES["two"], 4, policies=())
    with pytest.raises(PlanError, match="'harmony' is not a valid Policy; give a list of some of harmony-dp"):
        search(TRACES["uniform"], MACHINES["two"], 4, policies=("harmony",))  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="0 samples in a minibatch"):
        search(TRACES["uniform"], MACHINES["two"], 0)
    with pytest.raises(PlanError, match="0 plans in the top"):
        search(TRACES["uniform"], MACHINES["two"], 4, top=0)
    with pytest.raises(PlanError, match="0 plans to simulate"):
        search(TRACES["uniform"], MACHINES["two"], 4, max_simulated=0)
    with pytest.raises(TraceError, match="16"):
        search(TRACES["uniform"], MACHINES["two"], 40, policies=(DP,), choice=PlanChoice(u_fwd=16))


def test_sizes_outside_the_trace_are_left_out_or_extrapolated() -> None:
    found = search(TRACES["uniform"], MACHINES["two"], 24, policies=(DP,), choice=PlanChoice(packs_bwd=2))
    assert all(isinstance(each.plan, HarmonyPlan) and max(each.plan.u_fwd, each.plan.u_bwd) <= 8 for each in found.top)
    assert any("microbatch sizes 9-12" in note for note in found.notes)
    guessed = search(
        TRACES["uniform"], MACHINES["two"], 24, policies=(DP,), choice=PlanChoice(packs_bwd=2), extrapolate=True
    )
    assert guessed.counts.candidates > found.counts.candidates
    assert not any("microbatch sizes" in note for note in guessed.notes)


TWO_SWITCHES = Machine(
    name="two switches",
    host=Host(memory_bytes=None, dram_bandwidth=8e9, cores=2),
    gpus=tuple(Gpu(name="any", memory_bytes=10**9, bandwidth=2e9, link=link) for link in ("a", "a", "b", "b")),
    links=tuple(Link(name=name, bandwidth=2e9) for name in ("a", "b")),
)
CROSSING = (0, 2, 1, 3)


def crossing_search(**options: Any) -> SearchResult:
    return search(TRACES["skewed"], TWO_SWITCHES, 4, policies=(PP,), **options)


def test_the_best_vary_and_the_bound_is_of_candidates() -> None:
    plain = crossing_search(max_simulated=EVERYTHING, max_variations=0)
    varied = crossing_search(max_simulated=EVERYTHING)
    assert (plain.counts.varied, varied.counts.varied > 0) == (0, True)
    assert varied.counts == plain.counts + Counts(varied=varied.counts.varied)
    assert plain.lower_bound_ns == plain.best.step_time_ns
    assert varied.lower_bound_ns == varied.best.found.period_ns <= plain.best.step_time_ns
    best = plain.best.plan
    tried = times_ns([best, replace(best, gpu_order=CROSSING)], Costs(TRACES["skewed"]), TWO_SWITCHES)
    assert varied.best.found.period_ns <= min(tried.values())
    assert varied.gap == 0


def test_variations_keep_to_their_limit_and_to_what_is_fixed() -> None:
    assert crossing_search(max_simulated=8, max_variations=1).counts.varied == 1
    for order in (CROSSING, (0, 1, 2, 3)):
        found = crossing_search(choice=PlanChoice(gpu_order=order), max_simulated=8)
        assert {each.plan.gpu_order for each in found.top} == {order}
    with pytest.raises(PlanError, match="100001 samples in a minibatch"):
        search(TRACES["skewed"], TWO_SWITCHES, 100_001, policies=(PP,))
    with pytest.raises(PlanError, match="-1 variations"):
        crossing_search(max_variations=-1)


@pytest.mark.parametrize("apart", [1, 4])
def test_of_plans_with_backwards_in_two_parts_the_best_is_found(apart: int) -> None:
    trace, machine = TRACES["skewed"], MACHINES["two"]
    plans = [replace(each, split_backward=apart) for each in all_plans(PP, 4, Costs(trace), machine)]
    found = search(
        trace, machine, 4, policies=(PP,), choice=PlanChoice(split_backward=apart), max_simulated=EVERYTHING, top=3,
        max_variations=0,
    )  # fmt: skip
    assert [each.step_time_ns for each in found.top] == sorted(times_ns(plans, Costs(trace), machine).values())[:3]


def test_plans_whose_steps_overlap_are_ranked_by_their_period() -> None:
    """Bounds are of a step alone, so they rule nothing out; what is not tried is left."""
    trace, machine = TRACES["skewed"], MACHINES["two"]
    choice = PlanChoice(overlap_steps=True, packs_bwd=3, u_bwd=2)
    found = search(trace, machine, 4, policies=(DP, PP), choice=choice, max_simulated=4, max_variations=0)
    assert all(each.plan.overlap_steps for each in found.top)
    periods = [each.period_ns for each in found.top]
    assert periods == sorted(periods)
    assert found.best.timeline.period_ns == periods[0] <= found.best.step_time_ns
    assert found.counts.pruned == 0
    assert found.lower_bound_ns <= min(each.step_time_ns for each in found.top)
    assert found.remarks()[2].startswith("where steps overlap, what counts is their period")
    everything = search(trace, machine, 4, choice=choice, max_simulated=EVERYTHING)
    assert everything.counts.left == 0
    assert everything.best.found.period_ns <= periods[0]


def test_only_the_best_is_tried_with_steps_that_overlap() -> None:
    found = crossing_search(max_simulated=EVERYTHING, top=1000)
    overlapping = [each for each in found.top if each.plan.overlap_steps]
    assert len(overlapping) == 1
    others = [each for each in found.top if each is not overlapping[0]]
    assert replace(overlapping[0].plan, overlap_steps=False) == others[0].plan
    assert overlapping[0].step_time_ns == others[0].step_time_ns


def test_an_order_of_other_gpus_is_refused() -> None:
    with pytest.raises(NothingFits, match="gpu_order 0,1 must name each of GPUs 0-3 once"):
        crossing_search(choice=PlanChoice(gpu_order=(0, 1)))


def test_processes_find_the_same() -> None:
    """And so does a second search here."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        elsewhere = tight_search(max_simulated=12, executor=pool).to_dict()
    here, again = tight_search(max_simulated=12).to_dict(), tight_search(max_simulated=12).to_dict()
    for each in (elsewhere, here, again):
        del each["seconds"]
    assert elsewhere == here == again
