"""Validation: sound schedules pass; each kind of damage is named, with its tasks, and all of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from sim.builders import build
from sim.errors import ScheduleError
from sim.plan import Policy
from sim.schedule import Lane, Schedule, Task, TaskKind, TensorKind
from sim.validation.validate import validate
from tests.random_plans import random_case
from tests.sim.handmade import Hand, one_gpu_schedule, paged, plan, tiny_trace
from traces.schema import Trace
from traces.synthetic import uniform_trace, with_frozen

SOUND = one_gpu_schedule()


def faults(schedule: Schedule, *, with_trace: bool = False) -> tuple[str, ...]:
    """What validation says; nothing for a sound schedule."""
    try:
        validate(schedule, tiny_trace() if with_trace else None)
    except ScheduleError as error:
        return error.faults
    return ()


def changed(number: int, **fields: Any) -> Schedule:
    """The hand-made step with one task changed."""
    tasks = list(SOUND.tasks)
    tasks[number] = replace(tasks[number], **fields)
    return replace(SOUND, tasks=tuple(tasks))


def without(number: int) -> Schedule:
    """The hand-made step with one task gone; the others keep their order, and wait for what is left."""
    kept = [task for task in SOUND.tasks if task.id != number]
    ids = {task.id: place for place, task in enumerate(kept)}

    def renumbered(task: Task) -> Task:
        waits = tuple(ids[other] for other in task.waits_for if other in ids)
        return replace(task, id=ids[task.id], waits_for=waits)

    return replace(SOUND, tasks=tuple(map(renumbered, kept)))


def with_buffer(number: int, **fields: Any) -> Schedule:
    buffers = list(SOUND.buffers)
    buffers[number] = replace(buffers[number], **fields)
    return replace(SOUND, buffers=tuple(buffers))


def with_memory(**fields: Any) -> Schedule:
    return replace(SOUND, memory=replace(SOUND.memory, **fields))


def test_the_hand_made_step_is_sound() -> None:
    assert faults(SOUND) == faults(SOUND, with_trace=True) == ()


@pytest.mark.parametrize("seed", range(40))
def test_what_builders_make_is_sound(seed: int) -> None:
    case = random_case(seed)
    validate(build(case.plan, case.trace, case.machine), case.trace)


def expect(schedule: Schedule, *said: str, with_trace: bool = False) -> None:
    """Just these faults; each text is a part of one."""
    found = faults(schedule, with_trace=with_trace)
    assert len(found) == len(said), found
    for part, fault in zip(said, found, strict=True):
        assert part in fault


# 1. Numbers.

FORWARD_0 = "forward 0 m0 on gpu 0 compute (task 2)"
FORWARD_1 = "forward 0 m1 on gpu 0 compute (task 5)"


def test_ids_are_places() -> None:
    expect(changed(26, id=27), "update 0 on host update (task 27) is number 26 of the tasks")
    expect(with_buffer(3, id=4), "buffer 4 is number 3 of the buffers")


def test_references_must_exist() -> None:
    expect(changed(2, waits_for=(0, 1, 99)), f"{FORWARD_0} waits for task 99, which does not exist")
    expect(changed(2, waits_for=(-1, 0, 1)), "waits for task -1, which does not exist")
    expect(changed(2, reads=(0, 1, 99)), f"{FORWARD_0} reads buffer 99, which does not exist")
    expect(changed(2, frees=(1, 3, -2)), f"{FORWARD_0} frees buffer -2, which does not exist")


def test_a_cycle_is_named() -> None:
    """The first forward waits for its own output to have left."""
    expect(
        changed(2, waits_for=(0, 1, 3)),
        f"{FORWARD_0} waits for swap_out activation 1 m0 on gpu 0 swap_out (task 3), which does not come before it",
    )
    expect(changed(2, waits_for=(0, 1, 2)), f"{FORWARD_0} waits for {FORWARD_0}, which does not come before it")


# 2. Places.


@pytest.mark.parametrize(
    ("number", "fields", "said"),
    [
        (0, {"gpu": 1}, "names gpu 1; the plan has gpus 0-0"),
        (0, {"lane": Lane.SWAP_OUT}, "is in the wrong lane; it belongs in swap_in"),
        (17, {"lane": Lane.COMPUTE}, "is in the wrong lane; it belongs in update"),
        (0, {"gpu": None}, "names no gpu"),
        (0, {"peer": 0}, "has gpu 0 and peer 0; a P2P copy, and nothing else, names two different gpus"),
        (17, {"layer_first": 2}, "is of layers 2-1; the model has layers 0-1"),
        (17, {"layer_last": 2}, "is of layers 1-2; the model has layers 0-1"),
        (9, {"samples": (0, 3)}, "is of samples (0, 3); the minibatch has [0, 2)"),
        (9, {"samples": (1, 1)}, "is of samples (1, 1)"),
        (0, {"tensor_kind": None}, "copies, and does not say what kind of tensor"),
        (0, {"bytes": -1}, "has -1 bytes"),
        (17, {"bytes": 5}, "has 5 bytes; copies have them"),
    ],
)
def test_places(number: int, fields: dict[str, Any], said: str) -> None:
    expect(changed(number, **fields), said)


def test_places_of_buffers_and_plan() -> None:
    expect(with_buffer(0, gpu=1), "buffer 0 is on gpu 1; the plan has gpus 0-0")
    expect(with_buffer(0, layer_last=3), "buffer 0 is of layers 0-3 of 2")
    expect(with_buffer(0, bytes=-1), "buffer 0 has -1 B at 0; neither may be negative")
    expect(with_buffer(0, offset=-1), "buffer 0 has 100 B at -1; neither may be negative")
    expect(with_memory(gpu_cap_bytes=(1, 2)), "memory.gpu_cap_bytes is for 2 GPUs, the plan for 1")


def test_reductions_belong_to_no_gpu_and_p2p_to_two() -> None:
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.REDUCE, gpu=1, tensor_kind=TensorKind.GRADIENT)
    hand.task(TaskKind.P2P, gpu=1, tensor_kind=TensorKind.ACTIVATION)
    hand.task(TaskKind.FORWARD)
    found = faults(hand.schedule())
    assert any("reduce gradient 0 on gpu 1 update (task 0) names a gpu" in fault for fault in found)
    assert any("has gpu 1 and peer None" in fault for fault in found)
    assert any("forward 0 on gpu 0 compute (task 2) names no samples" in fault for fault in found)


# 3. Work.


def of_kind(found: Iterable[str], part: str) -> list[str]:
    return [fault for fault in found if part in fault]


def test_samples_left_out() -> None:
    assert of_kind(faults(without(5)), "never pass") == ["layers 0: sample 1 never pass forward"]
    assert of_kind(faults(without(10)), "never pass") == ["layers 1: sample 0 never pass backward"]


def test_samples_twice() -> None:
    twice = of_kind(faults(changed(5, samples=(0, 2))), "twice")
    assert twice == [f"layers 0: sample 0 pass forward twice, in {FORWARD_0} and in {FORWARD_1}"]


def test_layers_of_a_pack_share_a_sentence() -> None:
    hand = Hand(plan(packs_fwd=((0, 2),), packs_bwd=((0, 2), (3, 4))), layers=5)
    for kind, layers in ((TaskKind.FORWARD, (0, 2)), (TaskKind.BACKWARD, (3, 4)), (TaskKind.BACKWARD, (0, 2))):
        hand.task(kind, layers, samples=(0, 1), waits_for=tuple(range(len(hand.tasks))))
    assert faults(hand.schedule(gpu_peak=0, host_peak=0)) == (
        "layers 0-2: sample 1 never pass forward",
        "layers 0-2: sample 1 never pass backward",
        "layers 3-4: sample 1 never pass backward",
    )


def test_fused_layers_have_no_forward_of_their_own() -> None:
    extra = of_kind(faults(changed(5, layer_first=1, layer_last=1)), "one too many")
    assert extra == [
        "forward 1 m1 on gpu 0 compute (task 5) is one too many: layers 1 pass forward inside their backward"
    ]


def test_paged_plans_have_a_forward_for_every_layer() -> None:
    hand = Hand(paged(minibatch=1), layers=1)
    hand.task(TaskKind.BACKWARD, samples=(0, 1))
    assert faults(hand.schedule(gpu_peak=0, host_peak=0)) == ("layers 0: sample 0 never pass forward",)


def test_updates_left_out_count_only_with_a_trace() -> None:
    assert faults(without(26)) == ()
    expect(without(26), "layer 0 has 100 B to update and is never updated", with_trace=True)


def test_updates_twice() -> None:
    expect(
        changed(26, layer_last=1),
        "layer 1 is updated 2 times: update 1 on host update (task 17) and update 0-1 on host update (task 26)",
    )


def test_dp_swap_updates_every_gpus_own_copy() -> None:
    hand = Hand(paged(gpus=2), layers=1)
    for gpu in (0, 1):
        hand.task(TaskKind.FORWARD, gpu=gpu, samples=(gpu, gpu + 1))
        hand.task(TaskKind.BACKWARD, gpu=gpu, samples=(gpu, gpu + 1))
    done = (1, 3)
    hand.task(TaskKind.UPDATE, gpu=0, waits_for=done)
    hand.task(TaskKind.UPDATE, gpu=1, waits_for=done)
    schedule = hand.schedule(gpu_peak=0, host_peak=0)
    assert faults(schedule) == ()
    again = replace(schedule.tasks[5], gpu=0)
    expect(replace(schedule, tasks=(*schedule.tasks[:5], again)), "layer 0 is updated 2 times on gpu 0")


def test_frozen_layers_need_no_update() -> None:
    hand = Hand(plan(minibatch=1, packs_fwd=((0, 1),), packs_bwd=((0, 1), (2, 2))), layers=3)
    hand.task(TaskKind.FORWARD, (0, 1), samples=(0, 1))
    hand.task(TaskKind.BACKWARD, 2, samples=(0, 1))
    hand.task(TaskKind.BACKWARD, (0, 1), samples=(0, 1))
    schedule = replace(hand.schedule(gpu_peak=0, host_peak=0), model="uniform-3")

    def never_updated(trace: Trace) -> list[str]:
        with pytest.raises(ScheduleError) as caught:
            validate(schedule, trace)
        return of_kind(caught.value.faults, "never updated")

    trace = uniform_trace(3, weight_bytes=8)
    assert never_updated(trace) == [f"layer {layer} has 8 B to update and is never updated" for layer in (0, 1)]
    assert never_updated(with_frozen(trace, [1])) == ["layer 0 has 8 B to update and is never updated"]


def test_a_backward_waits_for_every_forward_of_its_samples() -> None:
    """The forward takes samples 0 and 1 at once; the backward of sample 1 alone is on another GPU."""
    hand = Hand(paged(gpus=2), layers=1)
    hand.task(TaskKind.FORWARD, gpu=0, samples=(0, 2))
    hand.task(TaskKind.BACKWARD, gpu=0, samples=(0, 1))
    hand.task(TaskKind.BACKWARD, gpu=1, samples=(1, 2))
    assert faults(hand.schedule(gpu_peak=0, host_peak=0)) == (
        "backward 0 on gpu 1 compute (task 2) may start before forward 0 on gpu 0 compute (task 0) has ended",
    )


def test_work_in_the_wrong_order() -> None:
    hand = Hand(plan(gpus=2, minibatch=1, policy=Policy.HARMONY_PP))
    hand.task(TaskKind.FORWARD, 0, gpu=0, samples=(0, 1))
    hand.task(TaskKind.BACKWARD, 1, gpu=1, samples=(0, 1))
    hand.task(TaskKind.BACKWARD, 0, gpu=0, samples=(0, 1))
    hand.task(TaskKind.UPDATE, (0, 1), gpu=None)
    assert faults(hand.schedule(gpu_peak=0, host_peak=0)) == (
        "backward 1 on gpu 1 compute (task 1) may start before forward 0 on gpu 0 compute (task 0) has ended",
        "backward 0 on gpu 0 compute (task 2) may start before backward 1 on gpu 1 compute (task 1) has ended",
        "update 0-1 on host update (task 3) may start before backward 1 on gpu 1 compute (task 1) has ended",
        "update 0-1 on host update (task 3) may start before backward 0 on gpu 0 compute (task 2) has ended",
    )


def test_layers_in_the_wrong_order() -> None:
    hand = Hand(paged(minibatch=1), layers=2)
    for kind, layer in (
        (TaskKind.FORWARD, 1),
        (TaskKind.FORWARD, 0),
        (TaskKind.BACKWARD, 0),
        (TaskKind.BACKWARD, 1),
    ):
        hand.task(kind, layer, samples=(0, 1))
    assert faults(hand.schedule(gpu_peak=0, host_peak=0)) == (
        "forward 1 on gpu 0 compute (task 0) may start before forward 0 on gpu 0 compute (task 1) has ended",
        "backward 0 on gpu 0 compute (task 2) may start before backward 1 on gpu 0 compute (task 3) has ended",
    )


# All at once.


def test_all_faults_are_found_at_once() -> None:
    broken = replace(changed(17, layer_first=0, layer_last=0), memory=replace(SOUND.memory, host_peak_bytes=1000))
    expect(
        broken,
        "layer 0 is updated 2 times",
        "layer 1 has 200 B to update and is never updated",
        "update 0 on host update (task 17) may start before backward 0 m0",
        "update 0 on host update (task 17) may start before backward 0 m1",
        "the planned peak of the host is 1000 B",
        "update 0 on host update (task 17) and swap_in weight 0 on gpu 0 swap_in (task 18) may touch weight 0",
        "update 0 on host update (task 17) and swap_out gradient 0 on gpu 0 swap_out (task 25) may touch gradient 0",
        "update 0 on host update (task 17) takes gradient 0 from the store before anything has written it there",
        with_trace=True,
    )


def test_wrong_places_do_not_hide_missing_work() -> None:
    found = faults(replace(without(5), memory=replace(SOUND.memory, gpu_cap_bytes=())))
    assert any("never pass forward" in fault for fault in found)
    assert any("gpu_cap_bytes" in fault for fault in found)


def test_another_models_trace() -> None:
    with pytest.raises(ScheduleError, match="the schedule is of tiny with 2 layers, the trace of uniform-3 with 3"):
        validate(SOUND, uniform_trace(3))


@pytest.mark.parametrize(
    ("number", "waits"),
    [(2, (0,)), (3, ()), (8, ()), (10, (7, 8)), (11, ()), (12, ()), (17, (14,)), (20, (3,)), (24, (18, 22)), (26, ())],
)
def test_the_hand_made_step_needs_its_dependencies(number: int, waits: tuple[int, ...]) -> None:
    assert set(waits) <= set(SOUND.tasks[number].waits_for) or number == 17
    assert faults(changed(number, waits_for=waits))
