"""Validation of what happens to the host store, for every timing."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.plan import Plan
from sim.schedule import Schedule, TaskKind, TensorKind
from sim.validation.happens_before import HappensBefore
from sim.validation.home import home_faults
from tests.sim.handmade import Hand, one_gpu_schedule, paged, plan, tiny_trace
from traces.costs import Costs

SOUND = one_gpu_schedule()
WEIGHT, GRADIENT, STATE = TensorKind.WEIGHT, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE


def faults(schedule: Schedule) -> list[str]:
    return list(home_faults(schedule, HappensBefore(schedule), Costs(tiny_trace())))


def changed(number: int, **fields: Any) -> Schedule:
    tasks = list(SOUND.tasks)
    tasks[number] = replace(tasks[number], **fields)
    return replace(SOUND, tasks=tuple(tasks))


def test_the_hand_made_step_keeps_the_store_in_order() -> None:
    assert faults(SOUND) == []


def test_an_update_before_its_gradient_is_home() -> None:
    """It waits for the backward, not for the copy of what the backward made."""
    assert faults(changed(17, waits_for=(14,))) == [
        f"{SOUND.tasks[16]} and {SOUND.tasks[17]} may touch gradient 1 in the store at the same time, "
        "and one of them writes it"
    ]


def test_an_update_of_weights_that_are_still_read() -> None:
    found = faults(changed(26, waits_for=()))
    assert f"{SOUND.tasks[18]} and {SOUND.tasks[26]} may touch weight 0 in the store" in found[0]


def test_a_gradient_that_never_comes_home() -> None:
    assert faults(changed(25, tensor_kind=STATE))[-1] == (
        f"{SOUND.tasks[26]} takes gradient 0 from the store before anything has written it there"
    )


def test_layers_of_one_pack_share_a_sentence() -> None:
    hand = Hand()
    hand.task(TaskKind.SWAP_OUT, (0, 1), tensor_kind=GRADIENT)
    hand.task(TaskKind.UPDATE, (0, 1), gpu=None)
    assert len(faults(hand.schedule())) == 1


def test_copies_through_host_buffers_do_not_touch_the_store() -> None:
    hand = Hand()
    replica = hand.buffer(GRADIENT, 0, 8, gpu=None)
    hand.task(TaskKind.SWAP_OUT, tensor_kind=GRADIENT, writes=(replica,))
    hand.task(TaskKind.REDUCE, gpu=None, tensor_kind=GRADIENT, reads=(replica,))
    hand.task(TaskKind.SWAP_IN, tensor_kind=GRADIENT, reads=(replica,))
    assert faults(hand.schedule()) == []


@pytest.mark.parametrize(("of", "number"), [(plan(gpus=2), 1), (paged(gpus=2), 0)])
def test_a_store_is_shared_or_each_gpus_own(of: Plan, number: int) -> None:
    """GPU 0 writes weights back while GPU 1 reads the same layer's."""
    hand = Hand(of)
    hand.task(TaskKind.SWAP_OUT, gpu=0, tensor_kind=WEIGHT)
    hand.task(TaskKind.SWAP_IN, gpu=1, tensor_kind=WEIGHT)
    assert len(faults(hand.schedule())) == number


def test_reduced_gradients_may_be_taken_afterwards() -> None:
    def schedule(waits: tuple[int, ...]) -> Schedule:
        hand = Hand(plan(gpus=2))
        hand.task(TaskKind.REDUCE, gpu=None, tensor_kind=GRADIENT)
        hand.task(TaskKind.SWAP_IN, tensor_kind=GRADIENT, waits_for=waits)
        hand.task(TaskKind.SWAP_IN, gpu=1, tensor_kind=GRADIENT, waits_for=waits)
        return hand.schedule()

    assert faults(schedule((0,))) == []
    assert len(faults(schedule(()))) == 2
