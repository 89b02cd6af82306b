"""What the transfer pass emits around each compute step, written out for small plans."""

import pytest
from msgspec.structs import replace

from sim.builders import build, build_from_costs
from sim.errors import DoesNotFit, PlanError
from sim.hardware.machine import Gpu, Host, Machine
from sim.plan import HarmonyPlan, Policy, StashPlace, UpdateOn
from sim.schedule import Lane, Schedule, Task, TaskKind, TensorKind
from sim.validation.validate import validate
from traces.costs import Costs
from traces.synthetic import uniform_trace, with_tied

MB = 10**6


def machine(gpus: int, memory_bytes: int = 10**12) -> Machine:
    gpu = Gpu(name="0", memory_bytes=memory_bytes, bandwidth=1e9)
    return Machine(name="m", host=Host(memory_bytes=None, dram_bandwidth=1e10, cores=2), gpus=(gpu,)).with_gpus(gpus)


def plan(**overrides) -> HarmonyPlan:
    fields = {
        "policy": Policy.HARMONY_PP, "minibatch": 4, "gpus": 2, "u_fwd": 2, "u_bwd": 2,
        "packs_fwd": ((0, 1),), "packs_bwd": ((0, 1), (2, 3)),
    }  # fmt: skip
    return HarmonyPlan(**(fields | overrides))


def lane(schedule: Schedule, gpu: int | None, which: Lane) -> list[str]:
    short = {TaskKind.SWAP_IN: "", TaskKind.SWAP_OUT: "", TaskKind.P2P: ""}
    names = []
    for index in schedule.lanes.get((gpu, which), ()):
        task = schedule.tasks[index]
        what = task.tensor_kind.value if task.tensor_kind else short.get(task.kind, task.kind.value)
        part = "" if task.microbatch is None else f".{task.microbatch}"
        names.append(f"{what} {task.layer_first}-{task.layer_last}{part}")
    return names


def test_a_pipeline_of_two_gpus_written_out():
    schedule = build(plan(), uniform_trace(4), machine(2))
    assert lane(schedule, 0, Lane.COMPUTE) == ["forward 0-1.0", "forward 0-1.1", "backward 0-1.0", "backward 0-1.1"]
    assert lane(schedule, 1, Lane.COMPUTE) == ["backward 2-3.0", "backward 2-3.1"]
    # The second input comes before the next group's weights, which are spread over the microbatches.
    assert lane(schedule, 0, Lane.SWAP_IN) == [
        "weight 0-1", "data 0-0.0", "data 0-0.1", "weight 0-0", "data 0-0.0", "weight 1-1", "data 0-0.1",
    ]  # fmt: skip
    assert lane(schedule, 0, Lane.P2P_OUT) == ["activation 2-2.0", "activation 2-2.1"]
    assert lane(schedule, 1, Lane.P2P_IN) == ["activation 2-2.0", "activation 2-2.1"]
    assert lane(schedule, 1, Lane.P2P_OUT) == ["activation_gradient 2-2.0", "activation_gradient 2-2.1"]
    assert lane(schedule, 1, Lane.SWAP_IN) == ["weight 2-3", "data 4-4.0", "data 4-4.1"]
    assert lane(schedule, 0, Lane.SWAP_OUT) == ["gradient 0-1"]
    assert lane(schedule, None, Lane.UPDATE) == ["update 2-3", "update 0-1"]


def test_an_update_follows_the_gradient_home_and_a_gpu_update_writes_weights_and_state_back():
    schedule = build(plan(update=UpdateOn.GPU), uniform_trace(4), machine(2))
    assert lane(schedule, 1, Lane.COMPUTE)[-1] == "update 2-3"
    assert lane(schedule, 1, Lane.SWAP_IN)[-1] == "optimizer_state 2-3"
    assert lane(schedule, 1, Lane.SWAP_OUT) == ["weight 2-2", "optimizer_state 2-3"]  # the loss has no weights


def test_without_prefetch_nothing_comes_in_before_the_step_that_needs_it():
    schedule = build(plan(prefetch=False), uniform_trace(4), machine(2))
    computed: set[int] = set()
    for task in schedule.tasks:
        if task.lane is Lane.COMPUTE and task.gpu == 0:
            computed.add(task.id)
        if task.lane is Lane.SWAP_IN and task.gpu == 0:
            user = next(t for t in schedule.tasks if t.lane is Lane.COMPUTE and set(t.reads) & set(task.writes))
            between = [t for t in schedule.tasks[task.id : user.id] if t.lane is Lane.COMPUTE and t.gpu == 0]
            assert not between


