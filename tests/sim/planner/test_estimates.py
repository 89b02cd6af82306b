"""Bounds are never above what the simulator finds, and sometimes just that."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sim.builders import build_from_costs
from sim.engine.durations import CostDurations, Demands
from sim.engine.simulate import run_step
from sim.errors import DoesNotFit, PlanError
from sim.hardware.machine import Gpu, Host, Link, Machine, NvLink
from sim.plan import (
    HarmonyPlan,
    Pack,
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
)
from sim.planner.estimates import Estimator
from tests.strategies import linear_traces
from traces.costs import Costs

GB = 1e9


@st.composite
def machines(draw: st.DrawFn, max_gpus: int = 3) -> Machine:
    """GPUs below one or two switches or the host, fast or slow, with and without P2P, NVLink and duplex caps."""
    count = draw(st.integers(1, max_gpus))
    rates = st.sampled_from((0.5 * GB, 1 * GB, 2 * GB, 8 * GB))
    both = st.none() | st.just(1.5 * GB)
    links = tuple(
        Link(name=name, bandwidth=draw(rates), both_directions=draw(both), latency_ns=draw(st.integers(0, 50_000)))
        for name in ("a", "b")[: draw(st.integers(0, 2))]
    )
    gpus = tuple(
        Gpu(
            name="any",
            memory_bytes=draw(st.sampled_from((40, 60, 120, 400))) * 10**6,
            bandwidth=draw(rates),
            link=draw(st.sampled_from(("host", *(link.name for link in links)))),
            speed=draw(st.sampled_from((0.3, 1.0, 7.0))),
            p2p=draw(st.booleans()),
            p2p_bandwidth=draw(st.none() | rates),
            both_directions=draw(both),
            copy_overhead_ns=draw(st.sampled_from((0, 30_000))),
        )
        for _ in range(count)
    )
    nvlinks = (NvLink(gpus=(0, count - 1), bandwidth=4 * GB),) if count > 1 and draw(st.booleans()) else ()
    host = Host(memory_bytes=None, dram_bandwidth=draw(rates) * 4, cores=2, speed=draw(st.sampled_from((0.5, 1.0))))
    return Machine(name="random", host=host, gpus=gpus, links=links, nvlinks=nvlinks)


def packs(draw: st.DrawFn, layers: int) -> tuple[Pack, ...]:
    if layers == 0:
        return ()
    cuts = draw(st.sets(st.integers(1, layers - 1), max_size=layers)) if layers > 1 else set()
    return tuple((first, stop - 1) for first, stop in pairwise([0, *sorted(cuts), layers]))


@st.composite
def harmony_plans(draw: st.DrawFn, gpus: int, layers: int) -> HarmonyPlan:
    packs_bwd = packs(draw, layers)
    u_fwd, u_bwd = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    places = st.sampled_from([place for place in StashPlace if u_fwd == u_bwd or place is not StashPlace.KEEP])
    update = draw(st.sampled_from(UpdateOn))
    some = st.sets(st.integers(0, len(packs_bwd) - 1)).map(sorted).map(tuple)
    return HarmonyPlan(
        policy=draw(st.sampled_from((Policy.HARMONY_DP, Policy.HARMONY_PP))),
        minibatch=draw(st.integers(gpus, 8)),
        gpus=gpus,
        u_fwd=u_fwd,
        u_bwd=u_bwd,
        packs_fwd=packs(draw, packs_bwd[-1][0]),
        packs_bwd=packs_bwd,
        update=update,
        update_when=draw(st.sampled_from(UpdateWhen)),
        reduce=draw(st.sampled_from(Reduce)),
        slots=draw(st.none() | st.integers(1, 3)),
        prefetch=draw(st.booleans()),
        stash=tuple(draw(places) for _ in packs_bwd[1:-1]),
        resident_weights=draw(some),
        resident_state=draw(some) if update is UpdateOn.GPU else (),
        gpu_order=draw(st.none() | st.permutations(range(gpus)).map(tuple)),
        split_backward=draw(st.integers(0, 3)),
    )


@st.composite
def paged_plans(draw: st.DrawFn, gpus: int, layers: int) -> PagedPlan:
    u = draw(st.integers(1, 8))
    policies = [policy for policy in Policy if policy.is_paged and (policy.splits_minibatch or gpus <= layers)]
    return PagedPlan(
        policy=draw(st.sampled_from(policies)),
        minibatch=draw(st.integers(gpus, 8)),
        gpus=gpus,
        u_fwd=u,
        u_bwd=u,
        residency=draw(st.sampled_from(Residency)),
        writeback=draw(st.sampled_from(Writeback)),
        recompute=draw(st.booleans()),
        prefetch_depth=draw(st.sampled_from((0, 0, 1, 4))),
    )


def simulated_ns(plan: Plan, costs: Costs, machine: Machine) -> int:
    try:
        schedule = build_from_costs(plan, costs, machine)
    except (DoesNotFit, PlanError):
        assume(False)
    return run_step(schedule, Demands(machine, CostDurations(costs, machine, plan.gpus), plan.gpus)).duration_ns


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_harmony_plan_beats_its_bound(data: st.DataObject) -> None:
    costs = Costs(data.draw(linear_traces(tied=True, frozen=True)))
    machine = data.draw(machines())
    plan = data.draw(harmony_plans(len(machine.gpus), costs.layer_count))
    assert Estimator(costs, machine).lower_bound_ns(plan) <= simulated_ns(plan, costs, machine)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_plan_over_shards_beats_its_bound(data: st.DataObject) -> None:
    costs = Costs(data.draw(linear_traces(tied=True, frozen=True)))
    machine = data.draw(machines())
    gpus, u = len(machine.gpus), data.draw(st.integers(1, 4))
    plan = ShardedPlan(
        policy=Policy.ZERO3_OFFLOAD, minibatch=data.draw(st.integers(gpus, 8)), gpus=gpus, u_fwd=u, u_bwd=u,
        update_when=data.draw(st.sampled_from(UpdateWhen)), prefetch_depth=data.draw(st.sampled_from((0, 1, 4))),
    )  # fmt: skip
    assert Estimator(costs, machine).lower_bound_ns(plan) <= simulated_ns(plan, costs, machine)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_paged_plan_beats_its_bound(data: st.DataObject) -> None:
    costs = Costs(data.draw(linear_traces(tied=True, frozen=True)))
    machine = data.draw(machines())
    plan = data.draw(paged_plans(len(machine.gpus), costs.layer_count))
    assert Estimator(costs, machine).lower_bound_ns(plan) <= simulated_ns(plan, costs, machine)
