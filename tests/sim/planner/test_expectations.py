"""What plans will probably take: near the simulator's answer where that has a closed form, and in the right order."""

from __future__ import annotations

from itertools import product

import pytest

from sim.hardware.machine import Gpu, Host, Link, Machine
from sim.plan import HarmonyPlan, Policy, UpdateOn
from sim.planner.evaluate import Found, evaluate
from sim.planner.expectations import Expectations
from sim.planner.packing import Packer
from tests.sim.handmade import machine as separate_links
from traces.costs import Costs
from traces.schema import Phase
from traces.synthetic import uniform_trace

FAST = 1e15


def plan(
    policy: Policy, gpus: int, u: int, packs_fwd: int, packs_bwd: int, costs: Costs, minibatch: int
) -> HarmonyPlan:
    backward = Packer(costs, u, Phase.BACKWARD, 10**15).balanced(packs_bwd, costs.layer_count)
    assert backward is not None
    forward = Packer(costs, u, Phase.FORWARD, 10**15).balanced(packs_fwd, backward[-1][0])
    assert forward is not None
    return HarmonyPlan(
        policy=policy, minibatch=minibatch, gpus=gpus, u_fwd=u, u_bwd=u, packs_fwd=forward, packs_bwd=backward,
        update=UpdateOn.GPU,
    )  # fmt: skip


def simulated_ns(plan: HarmonyPlan, costs: Costs, machine: Machine) -> int:
    found = evaluate(plan, False, costs, machine)
    assert isinstance(found, Found)
    return found.step_time_ns


@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP])
@pytest.mark.parametrize("u", [1, 2])
def test_where_copies_take_no_time_the_walk_is_the_simulation(policy: Policy, u: int) -> None:
    costs = Costs(uniform_trace(9))
    machine = separate_links(gpus=2, bandwidth=FAST, dram=FAST)
    expectations = Expectations(costs, machine, parallel=policy is Policy.HARMONY_DP)
    made = plan(policy, 2, u, 4, 4, costs, 8)
    assert expectations.plan_ns(made) == pytest.approx(simulated_ns(made, costs, machine), rel=1e-3)


def test_halves_add_up_where_nothing_overlaps() -> None:
    costs = Costs(uniform_trace(9))
    machine = separate_links(bandwidth=FAST, dram=FAST)
    expectations = Expectations(costs, machine, parallel=True)
    made = plan(Policy.HARMONY_DP, 1, 2, 4, 4, costs, 8)
    halves = expectations.forward_ns(made) + expectations.backward_ns(made)
    assert halves == pytest.approx(expectations.plan_ns(made), rel=1e-6)
    forward = sum(4 * costs.forward_ns(*pack, 2) for pack in made.packs_fwd)
    assert expectations.forward_ns(made) == pytest.approx(forward, rel=1e-6)


def test_weights_without_room_beside_those_at_work_come_in_afterwards() -> None:
    """Two packs of 8 MB weights at 1 byte a nanosecond; with room the second's come in while the first computes."""
    costs = Costs(uniform_trace(5, sample_ns=4_000_000))
    made = plan(Policy.HARMONY_DP, 1, 1, 1, 3, costs, 4)
    roomy = separate_links()
    walks = {}
    for memory in (10**9, 33_000_000):
        machine = roomy.with_usable_memory(memory)
        walks[memory] = Expectations(costs, machine, parallel=True).plan_ns(made)
        assert walks[memory] == pytest.approx(simulated_ns(made, costs, machine), rel=0.1)
    assert walks[33_000_000] > walks[10**9] + 8_000_000


def test_gpus_that_swap_at_the_same_time_share_their_uplink() -> None:
    """Swapping binds: four GPUs on one link of 1 byte a nanosecond take four times as long as one alone."""
    costs = Costs(uniform_trace(9, sample_ns=1000, fixed_ns=0, weight_bytes=40_000_000))
    gpu = Gpu(name="any", memory_bytes=10**9, bandwidth=1e9, link="up")
    one = Machine(
        name="uplink",
        host=Host(memory_bytes=None, dram_bandwidth=FAST, cores=2),
        gpus=(gpu,),
        links=(Link(name="up", bandwidth=1e9),),
    )
    four = one.with_gpus(4)
    made = plan(Policy.HARMONY_DP, 4, 1, 4, 4, costs, 4)
    alone = Expectations(costs, one, parallel=True).forward_ns(plan(Policy.HARMONY_DP, 1, 1, 4, 4, costs, 1))
    assert Expectations(costs, four, parallel=True).forward_ns(made) == pytest.approx(4 * alone, rel=0.05)


def test_the_plan_expected_to_be_fastest_is_nearly_so() -> None:
    costs = Costs(uniform_trace(9, weight_bytes=20_000_000))
    machine = separate_links(gpus=2, bandwidth=4e9).with_usable_memory(260_000_000)
    for policy in (Policy.HARMONY_DP, Policy.HARMONY_PP):
        expectations = Expectations(costs, machine, parallel=policy is Policy.HARMONY_DP)
        tried = [plan(policy, 2, u, fwd, bwd, costs, 8) for u, fwd, bwd in product((1, 2, 4), (2, 3, 4), (3, 4, 5))]
        outcomes = {made: evaluate(made, False, costs, machine) for made in tried}
        times = {made: found.step_time_ns for made, found in outcomes.items() if isinstance(found, Found)}
        assert len(times) > 9
        assert times[min(times, key=expectations.plan_ns)] <= 1.05 * min(times.values())
        assert max(times.values()) > 1.25 * min(times.values())
