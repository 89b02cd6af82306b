"""Does a schedule hold together? Every fault is found and named.

1. Numbers: ids are places in the tables, and dependencies point to earlier tasks. Without that there is no order.
2. Places: devices and lanes exist and go with the kinds of tasks; layers and samples are within the model's.
3. Work: every sample passes every layer forward once and then backward once, or once in each of its two parts; every
   layer is updated once, when all losses are known, and at the end of the step when the norm is.
4. Shards: a task that needs whole tensors finds them whole.
5. Memory: every buffer is there when it is used, whatever the timing, and peaks are what the plan says. Nothing in the
   host store is read while it is written. What stays on a GPU from step to step is not left out of date (with a trace).
6. With a trace: bytes are what the trace says.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from traces.costs import Costs
from traces.schema import Trace

from ..errors import ScheduleError
from ..schedule import Lane, Schedule, Task, TaskKind
from .byte_counts import byte_faults
from .happens_before import HappensBefore
from .home import home_faults
from .memory import memory_faults
from .residents import resident_faults
from .shards import shard_faults
from .work import loss_faults, norm_faults, order_faults, part_faults, pass_faults, update_faults


def validate(schedule: Schedule, trace: Trace | None = None) -> None:
    """Raise ScheduleError with every fault of the schedule, one sentence each, naming the tasks.

    Without a trace, nothing is known about bytes, and layers need not be updated (but never twice).
    """
    numbers = list(number_faults(schedule))
    places = list(place_faults(schedule))
    faults = chain(numbers, places)
    costs = None
    if trace is not None:
        model_faults = list(_model_faults(schedule, trace))
        faults = chain(faults, model_faults)
        costs = Costs(trace, extrapolate=True) if not model_faults else None
    faults = chain(faults, pass_faults(schedule), update_faults(schedule, costs))
    if not places and not numbers:
        surely = HappensBefore(schedule)
        faults = chain(faults, order_faults(schedule, surely), norm_faults(schedule, surely))
        faults = chain(faults, loss_faults(schedule, surely), part_faults(schedule), shard_faults(schedule))
        faults = chain(faults, memory_faults(schedule, surely))
        faults = chain(faults, home_faults(schedule, surely, costs))
        if costs is not None:
            faults = chain(faults, byte_faults(schedule, costs), resident_faults(schedule, surely, costs))
    found = tuple(faults)
    if found:
        raise ScheduleError(found)


def number_faults(schedule: Schedule) -> Iterator[str]:
    """Ids that are no places, and numbers of tasks or buffers that do not exist or come too late."""
    tasks, buffers = schedule.tasks, schedule.buffers
    for place, buffer in enumerate(buffers):
        if buffer.id != place:
            yield f"buffer {buffer.id} is number {place} of the buffers; its id must be its place"
    for place, task in enumerate(tasks):
        if task.id != place:
            yield f"{task} is number {place} of the tasks; its id must be its place in the total order"
        for before in task.waits_for:
            if not 0 <= before < len(tasks):
                yield f"{task} waits for task {before}, which does not exist"
            elif before >= place:
                yield f"{task} waits for {tasks[before]}, which does not come before it in the total order"
        for verb, ids in _buffer_ids(task):
            for number in ids:
                if not 0 <= number < len(buffers):
                    yield f"{task} {verb} buffer {number}, which does not exist"


def _buffer_ids(task: Task) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return (("reads", task.reads), ("writes", task.writes), ("allocates", task.allocates), ("frees", task.frees))


def place_faults(schedule: Schedule) -> Iterator[str]:
    """Devices, lanes, layers and samples that do not exist or do not go together."""
    gpus, layers = schedule.plan.gpus, schedule.layers
    memory = schedule.memory
    for name, values in (("gpu_peak_bytes", memory.gpu_peak_bytes), ("gpu_cap_bytes", memory.gpu_cap_bytes)):
        if len(values) != gpus:
            yield f"memory.{name} is for {len(values)} GPUs, the plan for {gpus}"
    for buffer in schedule.buffers:
        if buffer.gpu is not None and not 0 <= buffer.gpu < gpus:
            yield f"buffer {buffer.id} is on gpu {buffer.gpu}; the plan has gpus 0-{gpus - 1}"
        if not 0 <= buffer.layer_first <= buffer.layer_last <= layers:  # labels are x(layers)
            yield f"buffer {buffer.id} is of layers {buffer.layer_first}-{buffer.layer_last} of {layers}"
        if buffer.shard is not None and not 0 <= buffer.shard < gpus:
            yield f"buffer {buffer.id} is shard {buffer.shard}; the plan has shards 0-{gpus - 1}"
        if buffer.bytes < 0 or (buffer.offset or 0) < 0:
            yield f"buffer {buffer.id} has {buffer.bytes} B at {buffer.offset}; neither may be negative"
    for task in schedule.tasks:
        yield from _device_faults(task, gpus)
        yield from _extent_faults(task, layers, schedule.plan.minibatch)


def _device_faults(task: Task, gpus: int) -> Iterator[str]:
    for gpu in (task.gpu, task.peer):
        if gpu is not None and not 0 <= gpu < gpus:
            yield f"{task} names gpu {gpu}; the plan has gpus 0-{gpus - 1}"
    if task.shard is not None and not 0 <= task.shard < gpus:
        yield f"{task} is of shard {task.shard}; the plan has shards 0-{gpus - 1}"
    if task.lane is not (lane := _lane_of(task)):
        yield f"{task} is in the wrong lane; it belongs in {lane.value}"
    match task.kind:
        case TaskKind.REDUCE | TaskKind.NORM | TaskKind.ALLREDUCE | TaskKind.REDUCE_SCATTER | TaskKind.ALL_GATHER:
            if task.gpu is not None:
                yield f"{task} names a gpu; it has none of its own"
        case TaskKind.UPDATE:
            pass
        case _:
            if task.gpu is None:
                yield f"{task} names no gpu"
    if (task.peer is not None) is not (task.kind is TaskKind.P2P) or task.peer == task.gpu is not None:
        yield f"{task} has gpu {task.gpu} and peer {task.peer}; a P2P copy, and nothing else, names two different gpus"


def _lane_of(task: Task) -> Lane:
    match task.kind:
        case (
            TaskKind.FORWARD
            | TaskKind.BACKWARD
            | TaskKind.BACKWARD_INPUT
            | TaskKind.BACKWARD_WEIGHT
            | TaskKind.RECOMPUTE
        ):
            return Lane.COMPUTE
        case TaskKind.UPDATE:
            return Lane.UPDATE if task.gpu is None else Lane.COMPUTE
        case TaskKind.REDUCE | TaskKind.NORM:
            return Lane.UPDATE
        case TaskKind.ALLREDUCE | TaskKind.REDUCE_SCATTER | TaskKind.ALL_GATHER:
            return Lane.COLLECTIVE
        case TaskKind.SWAP_IN:
            return Lane.SWAP_IN
        case TaskKind.SWAP_OUT:
            return Lane.SWAP_OUT
        case TaskKind.P2P:
            return Lane.P2P_OUT


def _extent_faults(task: Task, layers: int, minibatch: int) -> Iterator[str]:
    computes = task.kind in (
        TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT, TaskKind.RECOMPUTE,
    )  # fmt: skip
    last = layers if task.kind.is_copy else layers - 1  # labels, which only copies name, are x(layers)
    if not 0 <= task.layer_first <= task.layer_last <= last:
        yield f"{task} is of layers {task.layer_first}-{task.layer_last}; the model has layers 0-{layers - 1}"
    if computes and task.samples is None:
        yield f"{task} names no samples"
    if task.samples is not None and not 0 <= task.samples[0] < task.samples[1] <= minibatch:
        yield f"{task} is of samples {task.samples}; the minibatch has [0, {minibatch})"
    if task.kind.is_copy and task.tensor_kind is None:
        yield f"{task} copies, and does not say what kind of tensor"
    if task.bytes < 0 or (task.bytes and not task.kind.is_copy):
        yield f"{task} has {task.bytes} bytes; copies have them, 0 or more, and nothing else"


def _model_faults(schedule: Schedule, trace: Trace) -> Iterator[str]:
    if schedule.model != trace.model or schedule.layers != len(trace.layers):
        yield (
            f"the schedule is of {schedule.model} with {schedule.layers} layers, the trace of {trace.model} with "
            f"{len(trace.layers)}"
        )
