"""The baselines: what they do, the closed forms of what they move, and that they compute the right thing."""

from collections import Counter
from functools import partial
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.builders.baselines import build_paged
from sim.builders.stages import cut_stages
from sim.builders.store_bytes import store_bytes
from sim.errors import DoesNotFit
from sim.hardware.machine import Gpu, Host, Machine
from sim.plan import PagedPlan, Policy, Residency, Writeback, pieces, shares
from sim.schedule import Lane, Schedule, TaskKind, TensorKind
from sim.validation.validate import validate
from tests.sim.builders.odd_traces import LABEL, odd_trace
from tests.sim.builders.paged_replay import Replay
from tests.sim.closed_forms import closed_forms, moved
from traces.costs import Costs
from traces.schema import Trace
from traces.synthetic import skewed_trace, uniform_trace, with_frozen, with_tied

PLENTY = 10**12
BASELINES = [policy for policy in Policy if policy.is_paged]
W, B, G, K = TensorKind.WEIGHT, TensorKind.BUFFER, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE
STASH, DATA = TensorKind.STASH, TensorKind.DATA


def machine(gpus: int, memory_bytes: int = PLENTY, host_bytes: int | None = None) -> Machine:
    gpu = Gpu(name="0", memory_bytes=memory_bytes, bandwidth=1e9)
    host = Host(memory_bytes=host_bytes, dram_bandwidth=1e10, cores=1)
    return Machine(name="test", host=host, gpus=(gpu,)).with_gpus(gpus)


def paged(
    policy: Policy,
    minibatch: int,
    gpus: int,
    u: int,
    residency: Residency,
    writeback: Writeback,
    *,
    recompute: bool = True,
    prefetch_depth: int = 0,
) -> PagedPlan:
    return PagedPlan(
        policy=policy,
        minibatch=minibatch,
        gpus=gpus,
        u_fwd=u,
        u_bwd=u,
        residency=residency,
        writeback=writeback,
        recompute=recompute,
        prefetch_depth=prefetch_depth,
    )


dp_swap = partial(paged, Policy.DP_SWAP)


def swapped(schedule: Schedule, kind: TaskKind) -> Counter[TensorKind]:
    """Bytes by kind of tensor."""
    totals: Counter[TensorKind] = Counter()
    for task in schedule.copies(kind):
        assert task.bytes > 0
        totals[task.tensor_kind] += task.bytes
    return totals


def smallest_cap(trace: Trace, plan: PagedPlan) -> int:
    """The smallest memory that every step fits in alone, as the refusals say."""
    cap = 1
    while (needed := refused(trace, plan, cap)) is not None:
        cap = needed
    return cap


def refused(trace: Trace, plan: PagedPlan, cap: int) -> int | None:
    """Bytes that a step needs and GPUs of ``cap`` bytes do not have; None: all steps fit."""
    try:
        build_paged(plan, Costs(trace), machine(plan.gpus, cap))
    except DoesNotFit as refusal:
        return refusal.needed
    return None


def names(schedule: Schedule) -> list[str]:
    return [str(task).partition(" (task")[0] for task in schedule.tasks]


def test_one_gpu_one_microbatch_task_by_task():
    plan = dp_swap(2, 1, 2, Residency.NONE, Writeback.DROP)
    trace = odd_trace(2)
    plain = replace(trace, layers=tuple(replace(layer, buffer_bytes=0) for layer in trace.layers))
    assert names(build_paged(plan, Costs(plain), machine(1))) == [
        "swap_in weight 0 on gpu 0 swap_in",
        "swap_in data 0 m0 on gpu 0 swap_in",
        "forward 0 m0 on gpu 0 compute",
        "swap_in weight 1 on gpu 0 swap_in",
        "swap_in data 2 m0 on gpu 0 swap_in",  # the labels, which stay until the backward
        "forward 1 m0 on gpu 0 compute",
        "swap_out stash 1 m0 on gpu 0 swap_out",
        "swap_in weight 1 on gpu 0 swap_in",
        "swap_in stash 1 m0 on gpu 0 swap_in",
        "backward 1 m0 on gpu 0 compute",
        "swap_out gradient 1 on gpu 0 swap_out",
        "swap_in weight 0 on gpu 0 swap_in",
        "swap_in data 0 m0 on gpu 0 swap_in",
        "backward 0 m0 on gpu 0 compute",
        "swap_out gradient 0 on gpu 0 swap_out",
        "swap_in weight 0 on gpu 0 swap_in",
        "swap_in gradient 0 on gpu 0 swap_in",
        "swap_in optimizer_state 0 on gpu 0 swap_in",
        "update 0 on gpu 0 compute",
        "swap_out weight 0 on gpu 0 swap_out",
        "swap_out optimizer_state 0 on gpu 0 swap_out",
        "swap_in weight 1 on gpu 0 swap_in",
        "swap_in gradient 1 on gpu 0 swap_in",
        "swap_in optimizer_state 1 on gpu 0 swap_in",
        "update 1 on gpu 0 compute",
        "swap_out weight 1 on gpu 0 swap_out",
        "swap_out optimizer_state 1 on gpu 0 swap_out",
    ]


