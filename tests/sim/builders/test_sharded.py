"""zero3-offload: what is gathered, reduced and added where, in closed form, step by step and within memory."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.builders import build_from_costs
from sim.builders.sharded import Turn, turns
from sim.engine.durations import CostDurations, Demands
from sim.engine.simulate import run_step
from sim.errors import DoesNotFit, PlanError
from sim.hardware.machine import Gpu, Host, Machine
from sim.plan import Policy, ShardedPlan
from sim.schedule import Lane, Schedule, Task, TaskKind, TensorKind
from sim.shards import Shards
from sim.validation.validate import validate
from sim.views.grid import grid
from tests.sim.closed_forms import closed_forms, moved
from tests.strategies import linear_traces
from traces.costs import Costs
from traces.schema import Trace
from traces.synthetic import skewed_trace, uniform_trace

ROOMY = 10**12


def sharded(gpus: int, u: int, minibatch: int = 8, depth: int = 0) -> ShardedPlan:
    return ShardedPlan(
        policy=Policy.ZERO3_OFFLOAD, minibatch=minibatch, gpus=gpus, u_fwd=u, u_bwd=u, prefetch_depth=depth
    )


def machine(gpus: int, memory_bytes: int = ROOMY) -> Machine:
    gpu = Gpu(name="0", memory_bytes=memory_bytes, bandwidth=1e9)
    return Machine(name="any", host=Host(memory_bytes=None, dram_bandwidth=1e10, cores=2), gpus=(gpu,)).with_gpus(gpus)


def built(plan: ShardedPlan, costs: Costs, memory_bytes: int = ROOMY) -> Schedule:
    return build_from_costs(plan, costs, machine(plan.gpus, memory_bytes))


def costs_of(seed: int) -> Costs:
    """Five layers, some with buffers; the forward of one changes them."""
    trace = skewed_trace(seed, 5)
    layers = tuple(
        replace(layer, buffer_bytes=30_000, changes_buffers=True) if index == 1 else layer
        for index, layer in enumerate(trace.layers)
    )
    return Costs(replace(trace, layers=layers))


@pytest.mark.parametrize(("gpus", "u", "depth"), list(product((1, 2, 3), (1, 2, 3, 8), (0, 1, 16))))
def test_a_step_moves_what_the_closed_forms_say(gpus: int, u: int, depth: int) -> None:
    costs, plan = costs_of(3), sharded(gpus, u, depth=depth)
    schedule = built(plan, costs)
    assert moved(schedule) == closed_forms(plan, costs)
    validate(schedule, costs.trace)


def test_every_gpu_moves_its_shard() -> None:
    """Eight samples over three GPUs one by one: three rounds, in the last of which the third GPU has no sample."""
    costs = costs_of(5)
    schedule, shards, whole = built(sharded(3, 1), costs), Shards(costs, 3), (0, 4)

    def own(kind: TaskKind, tensor: TensorKind, gpu: int) -> int:
        return sum(t.bytes for t in schedule.copies(kind) if t.gpu == gpu and t.tensor_kind is tensor)

    for gpu in range(3):
        weights, gradients = (shards.bytes(k, whole, gpu) for k in (TensorKind.WEIGHT, TensorKind.GRADIENT))
        assert own(TaskKind.SWAP_IN, TensorKind.WEIGHT, gpu) == 2 * 3 * weights
        assert own(TaskKind.SWAP_OUT, TensorKind.GRADIENT, gpu) == 3 * gradients
        assert own(TaskKind.SWAP_IN, TensorKind.GRADIENT, gpu) == 2 * gradients
    assert max(shards.bytes(TensorKind.WEIGHT, whole, gpu) for gpu in range(3)) < costs.weight_bytes(*whole) / 2.9


def test_a_gpu_without_a_microbatch_takes_part_and_adds_nothing() -> None:
    costs = Costs(uniform_trace(2))
    schedule = built(sharded(2, 1, minibatch=3), costs)
    assert [task.samples for task in schedule.copies(TaskKind.FORWARD) if task.gpu == 1] == [(2, 3)] * 2
    *_, last = schedule.copies(TaskKind.REDUCE_SCATTER)
    reads, writes = ([schedule.buffers[number] for number in ids] for ids in (last.reads, last.writes))
    assert [(buffer.gpu, buffer.shard) for buffer in reads] == [(0, None), (0, 0), (1, 1)]
    assert [(buffer.gpu, buffer.shard) for buffer in writes] == [(0, 0), (1, 1)]
    *_, last = schedule.copies(TaskKind.ALL_GATHER)
    assert [schedule.buffers[number].gpu for number in last.writes] == [0, 1]


def test_turns_go_forward_and_back_round_by_round() -> None:
    forward, backward = TaskKind.FORWARD, TaskKind.BACKWARD
    assert list(turns(2, 2)) == [
        Turn(0, forward, 0), Turn(0, forward, 1), Turn(0, backward, 1), Turn(0, backward, 0),
        Turn(1, forward, 0), Turn(1, forward, 1), Turn(1, backward, 1), Turn(1, backward, 0),
    ]  # fmt: skip


def test_two_rounds_drawn() -> None:
    """Of two layers only the first has weights. In the second round, what the first left of its gradient comes in."""
    drawn = grid(built(sharded(2, 1, minibatch=4), Costs(uniform_trace(2)))).splitlines()
    rows = {line[:16].rstrip(): [cell for cell in line[16:].split() if cell != "."] for line in drawn[1:9]}
    assert rows["gpu 0 compute"] == ["F0.0", "F1.0", "B1.0", "B0.0", "F0.1", "F1.1", "B1.1", "B0.1"]
    assert rows["      swap in"] == ["w0", "d0.0", "d2.0", "w0", "w0", "d0.1", "d2.1", "w0", "dw0"]
    assert rows["      swap out"] == ["dw0", "dw0"]
    assert rows["all   collective"] == ["AG0", "AG0", "RS0", "AG0", "AG0", "RS0"]
    assert rows["host  update"] == ["U0"]
    assert len(drawn[0].split()) - 1 == 21  # on demand, little overlaps


def starts(schedule: Schedule, costs: Costs) -> dict[int, tuple[int, int]]:
    """Of each task, when it starts and ends."""
    gpus = schedule.plan.gpus
    step = run_step(schedule, Demands(machine(gpus), CostDurations(costs, machine(gpus), gpus), gpus))
    return dict(enumerate(zip(step.start_ns, step.end_ns, strict=True)))


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_fetches_start_at_most_so_many_steps_ahead(depth: int) -> None:
    """The copy for a step never starts before the step ``depth + 1`` before it has ended."""
    costs = Costs(uniform_trace(6))
    schedule = built(sharded(2, 2, depth=depth), costs)
    times = starts(schedule, costs)
    order = list(turns(2, 6))
    computed: dict[Turn, int] = {}
    weights: list[Task] = []
    for task in schedule.tasks:
        if task.gpu == 0 and task.lane is Lane.COMPUTE:
            assert task.microbatch is not None
            computed[Turn(task.microbatch, task.kind, task.layer_first)] = task.id
        if task.gpu == 0 and task.tensor_kind is TensorKind.WEIGHT:
            weights.append(task)
    ahead = []
    for copy, turn in zip(weights, [t for t in order if costs.weight_bytes(t.layer, t.layer)], strict=True):
        number = order.index(turn)
        if number > depth:
            assert times[copy.id][0] >= times[computed[order[number - depth - 1]]][1]
        ahead.append(sum(times[computed[t]][1] > times[copy.id][0] for t in order[:number]))
    assert max(ahead) == depth


def test_prefetching_is_faster_and_takes_more_memory() -> None:
    costs = Costs(uniform_trace(6))
    plain, ahead = (built(sharded(2, 2, depth=depth), costs) for depth in (0, 2))
    ends = [max(end for _, end in starts(schedule, costs).values()) for schedule in (plain, ahead)]
    assert ends[1] < ends[0]
    assert max(ahead.memory.gpu_peak_bytes) > max(plain.memory.gpu_peak_bytes)


def test_where_prefetching_does_not_fit_there_is_less_of_it() -> None:
    costs = Costs(uniform_trace(6))
    plain = built(sharded(2, 2), costs)
    peak = max(plain.memory.gpu_peak_bytes)
    squeezed = built(sharded(2, 2, depth=16), costs, memory_bytes=peak)
    assert max(squeezed.memory.gpu_peak_bytes) <= peak
    validate(squeezed, costs.trace)


def test_a_refusal_says_what_the_checkpoints_take() -> None:
    costs = Costs(uniform_trace(4))
    with pytest.raises(
        DoesNotFit, match=r"the checkpoints of 4 sample\(s\) up to there \(\d+ B, which stay on the GPU"
    ):
        built(sharded(2, 4), costs, memory_bytes=8_000_000)
    needed = 0
    try:
        built(sharded(2, 4), costs, memory_bytes=8_000_000)
    except DoesNotFit as refusal:
        needed = refusal.needed
    for less in (1, needed // 2):
        with pytest.raises(DoesNotFit):
            built(sharded(2, 4), costs, memory_bytes=needed - less)


def test_the_host_holds_one_copy_of_all_state() -> None:
    costs = Costs(uniform_trace(4))
    schedule = built(sharded(2, 4), costs)
    held = sum(schedule.memory.host_store.values())
    assert schedule.memory.host_peak_bytes == held
    small = replace(machine(2), host=replace(machine(2).host, memory_bytes=held - 1))
    with pytest.raises(DoesNotFit, match="the state and data"):
        build_from_costs(sharded(2, 4), costs, small)


@settings(max_examples=60, deadline=None)
@given(linear_traces(tied=True, frozen=True), st.integers(1, 4), st.integers(1, 4), st.sampled_from((0, 1, 3, 16)))
def test_any_schedule_is_sound(trace: Trace, gpus: int, u: int, depth: int) -> None:
    schedule = built(sharded(gpus, u, minibatch=7, depth=depth), Costs(trace))
    validate(schedule, trace)


def test_plans_are_checked() -> None:
    with pytest.raises(PlanError, match="u_fwd = u_bwd; got 1 and 2"):
        replace(sharded(2, 1), u_bwd=2)
    with pytest.raises(PlanError, match="policy dp-swap does not shard its state; use zero3-offload"):
        replace(sharded(2, 1), policy=Policy.DP_SWAP)
    with pytest.raises(PlanError, match="1 samples are fewer than 2 GPUs"):
        sharded(2, 1, minibatch=1)
