"""Steps without a barrier between them: each waits for what it needs of the one before, and for nothing else."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from msgspec.structs import replace

from sim.builders import build
from sim.engine.simulate import simulate
from sim.home import NO_TIES, Ties, tied_layers
from sim.plan import HarmonyPlan, PagedPlan, Policy, UpdateOn
from sim.schedule import Schedule, TaskKind, TensorKind
from sim.timelines.replay import StepTimes, replay_times
from sim.unrolling import split_steps, unroll
from sim.validation.happens_before import HappensBefore
from sim.validation.home import home_faults
from sim.validation.memory import memory_faults
from sim.validation.validate import number_faults, place_faults
from tests.random_plans import Case, random_case
from tests.sim.handmade import Hand, machine, one_gpu_schedule, plan, tiny_trace
from tests.sim.made_timelines import pipeline
from traces.costs import Costs
from traces.synthetic import skewed_trace, uniform_trace, with_tied

SEEDS = range(24)


def unrolled(case: Case, steps: int) -> Schedule:
    return unroll(build(case.plan, case.trace, case.machine), steps, tied_layers(Costs(case.trace)))


def faults(case: Case, schedule: Schedule) -> list[str]:
    surely = HappensBefore(schedule)
    found = [*number_faults(schedule), *place_faults(schedule), *memory_faults(schedule, surely)]
    return found + list(home_faults(schedule, surely, Costs(case.trace)))


def at_random(schedule: Schedule, steps: int, seed: int) -> list[StepTimes]:
    """Steps whose tasks last anything, alike in every step."""
    draw = random.Random(seed)
    lasting = [draw.choice([0, 1, 10, 100]) * draw.randint(0, 9) for _ in range(len(schedule.tasks) // steps)]
    return split_steps(replay_times(schedule, lasting * steps), steps)


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_and_home_tensors_are_safe_at_any_timing(seed: int) -> None:
    case = random_case(seed)
    assert faults(case, unrolled(case, 2)) == []


def test_without_what_steps_wait_for_they_are_not() -> None:
    case = random_case(next(seed for seed in SEEDS if random_case(seed).plan.policy is Policy.HARMONY_PP))
    two = unrolled(case, 2)
    count = len(two.tasks) // 2
    careless = replace(
        two,
        tasks=tuple(
            replace(t, waits_for=tuple(b for b in t.waits_for if b // count == t.id // count)) for t in two.tasks
        ),
    )
    found = faults(case, careless)
    assert any("in the store at the same time" in fault for fault in found)
    assert len(found) > 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_begins_before_the_last_has_ended_but_never_before_the_one_before_that_has(seed: int) -> None:
    case = random_case(seed)
    long = unrolled(case, 4)
    alone = at_random(unrolled(case, 1), 1, seed)[0]
    steps = at_random(long, 4, seed)
    assert steps[0] == alone
    for first, third in zip(steps, steps[2:], strict=False):
        assert min(third.start_ns) >= max(first.end_ns)
    for one, next_one in pairwise(steps):
        assert 0 <= max(next_one.end_ns) - max(one.end_ns) <= alone.duration_ns


def test_ids_of_later_steps_follow_on() -> None:
    three = unroll(one_gpu_schedule(), 3, NO_TIES)
    count, buffers = len(one_gpu_schedule().tasks), len(one_gpu_schedule().buffers)
    assert [task.id for task in three.tasks] == list(range(3 * count))
    assert [buffer.id for buffer in three.buffers] == list(range(3 * buffers))
    assert unroll(one_gpu_schedule(), 1, NO_TIES) == one_gpu_schedule()


def test_weights_come_in_after_their_update_and_gradients_go_home_after_the_last_were_used() -> None:
    step = one_gpu_schedule()
    two = unroll(step, 2, NO_TIES)
    surely, count = HappensBefore(two), len(step.tasks)
    updates = {task.layer_first: task.id for task in step.copies(TaskKind.UPDATE)}
    for task in step.tasks:
        if task.tensor_kind is TensorKind.WEIGHT or (
            task.tensor_kind is TensorKind.GRADIENT and task.kind is TaskKind.SWAP_OUT
        ):
            assert surely(updates[task.layer_first], task.id + count)


def test_who_uses_a_shared_weight_waits_for_its_owner_to_be_updated() -> None:
    """Two GPUs, a layer on each; layer 1 uses a weight of layer 0."""
    hand = Hand(plan=plan(gpus=2))
    w = hand.buffer(TensorKind.WEIGHT, 1, 8, gpu=1, offset=0)
    hand.task(
        TaskKind.SWAP_IN, 1, gpu=1, tensor_kind=TensorKind.WEIGHT, bytes=8, writes=(w,), allocates=(w,), frees=(w,)
    )
    hand.task(TaskKind.UPDATE, 0, gpu=None)
    assert unroll(hand.schedule(), 2, NO_TIES).tasks[2].waits_for == ()
    assert unroll(hand.schedule(), 2, Ties({0: (1,)})).tasks[2].waits_for == (1,)


def lasting(of: Schedule, **ns: int) -> list[int]:
    """Durations by kind of task; 0 for the others."""
    return [ns.get(task.kind.value, 0) for task in of.tasks]


def test_the_period_of_a_step_on_one_gpu_by_hand() -> None:
    """Only computing takes time: 2 samples x (1 + 3 + 2) on the GPU. Updates take 1 each, and the update of layer 1
    runs beside the backward of layer 0; so the step takes 12 and the update of layer 0. Layer 0 comes first in the next
    step, and waits for it: the period is 13. Without updates it is 12."""
    step = one_gpu_schedule()
    forward = lasting(step, forward=1, update=1)
    backwards = [task.id for task in step.copies(TaskKind.BACKWARD)]
    for number in backwards:
        forward[number] = 3 if step.tasks[number].layer_first == 1 else 2
    for updates, period in ((1, 13), (0, 12)):
        durations = [updates if task.kind is TaskKind.UPDATE else forward[task.id] for task in step.tasks]
        ends = [max(each.end_ns) for each in split_steps(replay_times(unroll(step, 3, NO_TIES), durations * 3), 3)]
        assert [later - earlier for earlier, later in pairwise(ends)] == [period, period]


def test_the_update_of_the_last_layers_is_hidden_by_hand() -> None:
    """The update of layer 1 takes 100, of layer 0 nothing: alone, a step waits for it; the next one begins meanwhile,
    and goes on until it needs layer 1, which is all of its own forward of layer 0 (2 x 1)."""
    reordered = _update_first(one_gpu_schedule(), layer=0)
    durations = [
        1 if task.kind is TaskKind.FORWARD else 100 if task.kind is TaskKind.UPDATE and task.layer_first == 1 else 0
        for task in reordered.tasks
    ]
    alone = replay_times(reordered, durations)
    assert alone.duration_ns == 102
    ends = [max(each.end_ns) for each in split_steps(replay_times(unroll(reordered, 3, NO_TIES), durations * 3), 3)]
    assert [later - earlier for earlier, later in pairwise(ends)] == [100, 100]


def _update_first(step: Schedule, layer: int) -> Schedule:
    """The host's updates of other layers after that of this one: their tasks swap ids."""
    one, other = (task.id for task in step.copies(TaskKind.UPDATE))
    first, second = step.tasks[one], step.tasks[other]
    assert (first.layer_first, second.layer_first) == (1, layer)
    tasks = [task for task in step.tasks if task.id != one]
    tasks.append(first)
    places = {task.id: place for place, task in enumerate(tasks)}
    moved = [
        replace(task, id=places[task.id], waits_for=tuple(sorted(places[b] for b in task.waits_for))) for task in tasks
    ]
    return replace(step, tasks=tuple(moved))