def test_prefetching_is_given_up_where_memory_is_tight_and_the_plan_fails_only_without_it():
    trace = uniform_trace(4)
    roomy = build(plan(), trace, machine(2))
    bare = build(plan(prefetch=False), trace, machine(2))
    least = max(bare.memory.gpu_peak_bytes)
    assert max(roomy.memory.gpu_peak_bytes) > least
    squeezed = build(plan(), trace, machine(2, least))
    assert max(squeezed.memory.gpu_peak_bytes) <= least
    with pytest.raises(DoesNotFit) as refusal:
        build(plan(), trace, machine(2, least - 3 * MB))
    assert refusal.value.cap == least - 3 * MB


def test_the_host_must_hold_state_and_stash():
    small = machine(2).with_host_memory(20 * MB)
    with pytest.raises(DoesNotFit, match="the host"):
        build(plan(), uniform_trace(4), small)


def test_plans_that_do_not_go_with_trace_or_machine_are_refused():
    trace = uniform_trace(4)
    with pytest.raises(PlanError, match="the plan is for 2 GPUs"):
        build(plan(), trace, machine(3))
    with pytest.raises(PlanError, match=r"cover 4 layers, the trace .* has 5"):
        build(plan(), uniform_trace(5), machine(2))


def test_layers_that_depend_on_the_cut_need_equal_microbatches():
    trace = uniform_trace(4)
    layers = (replace(trace.layers[0], cut_sensitive=True), *trace.layers[1:])
    with pytest.raises(PlanError, match="layer 0"):
        build_from_costs(plan(u_bwd=1), Costs(replace(trace, layers=layers)), machine(2))
    build_from_costs(plan(), Costs(replace(trace, layers=layers)), machine(2))


def test_module_buffers_come_in_with_the_weights_and_leave_once_after_the_forward_that_counts():
    trace = uniform_trace(4)
    norm = replace(trace.layers[1], buffer_bytes=800, changes_buffers=True)
    trace = replace(trace, layers=(trace.layers[0], norm, *trace.layers[2:]))
    for policy in (Policy.HARMONY_DP, Policy.HARMONY_PP):
        schedule = build(plan(policy=policy), trace, machine(2))
        validate(schedule, trace)  # reads and writes of the home buffers are ordered, too
        copies = [(t.kind, t.gpu, t.bytes) for t in schedule.tasks if t.tensor_kind is TensorKind.BUFFER]
        replicas = 2 if policy is Policy.HARMONY_DP else 1
        assert copies.count((TaskKind.SWAP_OUT, 0, 800)) == 1
        assert sum(kind is TaskKind.SWAP_OUT for kind, _, _ in copies) == 1
        assert sum(kind is TaskKind.SWAP_IN for kind, _, _ in copies) == 2 * replicas


@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP])
def test_a_gpu_update_adds_tied_partial_gradients_and_writes_the_shared_weight_last(policy):
    trace = with_tied(uniform_trace(5), (0, 3), 500_000)
    packs = {"packs_fwd": ((0, 1),), "packs_bwd": ((0, 1), (2, 4))}
    schedule = build(plan(policy=policy, update=UpdateOn.GPU, **packs), trace, machine(2))
    validate(schedule, trace)

    def only(kind: TaskKind, tensor_kind: TensorKind, layer: int) -> Task:
        found = [
            t for t in schedule.copies(kind) if t.tensor_kind is tensor_kind and t.layer_first <= layer <= t.layer_last
        ]
        assert len(found) == 1
        return found[0]

    partial_out = only(TaskKind.SWAP_OUT, TensorKind.GRADIENT, 3)
    partial_in = only(TaskKind.SWAP_IN, TensorKind.GRADIENT, 3)
    assert partial_out.bytes == partial_in.bytes == trace.layers[3].gradient_bytes
    order = happens_before(schedule)
    assert order(partial_out.id, partial_in.id)
    stale, fresh = (only(TaskKind.SWAP_OUT, TensorKind.WEIGHT, layer) for layer in (3, 0))
    assert order(stale.id, fresh.id)


def happens_before(schedule: Schedule):
    ancestors: list[set[int]] = []
    for before in schedule.predecessors:
        ancestors.append(set(before).union(*(ancestors[task] for task in before)))
    return lambda first, second: first in ancestors[second]


SEVEN = {"packs_fwd": ((0, 1), (2, 4)), "packs_bwd": ((0, 0), (1, 2), (3, 4), (5, 6))}
"""Packs of seven layers; the stashes x(1) and x(3) leave the first and the second forward pack from within."""


