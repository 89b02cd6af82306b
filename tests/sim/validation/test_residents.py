"""Validation of what stays on GPUs from step to step."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sim.builders import build
from sim.plan import HarmonyPlan, Policy, UpdateOn
from sim.schedule import Schedule, Task, TaskKind, TensorKind
from sim.validation.happens_before import HappensBefore
from sim.validation.memory import memory_faults
from sim.validation.residents import resident_faults
from tests.sim.builders.test_closed_forms import machine
from traces.costs import Costs
from traces.schema import Trace
from traces.synthetic import uniform_trace, with_frozen, with_tied

TRACE = uniform_trace(4)


def sound(update: UpdateOn, trace: Trace = TRACE, gpus: int = 2) -> Schedule:
    """Two GPUs (or one), on both of which the weights of both packs stay."""
    plan = HarmonyPlan(
        policy=Policy.HARMONY_DP, minibatch=2, gpus=gpus, u_fwd=1, u_bwd=1, packs_fwd=((0, 1),),
        packs_bwd=((0, 1), (2, 3)), update=update, resident_weights=(0, 1),
        resident_state=(0, 1) if update is UpdateOn.GPU else (),
    )  # fmt: skip
    return build(plan, trace, machine(gpus))


def faults(schedule: Schedule, trace: Trace = TRACE) -> list[str]:
    return list(resident_faults(schedule, HappensBefore(schedule), Costs(trace)))


def changed(schedule: Schedule, of: Task, **fields: Any) -> Schedule:
    return replace(schedule, tasks=tuple(replace(task, **fields) if task is of else task for task in schedule.tasks))


def renewals(schedule: Schedule) -> list[Task]:
    return [task for task in schedule.copies(TaskKind.SWAP_IN) if task.tensor_kind is TensorKind.WEIGHT]


@pytest.mark.parametrize("update", UpdateOn)
@pytest.mark.parametrize("trace", [TRACE, with_tied(TRACE, (0, 3), 100), with_frozen(TRACE, [0, 2])])
def test_what_is_built_leaves_nothing_out_of_date(update: UpdateOn, trace: Trace) -> None:
    assert faults(sound(update, trace), trace) == []


def test_weights_that_the_host_updates_come_in_again_after_that() -> None:
    schedule = sound(UpdateOn.CPU)
    update, *_ = schedule.copies(TaskKind.UPDATE)
    copy = renewals(schedule)[0]
    assert [buffer.gpu for buffer in schedule.residents] == [0, 1, 0, 1]
    resident = schedule.buffers[copy.writes[0]]
    expected = [f"{resident} is out of date after the step: it lacks what {update} changes of layer 2"]
    assert faults(changed(schedule, copy, waits_for=())) == expected
    assert faults(changed(schedule, copy, writes=())) == expected
    assert faults(changed(schedule, copy, layer_first=3)) == expected


def test_weights_that_another_gpu_updates_come_in_again_after_they_went_home() -> None:
    schedule = sound(UpdateOn.GPU)
    copy = renewals(schedule)[0]
    assert len(faults(changed(schedule, copy, waits_for=()))) == 1
    home = next(task for task in schedule.copies(TaskKind.SWAP_OUT) if task.tensor_kind is TensorKind.WEIGHT)
    assert len(faults(changed(schedule, home, tensor_kind=TensorKind.GRADIENT))) == 1


def test_an_update_changes_what_stays_where_it_runs() -> None:
    schedule = sound(UpdateOn.GPU)
    update = next(iter(schedule.copies(TaskKind.UPDATE)))
    own = [schedule.buffers[number] for number in update.writes]
    assert {buffer.kind for buffer in own} == {TensorKind.WEIGHT, TensorKind.OPTIMIZER_STATE}
    assert [text.partition(" is out of date")[0] for text in faults(changed(schedule, update, writes=()))] == [
        str(buffer) for buffer in schedule.residents if buffer in own
    ]


def test_a_tied_weight_comes_in_again_wherever_it_stays() -> None:
    """Layer 3 uses a weight of layer 0, which is updated after layer 3 has been."""
    trace = with_tied(TRACE, (0, 3), 100)
    schedule = sound(UpdateOn.GPU, trace)
    last = max((task for task in renewals(schedule) if task.layer_last == 3), key=lambda task: task.id)
    assert any("it lacks what update 0-1" in text for text in faults(changed(schedule, last, writes=()), trace))


def test_a_copy_for_a_tied_weight_brings_the_others_of_its_layer_as_they_are_now() -> None:
    """On one GPU, layer 2 is updated where it stays; it must go home before it comes in again with the tied weight."""
    trace = with_tied(TRACE, (0, 2), 100)
    schedule = sound(UpdateOn.GPU, trace, gpus=1)
    assert faults(schedule, trace) == []
    home = next(
        t for t in schedule.copies(TaskKind.SWAP_OUT) if t.layer_first == 2 and t.tensor_kind is TensorKind.WEIGHT
    )
    found = faults(changed(schedule, home, tensor_kind=TensorKind.GRADIENT), trace)
    assert any("it lacks what update 2-3" in text for text in found)


def test_nothing_allocates_frees_or_overwrites_what_stays() -> None:
    schedule = sound(UpdateOn.GPU)
    assert list(memory_faults(schedule, HappensBefore(schedule))) == []
    stays, task = schedule.residents[0], schedule.tasks[0]

    def found(broken: Schedule) -> list[str]:
        return list(memory_faults(broken, HappensBefore(broken)))

    assert f"{stays} is there from step to step, and allocated by {task}" in found(
        changed(schedule, task, allocates=(*task.allocates, stays.id))
    )
    number = next(number for each in schedule.tasks if each.gpu == 0 for number in each.allocates)
    buffers = list(schedule.buffers)
    buffers[number] = replace(buffers[number], offset=stays.offset)
    assert any(f"over {stays}, which stays there" in text for text in found(replace(schedule, buffers=tuple(buffers))))


def test_only_state_with_a_place_on_a_gpu_stays() -> None:
    schedule = sound(UpdateOn.CPU)

    def found(**fields: Any) -> list[str]:
        buffers = (replace(schedule.buffers[0], **fields), *schedule.buffers[1:])
        broken = replace(schedule, buffers=buffers)
        return list(memory_faults(broken, HappensBefore(broken)))

    assert any("only weights and optimizer state may" in text for text in found(kind=TensorKind.GRADIENT))
    assert any("has no place on a GPU" in text for text in found(offset=None))
    other = next(buffer for buffer in schedule.residents if buffer.gpu == 0 and buffer.id != 0)
    assert f"{other} and" in "".join(text for text in found(offset=other.offset) if "both stay" in text)