def test_a_simulation_has_a_step_alone_and_then_those_that_overlap() -> None:
    trace, two_gpus, schedule = uniform_trace(6), machine(gpus=2), pipeline()
    overlapping = replace(schedule, plan=replace(schedule.plan, overlap_steps=True))
    alone = simulate(schedule, trace, two_gpus, steps=3)
    found = simulate(overlapping, trace, two_gpus)
    assert (found.info.steps, found.info.overlapping, found.info.alone) == (4, 3, range(1))
    assert found.step_time_ns == alone.step_time_ns == alone.period_ns
    starts = found.frame.groupby("step")["start_ns"].min().to_list()
    ends = found.frame.groupby("step")["end_ns"].max().to_list()
    assert starts[1] == ends[0]
    assert starts[2] < ends[1]
    assert found.period_ns == round((ends[3] - ends[1]) / 2) <= found.step_time_ns
    assert found.summary()["throughput_samples_per_s"] == pytest.approx(4e9 / found.period_ns)
    only = simulate(overlapping, trace, two_gpus, steps=1)
    assert (only.info.steps, only.period_ns, only.step_time_ns) == (1, None, found.step_time_ns)


def test_figures_of_steps_that_overlap_are_of_one_step() -> None:
    overlapping = replace(one_gpu_schedule(), plan=plan(overlap_steps=True))
    found, alone = (simulate(each, tiny_trace(), machine()).summary() for each in (overlapping, one_gpu_schedule()))
    for figure in ("swap_in_bytes", "swap_out_bytes", "busy_s", "critical_path", "lower_bound_s", "peak_memory_bytes"):
        assert found[figure] == alone[figure], figure


@pytest.mark.parametrize("update", UpdateOn)
@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP])
def test_plans_that_overlap_hold_the_data_of_two_minibatches(policy: Policy, update: UpdateOn) -> None:
    trace = with_tied(skewed_trace(3, 5), (0, 3), 100_000)
    made = HarmonyPlan(
        policy=policy, minibatch=4, gpus=2, u_fwd=1, u_bwd=2, packs_fwd=((0, 0), (1, 2)),
        packs_bwd=((0, 1), (2, 2), (3, 4)), update=update, overlap_steps=True,
    )  # fmt: skip
    stores = [
        build(replace(made, overlap_steps=overlap), trace, machine(gpus=2)).memory.host_store
        for overlap in (False, True)
    ]
    data = TensorKind.DATA
    assert stores[1] == stores[0] | {data: 2 * stores[0][data]}
    found = simulate(build(made, trace, machine(gpus=2)), trace, machine(gpus=2))
    assert found.period_ns is not None
    assert found.period_ns <= found.step_time_ns


def test_baselines_never_overlap() -> None:
    assert PagedPlan(policy=Policy.DP_SWAP, minibatch=2, gpus=1, u_fwd=1, u_bwd=1).overlap_steps is False