def test_with_room_for_all_everything_comes_in_once_and_only_state_goes_out():
    trace = odd_trace(3)
    schedule = build_paged(dp_swap(6, 1, 2, Residency.LRU, Writeback.DROP), Costs(trace), machine(1))
    weights = sum(layer.weight_bytes for layer in trace.layers)
    states = sum(layer.optimizer_state_bytes for layer in trace.layers)
    buffers = sum(layer.buffer_bytes for layer in trace.layers)
    data = 6 * (Costs(trace).input_bytes(0, 1) + LABEL)
    assert swapped(schedule, TaskKind.SWAP_IN) == {W: weights, K: states, B: buffers, DATA: data}
    assert swapped(schedule, TaskKind.SWAP_OUT) == {W: weights, K: states}


TRACES = [
    odd_trace(2, changes_buffers=frozenset({0})),
    uniform_trace(4),
    skewed_trace(4, 6),
    odd_trace(8, changes_buffers=frozenset({0, 6})),
]
CUTS = [(5, 1), (5, 2), (8, 3), (6, 6)]
"""Minibatch and microbatch: many and few, one, the last one smaller or not."""


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("writeback", Writeback)
@pytest.mark.parametrize("gpus", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", BASELINES)
def test_moved_bytes_equal_the_closed_forms(policy, gpus, writeback, recompute):
    compared: Counter[Residency] = Counter()
    for costs, (minibatch, u), residency in product(map(Costs, TRACES), CUTS, (Residency.NONE, Residency.NEXT)):
        plan = paged(policy, minibatch, gpus, u, residency, writeback, recompute=recompute)
        if has_closed_form(plan, costs):
            assert moved(build_paged(plan, costs, machine(gpus))) == closed_forms(plan, costs)
            compared[residency] += 1
    assert min(compared[Residency.NONE], compared[Residency.NEXT]) >= len(CUTS)


def has_closed_form(plan: PagedPlan, costs: Costs) -> bool:
    """A layer for each GPU, or two where the pager keeps what the next step touches."""
    if plan.policy is Policy.DP_SWAP:
        return True
    if costs.layer_count < plan.gpus:
        return False
    stages = cut_stages(costs, plan.gpus, min(plan.u_fwd, plan.minibatch))
    return plan.residency is Residency.NONE or all(last > first for first, last in stages)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("writeback", Writeback)
@pytest.mark.parametrize("split", [(1, 5), (2, 5), (3, 8)])
@pytest.mark.parametrize("policy", BASELINES)
def test_lru_never_moves_more_than_none(policy, split, writeback, recompute):
    gpus, minibatch = split
    trace = odd_trace(4, changes_buffers=frozenset({1}))
    none, lru = (
        paged(policy, minibatch, gpus, 2, residency, writeback, recompute=recompute)
        for residency in (Residency.NONE, Residency.LRU)
    )
    bound = build_paged(none, Costs(trace), machine(gpus))
    least = smallest_cap(trace, lru)
    for cap in (least, least + 50, least + 200, 2 * least, 4 * least, PLENTY):
        schedule = build_paged(lru, Costs(trace), machine(gpus, cap))
        assert max(schedule.memory.gpu_peak_bytes) <= cap
        for kind in (TaskKind.SWAP_IN, TaskKind.SWAP_OUT):
            assert swapped(schedule, kind) <= swapped(bound, kind)


@pytest.mark.parametrize("residency", [Residency.NONE, Residency.NEXT])
@pytest.mark.parametrize("writeback", Writeback)
@pytest.mark.parametrize("policy", BASELINES)
def test_prefetching_never_moves_more_where_little_is_kept(policy, writeback, residency):
    trace = odd_trace(6, changes_buffers=frozenset({1}))
    late = paged(policy, 6, 2, 2, residency, writeback)
    least = smallest_cap(trace, late)
    for cap, depth in product((least, least + 50, 2 * least, 4 * least, PLENTY), (1, 2, 4, 100)):
        early = build_paged(replace(late, prefetch_depth=depth), Costs(trace), machine(2, cap))
        bound = build_paged(late, Costs(trace), machine(2, cap))
        assert max(early.memory.gpu_peak_bytes) <= cap
        for kind in (TaskKind.SWAP_IN, TaskKind.SWAP_OUT):
            assert swapped(early, kind).total() <= swapped(bound, kind).total()


def test_what_is_prefetched_comes_in_before_the_step_before_it():
    """Layers 0 and 1 are on GPU 0, the others on GPU 1, which is slower."""
    plan = paged(Policy.GPIPE_SWAP, 2, 2, 1, Residency.NONE, Writeback.DROP, prefetch_depth=1)
    shown = names(build_paged(plan, Costs(uniform_trace(5)), machine(2)))
    for early, late in (
        ("swap_in weight 1 on gpu 0 swap_in", "forward 0 m0 on gpu 0 compute"),
        ("p2p activation 2 m1 on gpu 0 p2p_out", "forward 4 m0 on gpu 1 compute"),
        ("swap_in optimizer_state 1 on gpu 0 swap_in", "update 0 on gpu 0 compute"),
    ):
        assert shown.index(early) < shown.index(late)


def test_gradients_are_reduced_when_all_gpus_have_theirs_and_leave_only_then():
    """GPU 0 has two microbatches, GPU 1 one."""
    schedule = build_paged(dp_swap(3, 2, 1, Residency.NONE, Writeback.ALWAYS), Costs(odd_trace(2)), machine(2))
    shown = names(schedule)
    backwards = [shown.index("backward 1 m1 on gpu 0 compute"), shown.index("backward 1 m0 on gpu 1 compute")]
    reduce = shown.index("allreduce gradient 1 on host collective")
    assert max(backwards) < reduce < shown.index("swap_out weight 1 on gpu 0 swap_out", max(backwards))
    assert shown[reduce:].index("backward 0 m1 on gpu 0 compute") < shown[reduce:].index(
        "allreduce gradient 0 on host collective"
    )
    assert [task.bytes for task in schedule.copies(TaskKind.ALLREDUCE)] == [
        2 * Costs(odd_trace(2)).gradient_bytes(layer, layer) for layer in (1, 0)
    ]
    out = [task for task in schedule.copies(TaskKind.SWAP_OUT) if task.tensor_kind is G and task.gpu == 1]
    assert [reduce < task.id for task in out] == [True, True]
    assert reduce in out[0].waits_for


def test_every_gpu_computes_its_share_in_the_plain_order():
    schedule = build_paged(dp_swap(5, 2, 2, Residency.LRU, Writeback.DROP), Costs(odd_trace(2)), machine(2))
    work = [
        [(task.kind.value[0], task.layer_first, task.samples) for task in map(schedule.tasks.__getitem__, ids)]
        for ids in (schedule.lanes[gpu, Lane.COMPUTE] for gpu in (0, 1))
    ]
    first = [("f", 0, (0, 2)), ("f", 1, (0, 2)), ("b", 1, (0, 2)), ("b", 0, (0, 2))]
    second = [("f", 0, (2, 3)), ("f", 1, (2, 3)), ("b", 1, (2, 3)), ("b", 0, (2, 3))]
    other = [("f", 0, (3, 5)), ("f", 1, (3, 5)), ("b", 1, (3, 5)), ("b", 0, (3, 5))]
    updates = [("u", 0, None), ("u", 1, None)]
    assert work == [first + second + updates, other + updates]


# Whatever the memory and the timing, the right thing is computed.


@st.composite
def odd_cases(draw: st.DrawFn) -> tuple[Trace, PagedPlan]:
    """Traces with tied, frozen and weightless layers and buffers that change, and plans for them."""
    layers = draw(st.integers(1, 5))
    anywhere = st.integers(0, layers - 1)
    trace = odd_trace(layers, changes_buffers=frozenset(draw(st.sets(anywhere, max_size=2))))
    tied: set[int] = set()
    for size in draw(st.lists(st.sampled_from((7, 9)), max_size=2, unique=True)):
        members = draw(st.sets(anywhere, max_size=3))
        if len(members) > 1:
            trace = with_tied(trace, sorted(members), size)
            tied |= members
    free = sorted(set(range(layers)) - tied)
    trace = with_frozen(trace, [layer for layer in free if draw(st.integers(0, 4)) == 0])
    weightless = {layer for layer in free if draw(st.integers(0, 4)) == 0}
    nothing = {"weight_bytes": 0, "gradient_bytes": 0, "optimizer_state_bytes": 0, "buffer_bytes": 0}
    rows = [replace(row, **nothing) if at in weightless else row for at, row in enumerate(trace.layers)]
    # Half of the tied layers that own nothing of their own are nothing but the tied weight, as an output embedding.
    owners = {members[0] for members in trace.tied_groups.values()}
    for layer in sorted(tied - owners):
        if draw(st.booleans()):
            size = sum(each.weight_bytes for each in rows[layer].tied)
            rows[layer] = replace(rows[layer], weight_bytes=size, gradient_bytes=size, optimizer_state_bytes=0)
    updated = {at for at in range(layers) if at not in weightless}
    times = tuple(row for row in trace.times if not row.phase.is_update or row.layer in updated)
    policy = draw(st.sampled_from(BASELINES))
    gpus = draw(st.integers(1, 3 if policy is Policy.DP_SWAP else min(3, layers)))
    plan = paged(
        policy,
        draw(st.integers(gpus, 7)),
        gpus,
        draw(st.integers(1, 3)),
        draw(st.sampled_from(Residency)),
        draw(st.sampled_from(Writeback)),
        recompute=draw(st.booleans()),
        prefetch_depth=draw(st.sampled_from((0, 1, 2, 5))),
    )
    return replace(trace, layers=tuple(rows), times=times), plan


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(odd_cases(), st.integers(0, 3000), st.integers(0, 2**32))
def test_any_timing_computes_a_whole_step_within_the_planned_memory(case, spare, seed):
    trace, plan = case
    schedule = build_paged(plan, Costs(trace), machine(plan.gpus, smallest_cap(trace, plan) + spare))
    validate(schedule, trace)
    for timing in range(3):
        replay = Replay(schedule, trace)
        replay.run(seed + timing)
        assert not replay.live
        assert not +replay.held_bytes
        memory = schedule.memory
        assert all(replay.peak_bytes[gpu] <= peak for gpu, peak in enumerate(memory.gpu_peak_bytes))
        assert all(peak <= cap for peak, cap in zip(memory.gpu_peak_bytes, memory.gpu_cap_bytes, strict=True))
        assert memory.host_store_bytes + replay.peak_bytes[None] <= memory.host_peak_bytes
        check_state_at_home(replay, trace, plan)


def check_state_at_home(replay: Replay, trace: Trace, plan: PagedPlan) -> None:
    """In every store each trained weight is new, and buffers have seen each of its microbatches once."""
    costs = Costs(trace)
    private = list(enumerate(shares(plan.minibatch, plan.gpus)))
    for store, share in private if plan.policy is Policy.DP_SWAP else [(None, (0, plan.minibatch))]:
        for layer, row in enumerate(trace.layers):
            if costs.updates(layer):
                assert replay.holds["home", store, W, layer, None] == 1
                assert replay.holds["home", store, K, layer, None] == 1
            if row.changes_buffers and row.buffer_bytes:
                assert replay.holds["home", store, B, layer, None] == len(pieces(*share, plan.u_fwd))
        for group, members in trace.tied_groups.items():
            if costs.updates(members[0]):
                assert replay.holds["home", store, W, group, None] == 1


def test_a_tied_weight_is_updated_before_a_layer_with_weights_of_its_own_takes_it_in_again():
    """As in GPT-2, whose head is a norm and the token embedding. The copies of the embedding are one home tensor."""
    trace = with_tied(odd_trace(3), (0, 2), 1000)
    schedule = build_paged(dp_swap(1, 1, 1, Residency.LRU, Writeback.DROP), Costs(trace), machine(1))
    shown = names(schedule)
    updated, after = shown.index("update 0 on gpu 0 compute"), shown.index("update 1 on gpu 0 compute")
    assert shown[updated + 1 : after] == [
        "swap_out weight 0 on gpu 0 swap_out",
        "swap_in optimizer_state 1 on gpu 0 swap_in",
    ]
    again = shown.index("swap_in weight 2 on gpu 0 swap_in", after)
    assert updated + 1 in schedule.tasks[again].waits_for
    assert "swap_out weight 2 on gpu 0 swap_out" not in shown[:again]


@pytest.mark.parametrize("own_bytes", [0, 13])
def test_partial_gradients_of_a_tied_weight_die_with_the_last_update_that_takes_them(own_bytes):
    """Layer 3 borrows from layers 0 and 1, and has weights of its own or none."""
    trace = with_tied(with_tied(odd_trace(4), (0, 3), 1000), (1, 3), 2000)
    row = trace.layers[3]
    state = row.optimizer_state_bytes if own_bytes else 0
    row = replace(row, weight_bytes=3000 + own_bytes, gradient_bytes=3000 + own_bytes, optimizer_state_bytes=state)
    trace = replace(
        trace,
        layers=(*trace.layers[:3], row),
        times=tuple(t for t in trace.times if t.layer < 3 or not t.phase.is_update),
    )
    costs = Costs(trace)
    lru = build_paged(dp_swap(4, 2, 1, Residency.LRU, Writeback.ALWAYS), costs, machine(2))
    assert G not in swapped(lru, TaskKind.SWAP_IN) + swapped(lru, TaskKind.SWAP_OUT)
    # For each microbatch once; and once more, out and in, for each further update that takes a gradient of layer 3.
    none = build_paged(dp_swap(4, 2, 1, Residency.NONE, Writeback.ALWAYS), costs, machine(2))
    again = 2 * costs.gradient_bytes(3, 3) * (2 if own_bytes else 1)
    expected = 4 * costs.gradient_bytes(0, 3) + again
    assert swapped(none, TaskKind.SWAP_IN)[G] == swapped(none, TaskKind.SWAP_OUT)[G] == expected


def test_frozen_and_weightless_layers_move_only_what_they_have():
    frozen = with_frozen(odd_trace(3), [0, 1, 2])
    schedule = build_paged(dp_swap(4, 2, 1, Residency.NONE, Writeback.DROP), Costs(frozen), machine(2))
    assert set(swapped(schedule, TaskKind.SWAP_OUT)) == {STASH}
    assert not list(schedule.copies(TaskKind.UPDATE, TaskKind.ALLREDUCE))
    validate(schedule, frozen)


# Memory.


def test_one_byte_too_little_is_refused_with_gpu_layer_and_bytes():
    trace, plan = odd_trace(3), dp_swap(4, 2, 2, Residency.LRU, Writeback.ALWAYS)
    costs = Costs(trace)
    needed = [
        costs.weight_bytes(at, at) + costs.buffer_bytes(at, at) + costs.gradient_bytes(at, at)
        + costs.input_bytes(at, 2) + (2 * LABEL if at == 2 else costs.input_gradient_bytes(at + 1, 2))
        + (costs.input_gradient_bytes(at, 2) if at else 0) + costs.backward_workspace_bytes(at, at, 2)
        for at in range(3)
    ]  # fmt: skip
    worst = needed.index(max(needed))
    assert build_paged(plan, costs, machine(2, needed[worst])).memory.gpu_peak_bytes == (needed[worst],) * 2
    with pytest.raises(DoesNotFit) as refusal:
        build_paged(plan, costs, machine(2, needed[worst] - 1))
    error = refusal.value
    assert (error.gpu, error.layers, error.needed, error.cap) == (0, (worst, worst), needed[worst], needed[worst] - 1)
    assert "backward of 2 sample(s)" in str(error)


def test_every_gpu_has_private_copies_in_the_host_and_the_host_is_checked():
    trace, plan = odd_trace(3), dp_swap(5, 2, 1, Residency.NONE, Writeback.DROP)
    costs = Costs(trace)
    state = sum(
        layer.weight_bytes + layer.gradient_bytes + layer.optimizer_state_bytes + layer.buffer_bytes
        for layer in trace.layers
    )
    store = 2 * state + 5 * (costs.input_bytes(0, 1) + LABEL)
    stash = 2 * (costs.input_bytes(1, 1) + costs.input_bytes(2, 1))  # on each GPU one microbatch at a time
    memory = build_paged(plan, costs, machine(2, host_bytes=store + stash)).memory
    assert (memory.host_store_bytes, memory.host_peak_bytes) == (store, store + stash)
    with pytest.raises(DoesNotFit) as refusal:
        build_paged(plan, costs, machine(2, host_bytes=store + stash - 1))
    error = refusal.value
    assert (error.gpu, error.layers, error.needed, error.cap) == (None, (0, 2), store + stash, store + stash - 1)


def test_a_tied_weight_is_stored_once_per_copy_and_its_partial_gradients_apart():
    trace = odd_trace(4)
    plain, tied = (store_bytes(Costs(each), 3, copies=2) for each in (trace, with_tied(trace, (0, 1, 3), 100)))
    assert tied - plain == 2 * (100 + 3 * 100 + 200)


def test_data_of_a_minibatch_larger_than_any_profiled_microbatch_is_counted():
    costs = Costs(odd_trace(2))
    assert store_bytes(costs, 1000, copies=0) == 1000 * (costs.input_bytes(0, 1) + LABEL)


def test_the_same_plan_gives_the_same_schedule():
    plan = dp_swap(5, 2, 2, Residency.LRU, Writeback.ALWAYS)
    trace = odd_trace(3)
    assert build_paged(plan, Costs(trace), machine(2, 5000)) == build_paged(plan, Costs(trace), machine(2, 5000))
