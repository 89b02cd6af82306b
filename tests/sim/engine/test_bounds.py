"""The lower bound: its parts in closed form, and never above a simulation."""

from __future__ import annotations

import pytest

from sim.builders import build
from sim.engine.bounds import bound_ns, longest_path_ns, lower_bound_ns, resource_ns
from sim.engine.durations import CostDurations, Demands
from sim.engine.simulate import run_step, simulate
from sim.hardware.machine import Gpu, Host, Link, Machine
from sim.schedule import TaskKind, TensorKind
from tests.random_plans import random_case
from tests.sim.handmade import Hand, machine, one_gpu_schedule, plan, tiny_trace
from traces.costs import Costs


def demands(on: Machine, gpus: int = 1) -> Demands:
    return Demands(on, CostDurations(Costs(tiny_trace()), on, gpus), gpus)


def test_nothing_shared_so_the_chain_decides() -> None:
    """The hand-made step: 744 ns is the chain, as only one copy at a time goes in and one out.

    Through host memory go 908 bytes of copies and 1500 of updates, at 1000 bytes/ns.
    """
    schedule = one_gpu_schedule()
    assert longest_path_ns(schedule, demands(machine())) == 744
    assert resource_ns(schedule, demands(machine())) == {"dram": 2, "cores": 0, "gpu0 down": 528, "gpu0 up": 380}
    assert lower_bound_ns(schedule, Costs(tiny_trace()), machine()) == 744


def test_a_shared_link_decides() -> None:
    """Four GPUs bring in 100 bytes each over one link of 1 byte/ns; alone each would take 100 ns."""
    hand = Hand(plan(gpus=4, minibatch=4))
    for gpu in range(4):
        hand.task(TaskKind.SWAP_IN, gpu=gpu, tensor_kind=TensorKind.WEIGHT, bytes=100)
    shared = Machine(
        name="shared",
        host=Host(memory_bytes=None, dram_bandwidth=1e12, cores=1),
        links=(Link(name="root", bandwidth=1e9),),
        gpus=tuple(Gpu(name=str(i), memory_bytes=1, bandwidth=1e9, link="root") for i in range(4)),
    )
    schedule = hand.schedule()
    assert longest_path_ns(schedule, demands(shared, 4)) == 100
    assert resource_ns(schedule, demands(shared, 4))["root down"] == 400
    assert bound_ns(schedule, demands(shared, 4)) == 400


def test_host_memory_counts_twice_for_a_copy_through_it() -> None:
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.P2P, peer=1, tensor_kind=TensorKind.ACTIVATION, bytes=100)
    through_host = machine(gpus=2, dram=1e9, p2p=False)
    assert resource_ns(hand.schedule(), demands(through_host, 2))["dram"] == 200
    assert bound_ns(hand.schedule(), demands(through_host, 2)) == 200


@pytest.mark.parametrize("seed", range(12))
def test_no_simulation_takes_less(seed: int) -> None:
    case = random_case(seed)
    schedule = build(case.plan, case.trace, case.machine)
    costs = Costs(case.trace, extrapolate=True)
    on = case.machine
    of = Demands(on, CostDurations(costs, on, schedule.plan.gpus), schedule.plan.gpus)
    bound = lower_bound_ns(schedule, costs, on)
    assert 0 < bound <= run_step(schedule, of).duration_ns


def test_the_timeline_carries_it() -> None:
    case = random_case(3)
    schedule = build(case.plan, case.trace, case.machine)
    timeline = simulate(schedule, case.trace, case.machine)
    assert timeline.info.lower_bound_ns == lower_bound_ns(schedule, Costs(case.trace), case.machine)
