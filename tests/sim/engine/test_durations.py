"""What every kind of task takes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sim.engine.durations import CostDurations, Demand, Demands, Flow, floor_ns, used_durations
from sim.hardware.fabric import Fabric
from sim.schedule import TaskKind, TensorKind
from tests.sim.handmade import Hand, machine, one_gpu_schedule, plan, tiny_trace
from traces.costs import Costs
from traces.schema import Phase

COSTS = Costs(tiny_trace())
ON = machine(gpus=2, copy_overhead_ns=3)
FABRIC = Fabric(ON)


def demand(kind: TaskKind, layers: int | tuple[int, int] = 0, **fields: object) -> Demand:
    hand = Hand(plan(gpus=2))
    hand.task(kind, layers, **fields)
    return Demands(ON, CostDurations(COSTS, ON, 2), 2).of(hand.tasks[0])


def test_compute_takes_time_and_no_bytes() -> None:
    assert demand(TaskKind.FORWARD, (0, 1), samples=(0, 2)) == Demand(16, ())
    assert demand(TaskKind.BACKWARD, (0, 1), samples=(0, 1)) == Demand(8 + 18, ())
    assert demand(TaskKind.UPDATE, (0, 1), gpu=1) == Demand(12, ())


def test_copies_take_their_route() -> None:

    kind = {"tensor_kind": TensorKind.WEIGHT, "bytes": 50}
    assert demand(TaskKind.SWAP_IN, gpu=1, **kind) == Demand(3, (Flow(FABRIC.swap_in(1), 50),))
    assert demand(TaskKind.SWAP_OUT, gpu=1, **kind) == Demand(3, (Flow(FABRIC.swap_out(1), 50),))
    assert demand(TaskKind.P2P, gpu=1, peer=0, **kind) == Demand(3, (Flow(FABRIC.p2p(1, 0), 50),))


@pytest.mark.parametrize("kind", [TaskKind.ALLREDUCE, TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER])
def test_a_collective_takes_every_edge_of_the_ring(kind: TaskKind) -> None:
    edges = FABRIC.ring(2)
    assert demand(kind, gpu=None, bytes=300) == Demand(3, tuple(Flow(edge, 150) for edge in edges))


def test_the_update_of_a_shard_takes_its_part_of_the_weights() -> None:
    """Layers of 100 and 200 bytes: 7 and 13 grains, of which the first of two GPUs has 4 and 7, 176 bytes in all."""
    whole = demand(TaskKind.UPDATE, (0, 1), gpu=0).delay_ns
    parts = [demand(TaskKind.UPDATE, (0, 1), gpu=gpu, shard=gpu).delay_ns for gpu in (0, 1)]
    assert parts == [round(whole * part / 300) for part in (176, 124)]


def test_the_update_of_a_shard_in_the_host_moves_its_part_of_the_bytes() -> None:
    whole = demand(TaskKind.UPDATE, (0, 1), gpu=None)
    parts = [demand(TaskKind.UPDATE, (0, 1), gpu=None, shard=shard) for shard in (0, 1)]
    assert sum(part.flows[0].bytes for part in parts) == whole.flows[0].bytes
    assert all(part.flows[0].bytes < whole.flows[0].bytes for part in parts)


def test_a_reduction_takes_host_memory() -> None:
    """Two gradients of 200 bytes are read, and one written."""
    assert demand(TaskKind.REDUCE, 1, gpu=None) == Demand(0, (Flow(FABRIC.host_memory(1e12), 600),))


def test_an_update_in_the_host_takes_bytes_of_host_memory_and_core_time() -> None:
    """It lasts 120 ns and moves 5 times 300 bytes; a trace that does not say its threads takes no cores."""
    memory = Flow(FABRIC.host_memory(12.5e9), 1500)
    assert demand(TaskKind.UPDATE, (0, 1), gpu=None) == Demand(0, (memory,))
    hand = Hand()
    hand.task(TaskKind.UPDATE, (0, 1), gpu=None)
    measured = Costs(replace(tiny_trace(), threads=16))  # the machine has 2 cores
    found = Demands(ON, CostDurations(measured, ON, 2), 2).of(hand.tasks[0])
    assert found == Demand(0, (Flow(FABRIC.host_cores(2), 240), memory))


def test_copies_compute_nothing() -> None:
    hand = Hand()
    hand.task(TaskKind.SWAP_IN)
    with pytest.raises(ValueError, match="does not compute"):
        CostDurations(COSTS, ON, 2).compute_ns(hand.tasks[0])


def test_a_copy_without_a_gpu_has_no_route() -> None:
    with pytest.raises(ValueError, match="names no GPU"):
        demand(TaskKind.SWAP_IN, gpu=None)


def test_the_durations_a_schedule_uses() -> None:
    assert used_durations(one_gpu_schedule().tasks) == {
        (Phase.FORWARD, 1),
        (Phase.BACKWARD, 1),
        (Phase.UPDATE_CPU, 0),
    }


def test_whole_nanoseconds_survive_rounding() -> None:
    assert floor_ns(9.999999999999999e-10) == 1
    assert floor_ns(2.99e-9) == 2
