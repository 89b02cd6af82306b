"""Why a step takes as long as it does."""

from __future__ import annotations

from typing import Any

import pytest

from sim.builders import build
from sim.engine.durations import forward_share
from sim.engine.simulate import simulate
from sim.plan import Plan
from sim.schedule import TaskKind, TensorKind
from sim.timelines.critical_path import Cause, CriticalPath, Piece, critical_path
from sim.timelines.replay import StepTimes, replay_times
from tests.random_plans import random_case
from tests.sim.handmade import Hand, machine, one_gpu_schedule, paged, plan, tiny_trace
from traces.costs import Costs

NOTHING = {cause.value: 0.0 for cause in Cause}


def quarter(_: object) -> float:
    return 0.25


def path(hand: Hand, *lengths: int) -> CriticalPath:
    """Of a schedule whose tasks last so long, without recompute."""
    schedule = hand.schedule()
    return critical_path(schedule, replay_times(schedule, lengths), lambda task: 0.0)


def shares(hand: Hand, *lengths: int) -> dict[str, float]:
    """The causes that take some time."""
    return {cause: share for cause, share in path(hand, *lengths).shares().items() if share}


def chain(of: Plan | None = None) -> Hand:
    """In, forward, backward, out, update: each waits for the one before; a short copy beside the forward."""
    hand = Hand(of or plan())
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT)
    hand.task(TaskKind.FORWARD, samples=(0, 1), waits_for=(0,))
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.DATA)
    hand.task(TaskKind.BACKWARD, samples=(0, 1), waits_for=(1, 2))
    hand.task(TaskKind.SWAP_OUT, tensor_kind=TensorKind.GRADIENT, waits_for=(3,))
    hand.task(TaskKind.UPDATE, gpu=None, waits_for=(4,))
    return hand


def test_shares_of_a_chain() -> None:
    """Lengths 10, 20, 5, 40, 10, 20 of 100: the second copy in is not on the path, a quarter of 40 is recompute."""
    schedule = chain().schedule()
    times = replay_times(schedule, [10, 20, 5, 40, 10, 20])
    assert critical_path(schedule, times, quarter).tasks == (0, 1, 3, 4, 5)
    assert critical_path(schedule, times, quarter).shares() == {
        **NOTHING,
        "compute": 0.5,
        "recompute": 0.1,
        "swap_in": 0.1,
        "swap_out": 0.1,
        "update": 0.2,
    }


def test_the_longer_branch_is_the_path() -> None:
    schedule = chain().schedule()
    times = replay_times(schedule, [10, 5, 20, 40, 10, 20])
    assert critical_path(schedule, times, quarter).tasks == (0, 2, 3, 4, 5)


def test_ties_go_to_the_lowest_id() -> None:
    schedule = chain().schedule()
    times = replay_times(schedule, [10, 20, 20, 40, 10, 20])
    assert critical_path(schedule, times, quarter).tasks == (0, 1, 3, 4, 5)


def test_the_only_forward_of_fused_layers_is_no_recompute() -> None:
    hand = Hand()
    hand.task(TaskKind.BACKWARD, 1, samples=(0, 1))
    schedule = hand.schedule()
    assert critical_path(schedule, replay_times(schedule, [8]), quarter).shares()["compute"] == 1
    plain = chain(paged()).schedule()
    assert critical_path(plain, replay_times(plain, [0, 0, 0, 8, 0, 0]), quarter).shares()["recompute"] == 0.25


def test_gaps_are_idle() -> None:
    """Measured: the first task starts 10 late, and each of the others 10 after what it waited for."""
    schedule = chain().schedule()
    starts, ends = [10, 40, 40, 80, 110, 130], [30, 70, 45, 100, 120, 150]
    times = StepTimes([0, *starts[1:]], [20, *ends[1:]])
    found = critical_path(schedule, times, quarter).shares()
    assert found["idle"] == pytest.approx((20 + 10 + 10 + 10) / 150)
    assert sum(found.values()) == pytest.approx(1)


def test_idle_before_the_first_task_of_the_path() -> None:
    """The path begins at 10 with task 1 of another lane; the step began at 0."""
    hand = Hand()
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT)
    hand.task(TaskKind.FORWARD, samples=(0, 1))
    assert critical_path(hand.schedule(), StepTimes([0, 10], [5, 20]), quarter).shares() == {
        **NOTHING,
        "compute": 0.5,
        "idle": 0.5,
    }