def test_a_kept_stash_waits_on_the_gpu_of_its_backward():
    trace = uniform_trace(7)
    swapped = build(plan(policy=Policy.HARMONY_DP, **SEVEN), trace, machine(2))
    kept = build(plan(policy=Policy.HARMONY_DP, stash=StashPlace.KEEP, **SEVEN), trace, machine(2))
    assert [name for name in lane(swapped, 0, Lane.SWAP_OUT) if "stash" in name] == ["stash 1-1.0", "stash 3-3.0"]
    assert not any("stash" in name for which in Lane for name in lane(kept, 0, which))
    stashes = [buffer for buffer in kept.buffers if buffer.gpu == 0 and buffer.kind is TensorKind.STASH]
    ends = [
        (task.kind, task.layer_first)
        for stash in stashes
        for task in kept.tasks
        if stash.id in (*task.allocates, *task.frees)
    ]
    assert ends == [(TaskKind.FORWARD, 0), (TaskKind.BACKWARD, 1), (TaskKind.FORWARD, 2), (TaskKind.BACKWARD, 3)]


def test_a_pipeline_copies_a_kept_stash_to_the_gpu_of_its_backward_at_once():
    """The forward is on GPU 0, backward packs are on GPUs 1, 0, 1, 0, the last one first: x(1) crosses, x(3) stays."""
    fields = SEVEN | {"packs_fwd": ((0, 4),)}
    schedule = build(plan(stash=StashPlace.KEEP, **fields), uniform_trace(7), machine(2))
    sent = lane(schedule, 0, Lane.P2P_OUT)
    assert sent[:4] == ["activation 5-5.0", "stash 1-1.0", "activation 5-5.1", "stash 1-1.1"]
    assert not any("stash" in name for name in sent[4:])
    swapped = build(plan(stash=(StashPlace.SWAP, StashPlace.KEEP), **fields), uniform_trace(7), machine(2))
    assert not any("stash" in name for name in lane(swapped, 0, Lane.P2P_OUT))
    assert lane(swapped, 0, Lane.SWAP_OUT)[:2] == ["stash 1-1.0", "stash 1-1.1"]


def test_stashes_that_stay_need_the_memory_and_are_named_when_there_is_too_little():
    trace = uniform_trace(7)
    fields = {"policy": Policy.HARMONY_DP, "gpus": 1, "minibatch": 64} | SEVEN
    cap = max(build(plan(**fields), trace, machine(1)).memory.gpu_peak_bytes)
    with pytest.raises(DoesNotFit, match=r"of that stashes, which need not stay: --stash"):
        build(plan(stash=StashPlace.KEEP, **fields), trace, machine(1, cap))


def test_a_stash_can_be_kept_only_as_the_forward_cut_it():
    with pytest.raises(PlanError, match="keep needs u_fwd = u_bwd; got 1 and 2"):
        plan(u_fwd=1, stash=StashPlace.KEEP, **SEVEN)
    plan(u_fwd=1, stash=StashPlace.KEEP)  # two packs have no stash


def test_there_is_a_place_for_each_stash():
    with pytest.raises(PlanError, match="1 places for 2 stashes"):
        plan(stash=(StashPlace.KEEP,), **SEVEN)


def test_a_stash_that_is_not_kept_is_made_again_from_the_one_before_it():
    stash = (StashPlace.SWAP, StashPlace.RECOMPUTE)
    fields = SEVEN | {"policy": Policy.HARMONY_DP, "minibatch": 8, "stash": stash}
    schedule = build(plan(**fields), uniform_trace(7), machine(2))
    assert lane(schedule, 0, Lane.COMPUTE)[4:] == [
        "backward 5-6.0", "backward 5-6.1", "recompute 1-2.0", "recompute 1-2.1", "backward 3-4.0", "backward 3-4.1",
        "backward 1-2.0", "backward 1-2.1", "backward 0-0.0", "backward 0-0.1",
    ]  # fmt: skip
    # x(1) comes in twice: for the layers that are repeated, and for the backward of its own pack.
    assert [name for name in lane(schedule, 0, Lane.SWAP_IN) if "stash" in name] == ["stash 1-1.0", "stash 1-1.1"] * 2
    assert [name for name in lane(schedule, 0, Lane.SWAP_OUT) if "stash" in name] == ["stash 1-1.0", "stash 1-1.1"]


