"""Validation against a trace: every tensor kind's bytes, of buffers and of copies."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sim.schedule import TaskKind, TensorKind
from sim.validation.byte_counts import byte_faults
from tests.sim.handmade import Hand, one_gpu_schedule, plan, tiny_trace
from traces.costs import Costs

COSTS = Costs(tiny_trace())
ONE = (0, 1)
TWO = (0, 2)


def test_the_hand_made_step_agrees() -> None:
    assert list(byte_faults(one_gpu_schedule(), COSTS)) == []


@pytest.mark.parametrize(
    ("kind", "layers", "samples", "size"),
    [
        (TensorKind.WEIGHT, (0, 1), None, 300),
        (TensorKind.GRADIENT, (1, 1), None, 200),
        (TensorKind.OPTIMIZER_STATE, (0, 0), None, 100),
        (TensorKind.BUFFER, (0, 1), None, 0),
        (TensorKind.DATA, (0, 0), TWO, 20),
        (TensorKind.DATA, (2, 2), TWO, 8),
        (TensorKind.ACTIVATION, (1, 1), ONE, 20),
        (TensorKind.STASH, (1, 1), TWO, 40),
        (TensorKind.ACTIVATION_GRADIENT, (1, 1), TWO, 40),
        (TensorKind.ACTIVATION_GRADIENT, (0, 0), TWO, 0),
    ],
)
def test_bytes_by_kind(kind: TensorKind, layers: tuple[int, int], samples: tuple[int, int] | None, size: int) -> None:
    def found(bytes: int) -> list[str]:
        hand = Hand()
        hand.buffer(kind, layers, bytes, samples=samples)
        for copy in (TaskKind.SWAP_IN, TaskKind.SWAP_OUT):
            hand.task(copy, layers, tensor_kind=kind, bytes=bytes, samples=samples)
        return list(byte_faults(hand.schedule(), COSTS))

    assert found(size) == []
    wrong = found(size + 1)
    assert len(wrong) == 3
    assert all(fault.endswith(f"{size + 1} B, the trace says {size} B") for fault in wrong)


def test_an_all_reduce_is_what_all_gpus_send() -> None:
    def found(bytes: int) -> list[str]:
        hand = Hand(plan(gpus=3, minibatch=3))
        hand.task(TaskKind.ALLREDUCE, (0, 1), gpu=None, tensor_kind=TensorKind.GRADIENT, bytes=bytes)
        return list(byte_faults(hand.schedule(), COSTS))

    assert found(2 * 2 * 300) == []
    assert found(300) == ["allreduce gradient 0-1 on host collective (task 0) copies 300 B, the trace says 1200 B"]


@pytest.mark.parametrize(
    ("kind", "tensor", "sent"),
    [(TaskKind.REDUCE_SCATTER, TensorKind.GRADIENT, 600), (TaskKind.ALL_GATHER, TensorKind.WEIGHT, 600)],
)
def test_half_an_all_reduce_is_half_of_it(kind: TaskKind, tensor: TensorKind, sent: int) -> None:
    def found(bytes: int) -> list[str]:
        hand = Hand(plan(gpus=3, minibatch=3))
        hand.task(kind, (0, 1), gpu=None, tensor_kind=tensor, bytes=bytes)
        return list(byte_faults(hand.schedule(), COSTS))

    assert found(sent) == []
    assert len(found(sent + 1)) == 1


def test_shards_are_counted_in_grains() -> None:
    """Layer 0 has 100 bytes, 7 grains: 4 of them are the first shard, and 3, the last one not full, the second."""

    def found(shard: int, bytes: int) -> list[str]:
        hand = Hand(plan(gpus=2))
        hand.buffer(TensorKind.WEIGHT, 0, bytes, shard=shard)
        hand.task(TaskKind.SWAP_IN, 0, tensor_kind=TensorKind.WEIGHT, bytes=bytes, shard=shard)
        return list(byte_faults(hand.schedule(), COSTS))

    assert found(0, 64) == found(1, 36) == []
    assert [fault.split(" B, ")[-1] for fault in found(0, 50)] == ["the trace says 64 B"] * 2


@pytest.mark.parametrize(("kind", "needed"), [(TaskKind.FORWARD, 35), (TaskKind.BACKWARD, 25 + 30 + 20)])
def test_workspace_is_at_least_the_peak(kind: TaskKind, needed: int) -> None:
    """Forward: x(1) of 20 and 15 in layer 1. Backward: 25 and 30 saved, and 20 more in layer 1."""

    def found(bytes: int) -> list[str]:
        hand = Hand()
        space = hand.buffer(TensorKind.WORKSPACE, (0, 1), bytes, samples=ONE)
        hand.task(kind, (0, 1), samples=ONE, writes=(space,))
        return list(byte_faults(hand.schedule(), COSTS))

    assert found(needed) == found(needed + 9) == []
    (fault,) = found(needed - 1)
    assert fault.endswith(f"has {needed - 1} B of workspace, the trace says {needed} B")


def test_one_wrong_buffer_among_many() -> None:
    schedule = one_gpu_schedule()
    buffers = (replace(schedule.buffers[0], bytes=99), *schedule.buffers[1:])
    assert list(byte_faults(replace(schedule, buffers=buffers), COSTS)) == [
        "buffer 0 (weight 0, 99 B at 0 on gpu 0) has 99 B, the trace says 100 B"
    ]