def test_clocks_that_overlap_count_time_once() -> None:
    schedule = chain().schedule()
    times = StepTimes([0, 9, 9, 29, 69, 79], [10, 30, 15, 70, 80, 100])
    found = critical_path(schedule, times, quarter).shares()
    assert sum(found.values()) == pytest.approx(1)
    assert found["idle"] == 0
    assert found["swap_in"] == pytest.approx(0.09)


def test_a_step_that_takes_no_time_is_idle() -> None:
    schedule = chain().schedule()
    assert critical_path(schedule, replay_times(schedule, [0] * 6), quarter).shares() == {**NOTHING, "idle": 1.0}


def test_the_hand_made_step() -> None:
    """Weights of layer 1 are waited for; then its gradient's copy, and layer 0's, keep the way out busy."""
    found = simulate(one_gpu_schedule(), tiny_trace(), machine()).info.critical_path
    assert found is not None
    assert found.shares()["idle"] == 0
    assert {name for name, share in found.shares().items() if share} == {
        "compute", "link:gpu0 down", "link:gpu0 up", "update",
    }  # fmt: skip
    assert found.shares()["update"] == pytest.approx(40 / 744)


def test_forward_share_is_by_the_trace() -> None:
    hand = Hand()
    hand.task(TaskKind.BACKWARD, (0, 1), samples=(0, 1))
    assert forward_share(hand.tasks[0], Costs(tiny_trace())) == 8 / 26


def test_all_reduce_reduction_and_update() -> None:
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.ALLREDUCE, gpu=None, tensor_kind=TensorKind.GRADIENT)
    hand.task(TaskKind.REDUCE, gpu=None, waits_for=(0,))
    hand.task(TaskKind.UPDATE, gpu=None)
    assert shares(hand, 1, 2, 5) == {"allreduce": 1 / 8, "reduce": 2 / 8, "update": 5 / 8}


@pytest.mark.parametrize(("microbatches", "copy"), [(1, 0), (3, 0), (3, 1), (8, 1)])
def test_the_bubble_of_a_pipeline_of_two_equal_stages(microbatches: int, copy: int) -> None:
    """GPipe: forwards of 10 ns, backwards of 20 ns, copies between them. GPU 0 stands still while GPU 1 does its last
    forward and its first backward: 30 of the 30 (M + 1) ns, and two copies. That is (N-1) / (M+N-1)."""
    hand, lengths = Hand(plan(gpus=2)), []

    def task(kind: TaskKind, gpu: int, length: int, **fields: Any) -> int:
        lengths.append(length)
        tensor = {"tensor_kind": TensorKind.ACTIVATION, "peer": 1 - gpu} if kind is TaskKind.P2P else {}
        return hand.task(kind, gpu, gpu=gpu, **tensor, **fields)

    done = {}
    for m in range(microbatches):
        first = task(TaskKind.FORWARD, 0, 10, samples=(m, m + 1))
        sent = task(TaskKind.P2P, 0, copy, waits_for=(first,))
        done[m] = task(TaskKind.FORWARD, 1, 10, samples=(m, m + 1), waits_for=(sent,))
    for m in reversed(range(microbatches)):
        last = task(TaskKind.BACKWARD, 1, 20, samples=(m, m + 1), waits_for=(done[m],))
        sent = task(TaskKind.P2P, 1, copy, waits_for=(last,))
        task(TaskKind.BACKWARD, 0, 20, samples=(m, m + 1), waits_for=(sent,))
    total = 30 * (microbatches + 1) + 2 * copy
    found = path(hand, *lengths).shares()
    assert found["compute"] == pytest.approx(30 * microbatches / total)
    assert found["bubble"] + found.get("p2p", 0) == pytest.approx((30 + 2 * copy) / total)
    assert copy <= found.get("p2p", 0) * total <= 2 * copy + 1e-9  # the other one is hidden behind GPU 1's forwards


def test_where_the_own_gpu_works_meanwhile_there_is_no_bubble() -> None:
    """GPU 1 waits for a long copy from GPU 0, and had something to do while GPU 0 computed."""
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.FORWARD, 0, gpu=0, samples=(0, 1))
    hand.task(TaskKind.FORWARD, 1, gpu=1, samples=(0, 1))
    hand.task(TaskKind.P2P, 1, gpu=0, peer=1, tensor_kind=TensorKind.ACTIVATION, waits_for=(0,))
    hand.task(TaskKind.FORWARD, 1, gpu=1, samples=(1, 2), waits_for=(2,))
    assert shares(hand, 10, 12, 20, 8) == {"compute": 18 / 38, "p2p": 20 / 38}
    assert path(hand, 10, 12, 20, 8).tasks == (0, 2, 3)


