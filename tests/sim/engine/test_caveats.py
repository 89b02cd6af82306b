"""GPUs of different sizes and speeds, more GPUs than work, and what is said about them."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace

from sim.builders import build
from sim.engine.simulate import simulate
from sim.errors import DoesNotFit, PlanError
from sim.hardware.machine import Gpu, Host, Machine
from sim.plan import HarmonyPlan, PagedPlan, Plan, Policy
from sim.planner.choice import PlanChoice
from sim.planner.completion import build_choice
from sim.planner.estimates import Estimator
from sim.planner.search import search
from sim.timelines.timeline import Timeline
from sim.validation.validate import validate
from tests.random_plans import random_case
from traces.costs import Costs
from traces.schema import Phase
from traces.synthetic import uniform_trace

TRACE = uniform_trace(4)
COSTS = Costs(TRACE)
PLENTY = 10**12


def mixed(*gpus: tuple[float, int], rate: float = 1e15) -> Machine:
    """GPUs of these speeds and usable bytes; copies cost next to nothing."""
    made = tuple(Gpu(name="any", memory_bytes=size, bandwidth=rate, speed=speed) for speed, size in gpus)
    return Machine(name="mixed", host=Host(memory_bytes=None, dram_bandwidth=rate, cores=1), gpus=made)


def harmony(policy: Policy, gpus: int, *, minibatch: int = 4, **fields: Any) -> HarmonyPlan:
    packs: dict[str, Any] = {"packs_fwd": ((0, 1),), "packs_bwd": ((0, 1), (2, 3))}
    return HarmonyPlan(policy=policy, minibatch=minibatch, gpus=gpus, u_fwd=1, u_bwd=1, **{**packs, **fields})


def paged(policy: Policy, gpus: int) -> PagedPlan:
    return PagedPlan(policy=policy, minibatch=4, gpus=gpus, u_fwd=1, u_bwd=1)


def predict(plan: Plan, machine: Machine) -> Timeline:
    schedule = build(plan, TRACE, machine)
    validate(schedule, TRACE)
    return simulate(schedule, TRACE, machine)


def busy_ns(timeline: Timeline, gpu: int) -> int:
    rows = timeline.frame[(timeline.frame["gpu"] == gpu) & (timeline.frame["lane"] == "compute")]
    return int((rows["end_ns"] - rows["start_ns"]).sum())


@pytest.mark.parametrize("plan", [harmony(Policy.HARMONY_DP, 2), paged(Policy.DP_SWAP, 2)])
def test_each_gpu_computes_at_its_own_speed(plan: Plan) -> None:
    """Equal shares: the GPU of a quarter of the speed takes four times as long, and the output says so."""
    timeline = predict(plan, mixed((1.0, PLENTY), (0.25, PLENTY)))
    assert busy_ns(timeline, 1) == pytest.approx(4 * busy_ns(timeline, 0), rel=1e-6)
    assert timeline.summary()["notes"]["caveats"] == [
        "GPU 1 holds the others up: every GPU has the same share of the minibatch, and the slowest has 0.25 times the "
        "speed of the fastest"
    ]


def test_a_pipeline_of_two_speeds_to_the_nanosecond() -> None:
    """GPU 0: forward 0-1, then backward 0-1; GPU 1, half as fast: 2-3, fused. One microbatch, copies cost nothing."""
    timeline = predict(harmony(Policy.HARMONY_PP, 2, minibatch=1), mixed((1.0, PLENTY), (0.5, PLENTY)))
    first = COSTS.forward_ns(0, 1, 1)
    fused = 2 * (COSTS.forward_ns(2, 3, 1) + COSTS.backward_ns(2, 3, 1))
    last = COSTS.forward_ns(0, 1, 1) + COSTS.backward_ns(0, 1, 1)
    update = COSTS.update_ns(0, 1, Phase.UPDATE_CPU)
    copies = timeline.frame[timeline.frame["kind"].isin(["swap_in", "swap_out", "p2p"])]
    slack = int((copies["end_ns"] - copies["start_ns"]).sum())
    assert 0 <= timeline.step_time_ns - (first + fused + last + update) <= slack
    assert slack < 1000
    assert "caveats" not in timeline.summary()["notes"]


def test_each_gpu_has_its_own_cap() -> None:
    """A schedule that fits on both fits if GPU 1 has just what it needs, and not with less, whatever GPU 0 has."""
    plan = harmony(Policy.HARMONY_PP, 2)
    needed = predict(plan, mixed((1.0, PLENTY), (1.0, PLENTY))).info.gpu_planned_peak_bytes
    assert needed[0] != needed[1]
    timeline = predict(plan, mixed((1.0, needed[0]), (1.0, needed[1])))
    assert timeline.info.gpu_cap_bytes == needed
    assert all(peak <= cap for peak, cap in zip(timeline.info.gpu_planned_peak_bytes, needed, strict=True))
    with pytest.raises(DoesNotFit) as refusal:
        build(plan, TRACE, mixed((1.0, PLENTY), (1.0, needed[1] // 4)))
    assert (refusal.value.gpu, refusal.value.cap) == (1, needed[1] // 4)


@pytest.mark.parametrize(
    ("packs_fwd", "packs_bwd", "said"),
    [
        (((0, 1),), ((0, 1), (2, 3)), "GPU 3 has nothing to do: 3 packs for 4 GPUs"),
        ((), ((0, 3),), "GPUs 1, 2, 3 have nothing to do: 1 pack for 4 GPUs"),
    ],
)
def test_gpus_without_a_pack_are_named(packs_fwd: Any, packs_bwd: Any, said: str) -> None:
    plan = harmony(Policy.HARMONY_PP, 4, packs_fwd=packs_fwd, packs_bwd=packs_bwd)
    timeline = predict(plan, mixed(*[(1.0, PLENTY)] * 4))
    assert timeline.summary()["notes"]["caveats"] == [said]
    assert timeline.info.gpu_planned_peak_bytes[3] == 0
    assert timeline.summary()["busy_s"]["3"] == {}


@pytest.mark.parametrize("policy", [Policy.GPIPE_SWAP, Policy.ONE_F_ONE_B_SWAP])
def test_a_pipeline_of_more_gpus_than_layers_is_refused(policy: Policy) -> None:
    with pytest.raises(PlanError, match=r"over 5 GPUs needs at least as many layers; .* has 4; use fewer GPUs"):
        build(paged(policy, 5), TRACE, mixed(*[(1.0, PLENTY)] * 5))


def test_a_search_says_it_too() -> None:
    choice = PlanChoice(packs_fwd=(), packs_bwd=((0, 3),))
    found = search(TRACE, mixed(*[(1.0, PLENTY)] * 2), 2, policies=(Policy.HARMONY_PP,), choice=choice)
    said = "GPU 1 has nothing to do: 1 pack for 2 GPUs"
    assert said in found.remarks()
    assert said in found.to_dict()["notes"]


@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_plans_on_mixed_gpus_hold_together_and_keep_to_their_bounds(seed: int) -> None:
    """Any plan, GPUs of other speeds, each with just the memory that the plan takes of it."""
    case = random_case(seed)
    needed = build(case.plan, case.trace, case.machine).memory.gpu_peak_bytes
    draw = random.Random(seed)
    gpus = tuple(
        replace(gpu, speed=draw.choice([0.3, 1.0, 2.5]), memory_bytes=max(size, 1))
        for gpu, size in zip(case.machine.gpus, needed, strict=True)
    )
    machine = replace(case.machine, gpus=gpus)
    schedule = build(case.plan, case.trace, machine)
    validate(schedule, case.trace)
    assert schedule.memory.gpu_cap_bytes == tuple(gpu.usable_bytes for gpu in gpus)
    step = simulate(schedule, case.trace, machine).step_time_ns
    assert Estimator(Costs(case.trace), machine).lower_bound_ns(case.plan) <= step


@pytest.mark.parametrize("small", [0, 1])
def test_pipelines_are_found_of_which_only_the_larger_gpu_holds_the_largest_pack(small: int) -> None:
    """Layer 2, ten times as heavy, fits one GPU only. Data parallel there is no plan: every GPU runs it."""
    uniform = uniform_trace(4)
    last = uniform.layers[2]
    heavy = replace(last, weight_bytes=10 * last.weight_bytes, gradient_bytes=10 * last.gradient_bytes)
    trace = replace(uniform, layers=(*uniform.layers[:2], heavy, uniform.layers[3]))
    caps = [PLENTY, PLENTY]
    caps[small] = 10 * last.weight_bytes
    machine = mixed((1.0, caps[0]), (1.0, caps[1]))
    found = search(trace, machine, 4, policies=(Policy.HARMONY_DP, Policy.HARMONY_PP))
    assert set(found.best_by_policy) == {Policy.HARMONY_PP}
    peaks = found.best.schedule.memory.gpu_peak_bytes
    assert peaks[small] <= caps[small] < peaks[1 - small]
    if small == 1:  # as completed plainly, the heavy layer comes to lie on GPU 0
        schedule = build_choice(PlanChoice(), Policy.HARMONY_PP, 4, Costs(trace), machine)
        assert schedule.memory.gpu_peak_bytes[1] <= caps[1] < schedule.memory.gpu_peak_bytes[0]
    with pytest.raises(DoesNotFit) as refusal:
        build_choice(PlanChoice(), Policy.HARMONY_DP, 4, Costs(trace), machine)
    assert (refusal.value.gpu, refusal.value.cap) == (small, caps[small])


@pytest.mark.parametrize("speeds", [(1.0, 0.5), (0.25, 1.0)])
def test_a_search_on_mixed_gpus_finds_the_fastest_of_what_it_tried(speeds: tuple[float, float]) -> None:
    """Its bounds count with each GPU's speed: no plan that it simulated takes less than its bound, and the best, built
    again, is as fast as it says."""
    machine = mixed((speeds[0], PLENTY), (speeds[1], PLENTY), rate=1e9)
    found = search(TRACE, machine, 4, policies=(Policy.HARMONY_DP, Policy.HARMONY_PP))
    assert predict(found.best.plan, machine).step_time_ns == found.best.step_time_ns
    assert found.best.step_time_ns == min(each.step_time_ns for each in found.top)
    for policy, best in found.best_by_policy.items():
        assert best.timeline.info.lower_bound_ns is not None
        assert best.timeline.info.lower_bound_ns <= best.step_time_ns, policy
