"""Lanes at work: a thread for every busy lane, which walks its tasks in order.

A task starts when all its predecessors have ended (on CUDA: have been enqueued, and the queue waits for their marks).
Whatever goes wrong in one lane gives up the whole step: all other lanes stop at their next wait, and the error names
the lane and the task. No thread outlives :meth:`LaneRunner.run`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from sim.schedule import LaneKey, Schedule, Task
from traces.errors import HarmonyError

from ..devices.facade import Aborted, Devices, Mark, Queue
from ..errors import TaskFailed

Perform = Callable[[Task, Queue], int]
"""Carries out a task; returns the bytes it copied."""


class Memory(Protocol):
    """Where buffers are taken from and given back to, by id; both return their bytes."""

    def allocate(self, number: int) -> int:
        """Take a buffer's memory."""

    def free(self, number: int) -> int:
        """Give it back."""


class Change(NamedTuple):
    """A buffer taken (``bytes`` > 0) or given back (< 0) at a mark."""

    mark: Mark
    buffer: int
    bytes: int


class Walked:
    """One step as it happened, by task id: marks at starts and ends, and bytes copied; and what memory it took."""

    def __init__(self, tasks: int) -> None:
        self.starts: list[Mark] = [None] * tasks
        self.ends: list[Mark] = [None] * tasks
        self.copied_bytes = [0] * tasks
        self.changes: list[Change] = []


class _Stop(NamedTuple):
    """A task of a lane, and the tasks of other lanes before it."""

    task: Task
    others: tuple[int, ...]


class LaneRunner:
    """Runs a schedule, time and again. It may be of several ``steps`` that are unrolled."""

    def __init__(self, schedule: Schedule, devices: Devices, memory: Memory, steps: int = 1) -> None:
        self._tasks, self._devices, self._memory = len(schedule.tasks), devices, memory
        self._steps = steps
        self._stops: dict[LaneKey, list[_Stop]] = {}
        for task, before in zip(schedule.tasks, schedule.predecessors, strict=True):
            lane = task.lanes[0]
            others = tuple(other for other in before if schedule.tasks[other].lanes[0] != lane)
            self._stops.setdefault(lane, []).append(_Stop(task, others))
        self._queues = {lane: devices.queue(lane) for lane in self._stops}

    def run(self, number: int, perform: Perform) -> Walked:
        """Run step ``number`` (and those unrolled after it); returns when everything has ended.

        Raises TaskFailed (from what happened) when a task fails, and KeyboardInterrupt as it is; all lanes have
        stopped by then.
        """
        step = _Step(self._tasks, len(self._stops), self._devices, self._memory, perform, number, self._steps)
        threads = [
            threading.Thread(
                target=step.walk, args=(lane, self._queues[lane], stops), name=f"harmony {lane_name(lane)}", daemon=True
            )
            for lane, stops in self._stops.items()
        ]
        started = []
        with _interrupts(step.interrupt):
            try:
                for thread in threads:
                    thread.start()
                    started.append(thread)
                self._devices.begin()
                step.start()
                if threads:
                    step.idle.get()
                if step.interrupted:
                    raise KeyboardInterrupt
            except BaseException:
                step.give_up()
                raise
            finally:
                for thread in started:
                    thread.join()
        if step.failure is not None:
            with suppress(RuntimeError):  # a broken device says so once more
                self._devices.finish()
            raise step.failure
        self._devices.finish()
        return step.walked


@contextmanager
def _interrupts(notify: Callable[[], object]) -> Iterator[None]:
    """Let Ctrl-C call ``notify``, where it would raise KeyboardInterrupt at any point of the main thread, while it
    waits for its lanes to end, say. Handlers that someone else has set stay."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: notify())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Step:
    """One step on its way, or several that are unrolled."""

    def __init__(
        self, tasks: int, lanes: int, devices: Devices, memory: Memory, perform: Perform, number: int, steps: int
    ) -> None:
        self.walked = Walked(tasks)
        self.failure: TaskFailed | None = None
        self.interrupted = False
        self.idle: SimpleQueue[None] = SimpleQueue()  # as a handler of signals needs it: unlike Event, reentrant
        self._go: SimpleQueue[None] = SimpleQueue()
        self._devices, self._memory, self._perform, self._number = devices, memory, perform, number
        self._tasks_of_step = tasks // steps
        self._ended = [threading.Event() for _ in range(tasks)]
        self._given_up = False
        self._lanes = self._busy = lanes
        self._lock = threading.Lock()

    def walk(self, lane: LaneKey, queue: Queue, stops: list[_Stop]) -> None:
        """Run a lane's tasks. Body of its thread."""
        task = None
        try:
            self._go.get()
            for task, others in stops:
                for other in others:
                    self._ended[other].wait()
                    queue.wait(self.walked.ends[other])
                if self._given_up:
                    break
                self._do(task, queue)
        except Aborted:
            pass
        except BaseException as error:  # whatever it is, it must end the run and not only this thread
            self._fail(lane, task, error)
        finally:
            with self._lock:
                self._busy -= 1
                if not self._busy:
                    self.idle.put(None)

    def start(self) -> None:
        """Let all lanes go."""
        for _ in range(self._lanes):
            self._go.put(None)

    def interrupt(self) -> None:
        """Wake whoever waits for the step."""
        self.interrupted = True
        self.idle.put(None)

    def give_up(self) -> None:
        """Let all lanes stop at their next wait."""
        self._given_up = True
        self._devices.abort()
        self.start()
        for ended in self._ended:
            ended.set()

    def _do(self, task: Task, queue: Queue) -> None:
        walked = self.walked
        start = walked.starts[task.id] = queue.mark()
        for number in task.allocates:
            walked.changes.append(Change(start, number, self._memory.allocate(number)))
        walked.copied_bytes[task.id] = self._perform(task, queue)
        end = queue.mark()
        for number in task.frees:
            walked.changes.append(Change(end, number, -self._memory.free(number)))
        walked.ends[task.id] = end
        self._ended[task.id].set()

    def _fail(self, lane: LaneKey, task: Task | None, error: BaseException) -> None:
        cause = str(error) if isinstance(error, HarmonyError) else f"{type(error).__name__}: {error}"
        later, place = divmod(task.id, self._tasks_of_step) if task else (0, 0)
        name = str(replace(task, id=place)) if task else str(task)
        failure = TaskFailed(name, lane_name(lane), self._number + later, cause)
        failure.__cause__ = error
        with self._lock:
            if self.failure is None:
                self.failure = failure
        self.give_up()


def lane_name(lane: LaneKey) -> str:
    """A lane as reports show it: ``gpu 0 compute``."""
    gpu, kind = lane
    return f"{'host' if gpu is None else f'gpu {gpu}'} {kind.value}"