def test_a_slow_gpu_that_holds_up_an_all_reduce_is_a_bubble_of_the_others() -> None:
    """Both GPUs compute, GPU 1 for longer; then gradients are added, and GPU 0 updates."""
    hand = Hand(plan(gpus=2))
    for gpu in (0, 1):
        hand.task(TaskKind.BACKWARD, 0, gpu=gpu, samples=(gpu, gpu + 1))
    hand.task(TaskKind.ALLREDUCE, gpu=None, tensor_kind=TensorKind.GRADIENT, waits_for=(0, 1))
    hand.task(TaskKind.UPDATE, gpu=0, waits_for=(2,))
    assert shares(hand, 10, 30, 5, 5) == {"compute": 0.25, "bubble": 0.5, "allreduce": 0.125, "update": 0.125}


def swapping(offset: int, *, dirty: bool = False) -> Hand:
    """Weights of layer 0 come in and are used, then those of layer 1, at ``offset``; with ``dirty`` the first ones are
    copied out before they are freed."""
    hand = Hand()
    first = hand.buffer(TensorKind.WEIGHT, 0, 100, offset=0)
    second = hand.buffer(TensorKind.WEIGHT, 1, 100, offset=offset)
    kind = TensorKind.WEIGHT
    hand.task(TaskKind.SWAP_IN, 0, tensor_kind=kind, writes=(first,), allocates=(first,))
    hand.task(TaskKind.FORWARD, 0, samples=(0, 1), waits_for=(0,), reads=(first,), frees=() if dirty else (first,))
    if dirty:
        hand.task(TaskKind.SWAP_OUT, 0, tensor_kind=kind, waits_for=(1,), reads=(first,), frees=(first,))
    freed = len(hand.tasks) - 1
    hand.task(TaskKind.SWAP_IN, 1, tensor_kind=kind, waits_for=(freed,), writes=(second,), allocates=(second,))
    hand.task(TaskKind.FORWARD, 1, samples=(0, 1), waits_for=(freed + 1,), reads=(second,), frees=(second,))
    return hand


def test_a_copy_that_had_no_room_is_waiting_for_memory() -> None:
    """The second weights could have come in beside the first forward, of 30 ns; they had to wait for its memory."""
    assert shares(swapping(0), 10, 30, 20, 40) == {
        "swap_in": 10 / 100, "compute": 70 / 100, "memory_wait": 20 / 100,
    }  # fmt: skip


def test_a_copy_that_is_longer_than_it_was_late_waits_only_for_so_long() -> None:
    """Beside the forward, 30 of the 50 ns would have been hidden."""
    assert path(swapping(0), 10, 30, 50, 10).pieces == (
        Piece(0, 10, "swap_in", 0),
        Piece(10, 40, "compute", 1),
        Piece(40, 70, "memory_wait", 2),
        Piece(70, 90, "swap_in", 2),
        Piece(90, 100, "compute", 3),
    )


def test_copies_that_make_room_are_waiting_for_memory() -> None:
    """The first weights go out, 15 ns, before the second come in."""
    assert path(swapping(0, dirty=True), 10, 30, 15, 20, 25).pieces == (
        Piece(0, 10, "swap_in", 0),
        Piece(10, 40, "compute", 1),
        Piece(40, 55, "memory_wait", 2),
        Piece(55, 75, "memory_wait", 3),
        Piece(75, 100, "compute", 4),
    )


def test_a_dependency_without_common_memory_is_no_wait_for_memory() -> None:
    """The second weights lie elsewhere: whatever they wait for the forward for, it is not its memory."""
    assert "memory_wait" not in shares(swapping(100), 10, 30, 20, 40)


@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_pieces_cover_the_step_and_a_simulation_has_no_gaps(seed: int) -> None:
    """Each lies within its task's time, and computing that counts as such is of one GPU after the other."""
    case = random_case(seed)
    schedule = build(case.plan, case.trace, case.machine)
    timeline = simulate(schedule, case.trace, case.machine)
    found = timeline.info.critical_path
    assert found is not None
    assert [piece.start_ns for piece in found.pieces] == [0, *(piece.end_ns for piece in found.pieces[:-1])]
    assert found.pieces[-1].end_ns == timeline.step_time_ns
    assert sum(found.shares().values()) == pytest.approx(1)
    assert found.shares()["idle"] == 0
    rows = timeline.frame.set_index("task")
    for piece in found.pieces:
        assert piece.task is not None
        assert rows["start_ns"][piece.task] <= piece.start_ns < piece.end_ns <= rows["end_ns"][piece.task]
        assert piece.cause.startswith("link:") <= schedule.tasks[piece.task].kind.is_copy
