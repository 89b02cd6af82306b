"""The simulator: exact timelines of small schedules, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.engine.bounds import bound_ns
from sim.engine.durations import Demands
from sim.engine.simulate import run_step, simulate
from sim.errors import DoesNotFit, PlanError, ScheduleError, Stalled
from sim.hardware.machine import Gpu, Host, Link, Machine
from sim.schedule import Schedule, Task, TaskKind, TensorKind
from sim.timelines.replay import replay_times
from tests.sim.handmade import Hand, machine, one_gpu_schedule, plan, tiny_trace
from traces.errors import TraceError

WEIGHT = TensorKind.WEIGHT


@dataclass
class Given:
    """Durations by task id; what each update and reduction in the host moves, with so many threads."""

    by_task: list[int] = field(default_factory=list)
    moved: int = 0
    threads: int = 0

    def compute_ns(self, task: Task) -> int:
        return self.by_task[task.id]

    def host_bytes(self, task: Task) -> int:
        return self.moved


def spans(schedule: Schedule, on: Machine, durations: Given | None = None) -> list[tuple[int, int]]:
    step = run_step(schedule, Demands(on, durations or Given([0] * len(schedule.tasks)), schedule.plan.gpus))
    return list(zip(step.start_ns, step.end_ns, strict=True))


def test_a_whole_step_by_hand() -> None:
    """Bytes and nanoseconds are the same here. Forward takes 3 and 5, backward 7 and 11 more, updates 40 and 80."""
    timeline = simulate(one_gpu_schedule(), tiny_trace(), machine())
    rows = timeline.frame[["kind", "layer_first", "start_ns", "end_ns"]].to_records(index=False)
    assert [tuple(row) for row in rows] == [
        ("swap_in", 0, 0, 100),  # weights of layer 0
        ("swap_in", 0, 100, 110),
        ("forward", 0, 110, 113),
        ("swap_out", 1, 113, 133),
        ("swap_in", 0, 110, 120),
        ("forward", 0, 120, 123),
        ("swap_out", 1, 133, 153),
        ("swap_in", 1, 120, 320),  # weights of layer 1
        ("swap_in", 1, 320, 340),
        ("swap_in", 2, 340, 344),  # labels
        ("backward", 1, 344, 360),
        ("swap_out", 1, 360, 380),
        ("swap_in", 1, 344, 364),
        ("swap_in", 2, 364, 368),
        ("backward", 1, 368, 384),
        ("swap_out", 1, 384, 404),
        ("swap_out", 1, 404, 604),  # gradient of layer 1
        ("update", 1, 604, 684),
        ("swap_in", 0, 368, 468),  # weights of layer 0 again
        ("swap_in", 0, 468, 478),
        ("swap_in", 1, 478, 498),
        ("backward", 0, 498, 508),
        ("swap_in", 0, 498, 508),
        ("swap_in", 1, 508, 528),
        ("backward", 0, 528, 538),
        ("swap_out", 0, 604, 704),
        ("update", 0, 704, 744),
    ]
    assert timeline.step_time_ns == 744


def test_speeds_divide_times() -> None:
    hand = Hand()
    hand.task(TaskKind.FORWARD, samples=(0, 2))
    hand.task(TaskKind.BACKWARD, 1, samples=(0, 1))
    hand.task(TaskKind.UPDATE, 1)
    hand.task(TaskKind.UPDATE, 1, gpu=None)
    slow = Machine(
        name="slow",
        host=Host(memory_bytes=None, dram_bandwidth=1e9, cores=1, speed=0.25),
        gpus=(Gpu(name="0", memory_bytes=10**16, bandwidth=1e9, speed=0.5),),
    )
    frame = simulate(hand.schedule(), tiny_trace(), slow).frame
    assert (frame["end_ns"] - frame["start_ns"]).tolist() == [6 * 2, 16 * 2, 8 * 2, 80 * 4]


def test_a_copy_waits_for_its_delay_and_lanes_run_in_order() -> None:
    hand = Hand()
    hand.task(TaskKind.SWAP_IN, tensor_kind=WEIGHT, bytes=100)
    hand.task(TaskKind.SWAP_IN, tensor_kind=WEIGHT, bytes=0)
    hand.task(TaskKind.SWAP_OUT, tensor_kind=WEIGHT, bytes=50)
    assert spans(hand.schedule(), machine(copy_overhead_ns=7)) == [(0, 107), (107, 114), (0, 57)]


def test_ends_are_whole_nanoseconds_rounded_up() -> None:
    hand = Hand()
    hand.task(TaskKind.SWAP_IN, tensor_kind=WEIGHT, bytes=10)
    assert spans(hand.schedule(), machine(bandwidth=3e9)) == [(0, 4)]


def under_one_root(gpus: int = 2) -> Machine:
    """GPUs of 1 byte/ns that share one link of 1 byte/ns per direction."""
    return Machine(
        name="shared",
        host=Host(memory_bytes=None, dram_bandwidth=1e12, cores=1),
        links=(Link(name="root", bandwidth=1e9),),
        gpus=tuple(Gpu(name=str(i), memory_bytes=10**16, bandwidth=1e9, link="root") for i in range(gpus)),
    )


def test_copies_share_a_link_until_one_of_them_ends() -> None:
    """100 bytes at half rate take 200 ns; of the other 300 then 200 are left, at full rate. Out is not disturbed."""
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.SWAP_IN, gpu=0, tensor_kind=WEIGHT, bytes=100)
    hand.task(TaskKind.SWAP_IN, gpu=1, tensor_kind=WEIGHT, bytes=300)
    hand.task(TaskKind.SWAP_OUT, gpu=1, tensor_kind=WEIGHT, bytes=150)
    assert spans(hand.schedule(), under_one_root()) == [(0, 200), (0, 400), (0, 150)]


def test_a_copy_that_joins_slows_the_one_in_flight() -> None:
    """From 60 to 140 both get half: 40 bytes each. Then the second sends its other 60 alone."""
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.FORWARD, gpu=1, samples=(0, 1))
    hand.task(TaskKind.SWAP_IN, gpu=0, tensor_kind=WEIGHT, bytes=100)
    hand.task(TaskKind.SWAP_IN, gpu=1, tensor_kind=WEIGHT, bytes=100, waits_for=(0,))
    assert spans(hand.schedule(), under_one_root(), Given([60, 0, 0])) == [(0, 60), (0, 140), (60, 200)]


def test_p2p_takes_its_place_in_the_receivers_lane() -> None:
    """The third copy waits for the first, which has the same receiver; the second goes on at once."""
    hand = Hand(plan(gpus=3, minibatch=3))
    for sender, receiver in ((0, 2), (0, 1), (1, 2)):
        hand.task(TaskKind.P2P, gpu=sender, peer=receiver, tensor_kind=TensorKind.ACTIVATION, bytes=100)
    assert spans(hand.schedule(), machine(gpus=3)) == [(0, 100), (100, 200), (100, 200)]


def test_all_reduce_sends_round_a_ring() -> None:
    """Three GPUs, 300 bytes each: 2·2·300 bytes in all, 400 over each edge."""
    hand = Hand(plan(gpus=3, minibatch=3))
    hand.task(TaskKind.ALLREDUCE, gpu=None, tensor_kind=TensorKind.GRADIENT, bytes=1200)
    assert spans(hand.schedule(), machine(gpus=3, copy_overhead_ns=5)) == [(0, 405)]


def test_all_reduce_of_one_gpu_takes_no_time() -> None:
    hand = Hand()
    hand.task(TaskKind.ALLREDUCE, gpu=None, tensor_kind=TensorKind.GRADIENT)
    assert spans(hand.schedule(), machine()) == [(0, 0)]


def test_a_reduction_shares_host_memory_with_copies() -> None:
    """DRAM of 1 byte/ns: both get half until 200 bytes each are through, then the reduction has it alone."""
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.REDUCE, gpu=None)
    hand.task(TaskKind.SWAP_OUT, tensor_kind=TensorKind.GRADIENT, bytes=200)
    schedule = hand.schedule()
    assert spans(schedule, machine(gpus=2, dram=1e9), Given([0, 0], moved=300)) == [(0, 500), (0, 400)]


def test_a_reduction_moves_every_replica_and_the_sum() -> None:
    """Layer 1 has gradients of 200 bytes; two read and one written, at 1 byte/ns."""
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.REDUCE, 1, gpu=None)
    timeline = simulate(hand.schedule(gpu_peak=0, host_peak=0), tiny_trace(), machine(gpus=2, dram=1e9))
    assert timeline.step_time_ns == 600


def test_steps_repeat_the_isolated_step() -> None:
    timeline = simulate(one_gpu_schedule(), tiny_trace(), machine(), steps=3)
    first, last = (timeline.frame[timeline.frame["step"] == step].reset_index() for step in (0, 2))
    assert timeline.step_times_ns == [744, 744, 744]
    assert (last["start_ns"] - first["start_ns"]).unique().tolist() == [2 * 744]
    assert timeline.info.steps == 3


def test_what_the_timeline_says_about_the_run() -> None:
    info = simulate(one_gpu_schedule(), tiny_trace(), machine()).info
    assert info.source == "simulated"
    assert info.machine == "bench"
    assert info.lower_bound_ns == 744
    assert info.provenance == {"measured": 6}  # two layers: forward, backward and update, one microbatch size
    assert info.critical_path is not None
    assert sum(info.critical_path.shares().values()) == pytest.approx(1)


def test_injected_durations_replace_the_traces() -> None:
    schedule = one_gpu_schedule()
    times = [1000 * (task.kind is TaskKind.UPDATE) for task in schedule.tasks]
    assert simulate(schedule, tiny_trace(), machine(), durations=Given(times)).step_time_ns == 2588


def test_extrapolation_is_refused_unless_asked_for() -> None:
    hand = Hand(plan(minibatch=3, u_fwd=3, u_bwd=3))
    hand.task(TaskKind.FORWARD, samples=(0, 3))
    schedule = hand.schedule(gpu_peak=0, host_peak=0)
    with pytest.raises(TraceError, match="--extrapolate"):
        simulate(schedule, tiny_trace(), machine())
    timeline = simulate(schedule, tiny_trace(), machine(), extrapolate=True)
    assert timeline.step_time_ns == 9
    assert timeline.info.provenance == {"extrapolated": 2}


# What cannot run.


def test_a_stall_names_each_blocked_task_and_what_it_waits_for() -> None:
    """A forward waits for weights that come in only after a copy out, which waits for the forward."""
    hand = Hand()
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.DATA, bytes=10)
    hand.task(TaskKind.FORWARD, waits_for=(0, 3), samples=(0, 1), microbatch=0)
    hand.task(TaskKind.SWAP_OUT, 1, tensor_kind=TensorKind.STASH, bytes=10, waits_for=(1,))
    hand.task(TaskKind.SWAP_IN, tensor_kind=WEIGHT, bytes=10, waits_for=(2,))
    with pytest.raises(Stalled) as caught:
        spans(hand.schedule(), machine())
    assert caught.value.blocked == (
        "swap_in weight 0 on gpu 0 swap_in (task 3) waits for swap_out stash 1 on gpu 0 swap_out (task 2)",
        "forward 0 m0 on gpu 0 compute (task 1) waits for swap_in weight 0 on gpu 0 swap_in (task 3)",
        "swap_out stash 1 on gpu 0 swap_out (task 2) waits for forward 0 m0 on gpu 0 compute (task 1)",
    )


def test_a_dependency_on_no_task_is_refused() -> None:
    hand = Hand()
    hand.task(TaskKind.FORWARD, waits_for=(7,), samples=(0, 1))
    with pytest.raises(ScheduleError, match=r"forward 0 on gpu 0 compute \(task 0\) waits for task 7"):
        spans(hand.schedule(), machine())


def test_a_schedule_without_tasks_is_refused() -> None:
    with pytest.raises(ScheduleError, match="no tasks"):
        simulate(Hand().schedule(gpu_peak=0, host_peak=0), tiny_trace(), machine())


def one_forward(*, gpus: int = 1, **memory: Any) -> Schedule:
    hand = Hand(plan(gpus=gpus))
    hand.task(TaskKind.FORWARD, samples=(0, 1))
    return hand.schedule(**{"gpu_peak": 500, "host_peak": 70, **memory})


def test_another_models_trace_is_refused() -> None:
    trace = tiny_trace()
    with pytest.raises(ScheduleError, match="it is of tiny with 2 layers, and the trace of other with 2"):
        simulate(one_forward(), replace(trace, model="other"), machine())


def test_a_machine_that_is_too_small_is_refused() -> None:
    small = machine().with_usable_memory(499)
    with pytest.raises(DoesNotFit, match=r"GPU 0.*the planned buffers need 500 B"):
        simulate(one_forward(), tiny_trace(), small)
    with pytest.raises(DoesNotFit, match=r"the host.*need 70 B"):
        simulate(one_forward(), tiny_trace(), machine().with_host_memory(69))
    assert simulate(one_forward(), tiny_trace(), machine().with_host_memory(None)).step_time_ns == 3


def test_too_few_gpus_are_refused() -> None:
    with pytest.raises(PlanError, match="the schedule is for 2 GPUs, machine bench has 1"):
        simulate(one_forward(gpus=2), tiny_trace(), machine())


def test_no_steps_are_refused() -> None:
    with pytest.raises(PlanError, match="0 steps"):
        simulate(one_forward(), tiny_trace(), machine(), steps=0)


def test_more_rows_than_a_timeline_holds_are_refused() -> None:
    schedule = one_gpu_schedule()
    with pytest.raises(PlanError, match=f"simulate at most {4_000_000 // len(schedule.tasks)} steps"):
        simulate(schedule, tiny_trace(), machine(), steps=4_000_000)


def test_steps_longer_than_a_timeline_can_hold_are_refused() -> None:
    for crawling in (machine(bandwidth=1e-9), machine(speed=1e-18)):
        with pytest.raises(PlanError, match=r"1 step\(s\) take .* s, and times end at 4\.61e\+09 s; look for"):
            simulate(one_gpu_schedule(), tiny_trace(), crawling)
    with pytest.raises(PlanError, match=r"[0-9]+ step\(s\) take"):
        simulate(one_gpu_schedule(), tiny_trace(), machine(), steps=2**62)


def test_memory_beyond_the_plan_is_an_error_that_names_task_and_bytes() -> None:
    schedule = one_gpu_schedule()
    tight = replace(schedule.memory, host_peak_bytes=908 + 39)
    with pytest.raises(ScheduleError, match=r"swap_out activation 1 m1.*948 B are held then, 947 B are planned"):
        simulate(replace(schedule, memory=tight), tiny_trace(), machine())


def test_buffers_left_at_the_end_are_an_error() -> None:
    hand = Hand()
    weight = hand.buffer(WEIGHT, 0, 10)
    hand.task(TaskKind.SWAP_IN, tensor_kind=WEIGHT, bytes=10, writes=(weight,), allocates=(weight,))
    with pytest.raises(ScheduleError, match="never freed: buffer 0"):
        spans(hand.schedule(), machine())


# Against an independent evaluation.

LANES = [(TaskKind.FORWARD, g) for g in (0, 1)] + [
    (kind, g) for kind in (TaskKind.SWAP_IN, TaskKind.SWAP_OUT) for g in (0, 1)
]


@st.composite
def schedules(draw: st.DrawFn) -> tuple[Schedule, list[int]]:
    """Tasks on the lanes of two GPUs and of the host that wait for any earlier ones, and a length for each."""
    hand = Hand(plan(gpus=2))
    lengths = draw(st.lists(st.integers(0, 50), min_size=1, max_size=25))
    for number, length in enumerate(lengths):
        kind, gpu = draw(st.sampled_from([*LANES, (TaskKind.UPDATE, None)]))
        waits = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        copied = {"tensor_kind": WEIGHT, "bytes": length} if kind.is_copy else {}
        hand.task(kind, gpu=gpu, waits_for=tuple(sorted(waits)), samples=(0, 1), **copied)
    return hand.schedule(), lengths


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_without_sharing_it_equals_one_pass_over_the_dependencies(case: tuple[Schedule, list[int]]) -> None:
    """Every GPU has its own links and host memory is fast, so no copy slows another."""
    schedule, lengths = case
    step = run_step(schedule, Demands(machine(gpus=2), Given(lengths), 2))
    assert step == replay_times(schedule, lengths)


@given(schedules())
@settings(max_examples=60, deadline=None)
def test_sharing_only_delays_and_keeps_every_order(case: tuple[Schedule, list[int]]) -> None:
    schedule, lengths = case
    alone = replay_times(schedule, lengths)
    step = run_step(schedule, Demands(under_one_root(), Given(lengths), 2))
    assert all(shared >= free for shared, free in zip(step.end_ns, alone.end_ns, strict=True))
    for task, before in enumerate(schedule.predecessors):
        assert step.start_ns[task] == max((step.end_ns[other] for other in before), default=0)


def test_small_copies_take_what_their_size_reaches() -> None:
    hand = Hand()
    for size in (100, 1000):
        hand.task(TaskKind.SWAP_IN, bytes=size)
    slow_start = machine(efficiency=((100, 0.25), (1000, 0.5)))
    assert spans(hand.schedule(), slow_start) == [(0, 400), (400, 2400)]
    assert bound_ns(hand.schedule(), Demands(slow_start, Given(), 1)) == 2400
