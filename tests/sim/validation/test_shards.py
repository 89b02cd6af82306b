"""Validation of shards: parts of tensors are not taken for the whole."""

from __future__ import annotations

from typing import Any

import pytest

from sim.builders import build
from sim.plan import Reduce, UpdateOn
from sim.schedule import Lane, TaskKind, TensorKind
from sim.validation.happens_before import HappensBefore
from sim.validation.home import home_faults
from sim.validation.shards import shard_faults
from sim.validation.validate import validate
from sim.validation.work import update_faults
from tests.sim.handmade import Hand, machine, plan, tiny_trace
from traces.costs import Costs

WEIGHT, GRADIENT = TensorKind.WEIGHT, TensorKind.GRADIENT


@pytest.mark.parametrize("update", UpdateOn)
def test_a_scattered_step_is_sound(update: UpdateOn) -> None:
    scattered = plan(gpus=2, reduce=Reduce.SCATTER, update=update)
    validate(build(scattered, tiny_trace(), machine(gpus=2)), tiny_trace())


def faults(kind: TaskKind, *, reads: tuple[Any, ...] = (), writes: tuple[Any, ...] = (), **fields: Any) -> list[str]:
    """Of a task over buffers that are given as (kind, gpu, shard)."""
    hand = Hand(plan(gpus=2))
    ids = [
        tuple(hand.buffer(what, 0, 9, gpu=gpu, shard=shard) for what, gpu, shard in side) for side in (reads, writes)
    ]
    hand.task(kind, reads=ids[0], writes=ids[1], **fields)
    return list(shard_faults(hand.schedule()))


@pytest.mark.parametrize("kind", [TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.UPDATE])
def test_computing_with_a_part_of_the_weights(kind: TaskKind) -> None:
    assert faults(kind, reads=((WEIGHT, 0, None),)) == []
    (fault,) = faults(kind, reads=((WEIGHT, 0, 1),))
    assert fault.endswith("uses buffer 0 (weight 0 shard 1, 9 B on gpu 0), which holds just shard 1 of it")


def test_copying_another_shard_than_is_there() -> None:
    assert faults(TaskKind.SWAP_OUT, reads=((GRADIENT, 1, 1),), gpu=1, shard=1) == []
    assert faults(TaskKind.SWAP_OUT, reads=((WEIGHT, 1, None),), gpu=1, shard=1) == []  # a part of the whole
    assert len(faults(TaskKind.SWAP_OUT, reads=((GRADIENT, 1, 1),), gpu=1, shard=0)) == 1
    assert len(faults(TaskKind.SWAP_OUT, reads=((GRADIENT, 1, 1),), gpu=1)) == 1


def test_collectives_from_shards_to_the_whole_and_back() -> None:
    whole = ((WEIGHT, 0, None), (WEIGHT, 1, None))
    shards = ((WEIGHT, 0, 0), (WEIGHT, 1, 1))
    assert faults(TaskKind.ALL_GATHER, reads=shards, writes=whole, gpu=None) == []
    assert faults(TaskKind.REDUCE_SCATTER, reads=whole, writes=shards, gpu=None) == []
    assert faults(TaskKind.REDUCE_SCATTER, reads=whole + shards[:1], writes=(), gpu=None) != []
    assert len(faults(TaskKind.ALL_GATHER, reads=shards, writes=shards, gpu=None)) == 2
    swapped = ((WEIGHT, 0, 1), (WEIGHT, 1, 0))
    assert len(faults(TaskKind.ALL_GATHER, reads=swapped, writes=whole, gpu=None)) == 2


def test_every_shard_is_updated_once() -> None:
    def found(*shards: int | None) -> list[str]:
        hand = Hand(plan(gpus=2), layers=1)
        for shard in shards:
            hand.task(TaskKind.UPDATE, gpu=shard, shard=shard, lane=Lane.COMPUTE)
        return list(update_faults(hand.schedule(), Costs(tiny_trace())))

    assert found(0, 1) == []
    assert found(0) == ["layer 0 has 100 B to update and is never updated in shard 1"]
    (fault,) = found(0, 1, 1)
    assert fault.startswith("layer 0 is updated 2 times in shard 1: update 0 shard 1 on gpu 1")
    assert len(found(0, 1, None)) == 2  # and as a whole


def test_shards_of_one_tensor_may_go_home_at_the_same_time_and_a_shard_and_the_whole_may_not() -> None:
    def found(*shards: int | None) -> list[str]:
        hand = Hand(plan(gpus=2))
        for gpu, shard in enumerate(shards):
            hand.task(TaskKind.SWAP_OUT, gpu=gpu, tensor_kind=GRADIENT, shard=shard)
        schedule = hand.schedule()
        return list(home_faults(schedule, HappensBefore(schedule), None))

    assert found(0, 1) == []
    assert len(found(1, 1)) == len(found(0, None)) == 1
