"""Backwards in two parts: the same bytes move; what they hold, how long they take, and what is said of damage."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from sim.builders import build, build_from_costs
from sim.engine.durations import CostDurations
from sim.engine.simulate import simulate
from sim.errors import DoesNotFit, ScheduleError
from sim.hardware.machine import Gpu, Host, Machine
from sim.plan import HarmonyPlan, Policy, Reduce, UpdateOn
from sim.schedule import Schedule, TaskKind, TensorKind
from sim.timelines.critical_path import Cause
from sim.validation.validate import validate
from tests.sim.closed_forms import closed_forms, moved
from traces.costs import Costs
from traces.synthetic import skewed_trace, uniform_trace, with_tied

FORWARD, BACKWARD = ((0, 0), (1, 2), (3, 4)), ((0, 1), (2, 4), (5, 6))
TRACE = skewed_trace(1, 7)
PARTS = TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT


def machine(gpus: int = 2, memory_bytes: int = 10**12) -> Machine:
    gpu = Gpu(name="0", memory_bytes=memory_bytes, bandwidth=1e9)
    host = Host(memory_bytes=None, dram_bandwidth=1e10, cores=2)
    return Machine(name="roomy", host=host, gpus=(gpu,)).with_gpus(gpus)


def plan(apart: int, **fields: Any) -> HarmonyPlan:
    defaults: dict[str, Any] = {
        "policy": Policy.HARMONY_PP,
        "minibatch": 8,
        "gpus": 2,
        "u_fwd": 3,
        "u_bwd": 3,
        "packs_fwd": FORWARD,
        "packs_bwd": BACKWARD,
    }
    return HarmonyPlan(split_backward=apart, **{**defaults, **fields})


def schedule(apart: int = 2, **fields: Any) -> Schedule:
    return build(plan(apart, **fields), TRACE, machine(fields.get("gpus", 2)))


@pytest.mark.parametrize("apart", [1, 2, 3])
@pytest.mark.parametrize("gpus", [2, 3])
@pytest.mark.parametrize("update", UpdateOn)
@pytest.mark.parametrize("sizes", [(3, 3), (4, 2)])
def test_they_move_what_whole_ones_move(apart: int, gpus: int, update: UpdateOn, sizes: tuple[int, int]) -> None:
    split = schedule(apart, gpus=gpus, update=update, u_fwd=sizes[0], u_bwd=sizes[1])
    validate(split, TRACE)
    assert moved(split) == closed_forms(split.plan, Costs(TRACE))


def test_each_part_sees_every_sample_of_split_packs_once() -> None:
    split = schedule()
    for kind in PARTS:
        seen = Counter((task.layer_first, task.layer_last, task.samples) for task in split.copies(kind))
        assert seen == {(*pack, s): 1 for pack in BACKWARD[1:] for s in ((0, 3), (3, 6), (6, 8))}
    assert {(task.layer_first, task.layer_last) for task in split.copies(TaskKind.BACKWARD)} == {BACKWARD[0]}


@pytest.mark.parametrize("apart", [1, 2, 3])
def test_no_more_first_parts_than_planned_wait_for_their_second(apart: int) -> None:
    waiting: Counter[int | None] = Counter()
    most = 0
    for task in schedule(apart).copies(*PARTS):
        waiting[task.gpu] += 1 if task.kind is TaskKind.BACKWARD_INPUT else -1
        most = max(most, *waiting.values())
    assert most == apart
    assert not any(waiting.values())


def test_what_autograd_holds_stays_from_the_first_part_to_the_second() -> None:
    split, costs = schedule(), Costs(TRACE)
    first_parts = {(task.layer_first, task.samples): task for task in split.copies(TaskKind.BACKWARD_INPUT)}
    for task in split.copies(TaskKind.BACKWARD_WEIGHT):
        first, u = first_parts[task.layer_first, task.samples], task.batch_size
        held = [number for number in task.reads if split.buffers[number].kind is TensorKind.WORKSPACE]
        sizes = [split.buffers[number].bytes for number in held]
        assert sizes == [costs.held_bytes(task.layer_first, task.layer_last, u)]
        assert set(held) <= set(first.allocates) & set(task.frees)
        assert set(first.reads) <= set(task.reads)
        own = [split.buffers[n].bytes for n in task.allocates if split.buffers[n].kind is TensorKind.WORKSPACE]
        assert own == [costs.parts_workspace_bytes(task.layer_first, task.layer_last, u)]


def test_their_times_are_forward_and_first_part_and_second_part() -> None:
    costs = Costs(TRACE)
    durations = CostDurations(costs, machine(), 1)
    for task in schedule().copies(*PARTS):
        at = task.layer_first, task.layer_last, task.batch_size
        if task.kind is TaskKind.BACKWARD_INPUT:
            assert durations.compute_ns(task) == costs.forward_ns(*at) + costs.backward_input_ns(*at)
        else:
            assert durations.compute_ns(task) == costs.backward_weight_ns(*at)


def test_a_pipeline_whose_gpus_wait_ends_earlier_by_the_second_part_of_a_microbatch() -> None:
    """Of equal packs on free links, the two between the loss and the data hand on half a backward earlier each."""
    trace = uniform_trace(4, weight_bytes=1, sample_bytes=1, fixed_ns=0, sample_ns=1_000_000)
    packs = tuple((at, at) for at in range(4))
    fast = replace(machine(4), gpus=tuple(replace(gpu, bandwidth=1e15) for gpu in machine(4).gpus))
    fields = {"gpus": 4, "u_fwd": 1, "u_bwd": 1, "minibatch": 4, "packs_fwd": packs[:3], "packs_bwd": packs}

    def time_ns(apart: int) -> int:
        return simulate(build(plan(apart, **fields), trace, fast), trace, fast).step_time_ns

    whole, split = time_ns(0), time_ns(1)
    assert whole - split == pytest.approx(2 * 1_000_000, abs=1000)


def test_the_critical_path_knows_their_recompute() -> None:
    split = schedule(gpus=2)
    shares = simulate(split, TRACE, machine()).summary()["critical_path"]
    assert shares[Cause.COMPUTE.value] > 0
    assert shares[Cause.RECOMPUTE.value] > 0


def test_what_must_be_held_may_not_fit() -> None:
    needed = {apart: max(schedule(apart).memory.gpu_peak_bytes) for apart in (0, 3)}
    assert needed[0] < needed[3]
    small = machine(memory_bytes=needed[0])
    with pytest.raises(DoesNotFit):
        build(plan(3, prefetch=False), TRACE, small)


def test_data_parallel_and_one_gpu_have_nothing_to_hand_on() -> None:
    for fields in ({"policy": Policy.HARMONY_DP, "reduce": Reduce.HOST}, {"gpus": 1}):
        assert not list(schedule(2, **fields).copies(*PARTS))


@pytest.mark.parametrize("update", UpdateOn)
@pytest.mark.parametrize("apart", [1, 3])
def test_tied_weights_are_updated_after_the_second_parts_of_all_their_users(update: UpdateOn, apart: int) -> None:
    """The first pack's backward ends before the last second part of the last pack, on another GPU."""
    trace = with_tied(TRACE, (0, 5), 100_000)
    for gpus in (2, 3):
        split = build(plan(apart, gpus=gpus, update=update), trace, machine(gpus))
        validate(split, trace)
        updated = next(task.id for task in split.copies(TaskKind.UPDATE) if task.layer_first == 0)
        users = [t.id for t in split.copies(TaskKind.BACKWARD_WEIGHT) if t.layer_first <= 5 <= t.layer_last]
        assert max(users) < updated