def test_without_any_stash_all_layers_before_a_pack_are_repeated_pack_by_pack():
    schedule = build(
        plan(gpus=1, policy=Policy.HARMONY_DP, minibatch=2, stash=StashPlace.RECOMPUTE, **SEVEN),
        uniform_trace(7), machine(1),
    )  # fmt: skip
    assert [name.removesuffix(".0") for name in lane(schedule, 0, Lane.COMPUTE)] == [
        "forward 0-1", "forward 2-4", "backward 5-6", "recompute 0-0", "recompute 1-2", "backward 3-4", "recompute 0-0",
        "backward 1-2", "backward 0-0",
    ]  # fmt: skip


def test_a_pipeline_repeats_layers_on_the_gpu_of_the_backward_that_needs_them():
    """The forward is on GPU 0, backward packs are on GPUs 1, 0, 1, 0, the last one first; x(1) is kept on GPU 1."""
    fields = SEVEN | {"packs_fwd": ((0, 4),), "stash": (StashPlace.KEEP, StashPlace.RECOMPUTE)}
    schedule = build(plan(**fields), uniform_trace(7), machine(2))
    assert [name for name in lane(schedule, 0, Lane.COMPUTE) if "recompute" in name] == [
        "recompute 1-2.0", "recompute 1-2.1",
    ]  # fmt: skip
    back_to_it = [name for name in lane(schedule, 1, Lane.P2P_OUT) if "stash" in name]
    assert back_to_it == ["stash 1-1.0", "stash 1-1.1"]


def weights_in(schedule: Schedule, gpu: int) -> list[str]:
    return [name for name in lane(schedule, gpu, Lane.SWAP_IN) if name.startswith("weight")]


def test_weights_that_stay_come_in_once_after_their_update_by_another():
    """In place on the GPU that updates them: pack 1 on GPU 1, pack 0 on GPU 0."""
    fields = {"policy": Policy.HARMONY_DP, "update": UpdateOn.GPU, "resident_weights": (0, 1)}
    schedule = build(plan(**fields), uniform_trace(4), machine(2))
    assert [weights_in(schedule, gpu) for gpu in range(2)] == [["weight 2-2"], ["weight 0-1"]]  # layer 3 has none
    by_host = build(plan(**fields | {"update": UpdateOn.CPU}), uniform_trace(4), machine(2))
    assert weights_in(by_host, 0) == ["weight 2-2", "weight 0-1"]


def test_a_forward_brings_in_only_what_does_not_stay():
    """Forward and backward packs on GPU 0: 0-1, 4-6 and then 3-4; of these the weights of 3-4 stay."""
    fields = {"packs_fwd": ((0, 1), (2, 3), (4, 4)), "packs_bwd": ((0, 2), (3, 4), (5, 6)), "update": UpdateOn.GPU}
    swapped = build(plan(**fields), uniform_trace(7), machine(2))
    stays = build(plan(resident_weights=(1,), **fields), uniform_trace(7), machine(2))
    assert weights_in(swapped, 0) == ["weight 0-1", "weight 4-4", "weight 3-3", "weight 4-4"]
    assert weights_in(stays, 0) == ["weight 0-1"]
    assert weights_in(stays, 1) == weights_in(swapped, 1)


def test_on_one_gpu_what_stays_moves_no_more():
    packs = {"packs_fwd": (), "packs_bwd": ((0, 3),)}
    fields = packs | {"gpus": 1, "update": UpdateOn.GPU, "resident_weights": (0,), "resident_state": (0,)}
    schedule = build(plan(**fields), uniform_trace(4), machine(1))
    assert {task.tensor_kind for task in schedule.copies(TaskKind.SWAP_IN, TaskKind.SWAP_OUT)} == {TensorKind.DATA}


def test_what_stays_needs_its_memory_all_the_time():
    trace = uniform_trace(7)
    fields = {"policy": Policy.HARMONY_DP, "gpus": 1} | SEVEN
    peak = build(plan(**fields), trace, machine(1)).memory.gpu_peak_bytes[0]
    stays = build(plan(resident_weights=(0, 1), **fields), trace, machine(1))
    assert stays.memory.gpu_peak_bytes[0] > peak
    weights = Costs(trace).weight_bytes(0, 6)
    with pytest.raises(DoesNotFit, match="from step to step: --resident-weights, --resident-state"):
        build(plan(resident_weights=(0, 1, 2, 3), **fields), trace, machine(1, weights + 10**4))
    with pytest.raises(DoesNotFit, match=r"B, which stays from step to step, and the [0-9]+ B that do as well"):
        build(plan(resident_weights=(0, 1, 2, 3), **fields), trace, machine(1, weights - 1))
