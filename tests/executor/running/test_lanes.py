from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable

import pytest

from executor.devices.emulated import EmulatedDevices
from executor.devices.facade import Aborted, Queue
from executor.errors import OutOfArena, TaskFailed
from executor.running.lanes import LaneRunner
from sim.builders import build
from sim.schedule import Schedule, Task, TaskKind, TensorKind
from tests.executor import made
from tests.random_plans import random_case
from tests.sim.handmade import Hand


class Ledger:
    """Memory that only notes what is held."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.held = {buffer.id for buffer in schedule.residents}

    def allocate(self, number: int) -> int:
        assert number not in self.held
        self.held.add(number)
        return self.schedule.buffers[number].bytes

    def free(self, number: int) -> int:
        self.held.remove(number)
        return self.schedule.buffers[number].bytes


def runner(schedule: Schedule, devices: EmulatedDevices | None = None) -> LaneRunner:
    return LaneRunner(schedule, devices or EmulatedDevices(made.machine(4)), Ledger(schedule))


def two_lanes() -> Schedule:
    """gpu 0 computes twice; a copy waits for the first and the second waits for the copy."""
    hand = Hand()
    first = hand.task(TaskKind.FORWARD, 0)
    copy = hand.task(TaskKind.SWAP_OUT, 0, tensor_kind=TensorKind.ACTIVATION, waits_for=(first,))
    hand.task(TaskKind.FORWARD, 1, waits_for=(copy,))
    return hand.schedule()


def lanes_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("harmony")]


def test_tasks_run_in_order_in_a_thread_for_each_lane() -> None:
    ran: list[tuple[int, str]] = []

    def perform(task: Task, queue: Queue) -> int:
        ran.append((task.id, threading.current_thread().name))
        return 10 + task.id

    walked = runner(two_lanes()).run(0, perform)
    assert ran == [(0, "harmony gpu 0 compute"), (1, "harmony gpu 0 swap_out"), (2, "harmony gpu 0 compute")]
    assert walked.copied_bytes == [10, 11, 12]
    starts, ends = walked.starts, walked.ends
    assert starts[0] <= ends[0] <= starts[1] <= ends[1] <= starts[2] <= ends[2]
    assert lanes_alive() == []


@pytest.mark.parametrize("seed", range(12))
def test_no_task_starts_before_what_it_waits_for_has_ended(seed: int) -> None:
    """Under random delays, for any schedule; and memory is taken at starts and given back at ends."""
    case = random_case(seed, layers=4)
    schedule = build(*case)
    ledger = Ledger(schedule)
    ended: set[int] = set()
    draw = random.Random(seed)

    def perform(task: Task, queue: Queue) -> int:
        assert ended.issuperset(schedule.predecessors[task.id])
        assert ledger.held.issuperset((*task.reads, *task.writes))
        if draw.random() < 0.05:
            time.sleep(draw.random() * 1e-3)
        ended.add(task.id)
        return task.bytes

    walked = LaneRunner(schedule, EmulatedDevices(made.machine(4)), ledger).run(0, perform)
    assert len(ended) == len(schedule.tasks)
    assert ledger.held == {buffer.id for buffer in schedule.residents}
    assert walked.copied_bytes == [task.bytes for task in schedule.tasks]
    changes = [(change.buffer, change.bytes > 0) for change in walked.changes]
    assert sorted(changes) == sorted(
        [(b, True) for task in schedule.tasks for b in task.allocates]
        + [(b, False) for task in schedule.tasks for b in task.frees]
    )


def fail_in(number: int, error: BaseException) -> Callable[[Task, Queue], int]:
    def perform(task: Task, queue: Queue) -> int:
        if task.id == number:
            raise error
        return 0

    return perform


def test_a_failing_task_is_named_with_its_lane_step_and_cause() -> None:
    cause = ZeroDivisionError("by zero")
    with pytest.raises(TaskFailed) as failure:
        runner(two_lanes()).run(7, fail_in(1, cause))
    assert str(failure.value) == (
        "step 7, lane gpu 0 swap_out: swap_out activation 0 on gpu 0 swap_out (task 1) failed: "
        "ZeroDivisionError: by zero"
    )
    assert failure.value.__cause__ is cause
    assert lanes_alive() == []


def test_an_error_with_a_message_of_its_own_is_not_named_twice() -> None:
    cause = OutOfArena(0, "buffer 3", 10, 5, "too big")
    with pytest.raises(TaskFailed) as failure:
        runner(two_lanes()).run(0, fail_in(0, cause))
    assert failure.value.cause == str(cause)


def test_a_failure_wakes_lanes_that_sleep_and_stops_those_that_wait() -> None:
    hand = Hand()
    sleeper = hand.task(TaskKind.FORWARD, 0)
    failing = hand.task(TaskKind.SWAP_IN, 0, tensor_kind=TensorKind.WEIGHT)
    hand.task(TaskKind.SWAP_OUT, 0, tensor_kind=TensorKind.STASH, waits_for=(sleeper, failing))
    devices = EmulatedDevices(made.machine(1, speed=1e-9))
    asleep = threading.Event()
    ran = []

    def perform(task: Task, queue: Queue) -> int:
        ran.append(task.id)
        if task.id == sleeper:
            queue.compute(asleep.set)  # and then for hours, at that pace
        if task.id == failing:
            asleep.wait()
            raise ValueError("no")
        return 0

    with pytest.raises(TaskFailed, match="swap_in weight 0"):
        runner(hand.schedule(), devices).run(0, perform)
    assert sorted(ran) == [sleeper, failing]
    assert lanes_alive() == []


def test_the_first_of_several_failures_is_told() -> None:
    hand = Hand()
    first = hand.task(TaskKind.SWAP_IN, 0, tensor_kind=TensorKind.WEIGHT)
    second = hand.task(TaskKind.FORWARD, 0)
    has_failed = threading.Event()

    def perform(task: Task, queue: Queue) -> int:
        if task.id == second:
            has_failed.wait()
            time.sleep(0.01)
            raise ValueError("second")
        has_failed.set()
        raise ValueError("first")

    with pytest.raises(TaskFailed, match=rf"\(task {first}\) failed: ValueError: first"):
        runner(hand.schedule()).run(0, perform)


def test_an_interrupt_stops_all_lanes() -> None:
    """As Ctrl-C does: it arrives in the main thread, which waits for the lanes."""
    devices = EmulatedDevices(made.machine(1, speed=1e-9))

    def perform(task: Task, queue: Queue) -> int:
        queue.compute(lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
        return 0

    with pytest.raises(KeyboardInterrupt):
        runner(two_lanes(), devices).run(0, perform)
    assert lanes_alive() == []


def test_a_step_that_was_given_up_leaves_the_runner_usable() -> None:
    steps = runner(two_lanes())
    with pytest.raises(TaskFailed):
        steps.run(0, fail_in(1, ValueError("once")))
    assert steps.run(1, lambda task, queue: 0).copied_bytes == [0, 0, 0]


def test_aborting_is_no_failure_of_the_lane_that_it_stops() -> None:
    hand = Hand()
    hand.task(TaskKind.FORWARD, 0)
    failing = hand.task(TaskKind.SWAP_IN, 0, tensor_kind=TensorKind.WEIGHT)
    has_failed = threading.Event()

    def perform(task: Task, queue: Queue) -> int:
        if task.id == failing:
            has_failed.set()
            raise ValueError("this")
        has_failed.wait()
        raise Aborted

    with pytest.raises(TaskFailed, match="ValueError: this"):
        runner(hand.schedule()).run(0, perform)


def test_a_schedule_without_tasks() -> None:
    assert runner(Hand().schedule()).run(0, lambda task, queue: 0).starts == []