def test_packs_without_weights_have_one_part() -> None:
    trace = replace(
        TRACE, layers=tuple(replace(x, gradient_bytes=0) if 2 <= at <= 4 else x for at, x in enumerate(TRACE.layers))
    )
    split = build_from_costs(plan(2), Costs(trace), machine())
    assert {(task.layer_first, task.layer_last) for task in split.copies(*PARTS)} == {(5, 6)}


# ---------------------------------------------------------------------------------------------------------- faults


def faults(schedule: Schedule) -> tuple[str, ...]:
    with pytest.raises(ScheduleError) as refused:
        validate(schedule, TRACE)
    return refused.value.faults


def changed(schedule: Schedule, first_of: TaskKind, /, **fields: Any) -> Schedule:
    """With the first task of a kind changed."""
    number = next(schedule.copies(first_of)).id
    tasks = tuple(replace(task, **fields) if task.id == number else task for task in schedule.tasks)
    return replace(schedule, tasks=tasks)


def test_a_second_part_too_few_or_too_many_is_named() -> None:
    split = schedule()
    other = next(split.copies(TaskKind.BACKWARD_WEIGHT))
    missing = faults(changed(split, TaskKind.BACKWARD_WEIGHT, kind=TaskKind.BACKWARD_INPUT))
    assert any("samples 0-2 never pass backward_weight" in fault for fault in missing)
    assert any("samples 0-2 pass backward_input twice" in fault for fault in missing)
    stray = faults(changed(split, TaskKind.BACKWARD_WEIGHT, samples=(3, 6)))
    assert any("pass backward_weight twice" in fault for fault in stray)
    assert any(f"backward_weight {other.layer_first}-{other.layer_last}" in fault for fault in stray)


def test_a_second_part_without_what_was_held_is_named() -> None:
    split = schedule()
    task = next(split.copies(TaskKind.BACKWARD_WEIGHT))
    kept = tuple(number for number in task.reads if split.buffers[number].kind is not TensorKind.WORKSPACE)
    assert any("reads workspace []; it needs what" in fault for fault in faults(changed(split, task.kind, reads=kept)))


def test_a_second_part_elsewhere_than_its_first_is_named() -> None:
    task = next(schedule().copies(TaskKind.BACKWARD_WEIGHT))
    moved_away = changed(schedule(), task.kind, gpu=1 - (task.gpu or 0))
    assert any("has no first part on its gpu, of its layers and samples" in fault for fault in faults(moved_away))


def test_too_small_a_workspace_is_named() -> None:
    split = schedule()
    number = next(
        n for n in next(split.copies(TaskKind.BACKWARD_WEIGHT)).frees if split.buffers[n].kind.value == "workspace"
    )
    buffers = tuple(replace(each, bytes=each.bytes - 1) if each.id == number else each for each in split.buffers)
    assert any("B of workspace, the trace says" in fault for fault in faults(replace(split, buffers=buffers)))
