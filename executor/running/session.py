"""A Session: a schedule, a model and an optimizer, put on devices, ready to train step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sim.errors import PlanError
from sim.schedule import Schedule, Task, TaskKind, TensorKind
from sim.timelines.replay import MemoryChange, StepTimes

from ..devices.facade import Devices, Overruns, Queue
from ..errors import DeviceError, DifferentModel
from ..models.inputs import Inputs
from ..models.layers import LayerModel
from .calculations import Calculations, StepContext
from .lanes import LaneRunner, Walked
from .layout import HOME_KINDS, Layouts, StateEntries, layouts
from .optimizer import PackOptimizer
from .places import Places
from .shards import ShardLayouts
from .transfers import Transfers


@dataclass(frozen=True)
class StepResult:
    """What came of a step: the loss of its minibatch (before the update), and when everything happened."""

    loss: float
    times: StepTimes


class Session:
    """Trains ``model`` with ``optimizer`` as ``schedule`` says, on ``devices``.

    The model's parameters and buffers move into the host store and stay its own: after every step they are current, and
    so is the optimizer's state. ``seed`` is where dropout and the like draw from. Raises DifferentModel if the schedule
    was made for another model or optimizer, DeviceError if there are too few devices, OptimizerError if the optimizer
    cannot update packs one by one, or shards of them where the schedule asks for that, ModelError if the model is not
    in host memory.
    """

    def __init__(
        self, schedule: Schedule, model: LayerModel, optimizer: Optimizer, devices: Devices, *, seed: int = 0
    ) -> None:
        self.schedule = schedule
        self._devices = devices
        _check_whole(schedule)
        _check_size(schedule, model, devices)
        pack_optimizer = PackOptimizer(optimizer)
        updates_shards = any(task.shard is not None for task in schedule.copies(TaskKind.UPDATE))
        if updates_shards:
            pack_optimizer.check_shards()
        layout = layouts(model, _moving_state(schedule, model, pack_optimizer))
        shards = ShardLayouts(model, layout, schedule.plan.gpus)
        if updates_shards:
            shards.check_trained()
        _check_bytes(schedule, layout, shards, optimizer)
        self._places = Places(schedule, model, layout, shards, devices)
        self._transfers = Transfers(schedule, self._places)
        self._calculations = Calculations(schedule, model, pack_optimizer, self._places, devices, seed)
        self._lanes = LaneRunner(schedule, devices, self._places)
        self._steps = 0

    @property
    def overruns(self) -> Overruns:
        """Tasks that took longer than their device should have, so far."""
        return self._devices.overruns

    def step(self, inputs: Any, labels: Tensor, *, check_memory: bool = False) -> StepResult:
        """Train on one minibatch: forward, backward and update.

        ``inputs`` are a tensor, a tuple of tensors, or a dictionary of them by the names of the model's arguments.

        ``check_memory`` measures what the mathematics of each task takes, which costs some time, and raises
        WorkspaceOverrun (as the cause of TaskFailed) beyond what the schedule reserves. Raises TaskFailed when a task
        fails; the parameters may be updated in part then. Raises NeverFreed if the step leaves buffers behind.
        """
        self._places.minibatch.load(Inputs.of(inputs), labels)
        context = StepContext(self._steps, check_memory)
        with self._devices.running():
            try:
                walked = self._lanes.run(self._steps, lambda task, queue: self._perform(task, queue, context))
                self._places.check_empty()
            except BaseException:
                self._places.clear()
                raise
            self._steps += 1
            return StepResult(context.loss(), self._times(walked))

    def _perform(self, task: Task, queue: Queue, context: StepContext) -> int:
        """Carry out a task; returns the bytes it copied."""
        match task.kind:
            case TaskKind.FORWARD | TaskKind.RECOMPUTE:
                self._calculations.forward(task, queue, context)
            case TaskKind.BACKWARD:
                self._calculations.backward(task, queue, context)
            case TaskKind.UPDATE:
                self._calculations.update(task, queue)
            case TaskKind.REDUCE:
                self._transfers.reduce(task)
            case TaskKind.SWAP_IN:
                return self._transfers.swap_in(task, queue)
            case TaskKind.SWAP_OUT:
                return self._transfers.swap_out(task, queue)
            case TaskKind.P2P:
                return self._transfers.p2p(task, queue)
            case TaskKind.ALLREDUCE:
                return self._transfers.all_reduce(task, queue)
            case TaskKind.REDUCE_SCATTER:
                return self._transfers.reduce_scatter(task, queue)
            case TaskKind.ALL_GATHER:
                return self._transfers.all_gather(task, queue)
        return 0

    def _times(self, walked: Walked) -> StepTimes:
        """Marks as times that count from the step's first start."""
        starts = [self._devices.time_ns(mark) for mark in walked.starts]
        ends = [self._devices.time_ns(mark) for mark in walked.ends]
        origin = min(starts, default=0)
        buffers = self.schedule.buffers
        return StepTimes(
            start_ns=[start - origin for start in starts],
            end_ns=[end - origin for end in ends],
            copied_bytes=walked.copied_bytes,
            memory=[
                MemoryChange(self._devices.time_ns(change.mark) - origin, buffers[change.buffer], change.bytes)
                for change in walked.changes
            ],
        )


def _moving_state(schedule: Schedule, model: LayerModel, optimizer: PackOptimizer) -> dict[int, StateEntries]:
    """What of the optimizer's state the schedule moves, by ``id`` of the parameter; nothing if the host updates."""
    if not any(buffer.kind is TensorKind.OPTIMIZER_STATE for buffer in schedule.buffers):
        return {}
    owned = [named.tensor for layer in range(len(model)) for named in model.owned(layer).values()]
    return {id(parameter): optimizer.state_entries(parameter) for parameter in owned}


def _check_whole(schedule: Schedule) -> None:
    if any(schedule.copies(TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT)):
        raise PlanError("the schedule has backwards in two parts, which can be simulated but not run yet")


def _check_size(schedule: Schedule, model: LayerModel, devices: Devices) -> None:
    if schedule.layers != len(model):
        raise DifferentModel(
            f"the schedule is for {schedule.model} with {schedule.layers} layers (the loss included); this model has "
            f"{len(model)}: profile it and plan again"
        )
    if schedule.plan.gpus > devices.gpus:
        raise DeviceError(
            f"the schedule is for {schedule.plan.gpus} GPUs, there are {devices.gpus}; plan again with --gpus"
        )


def _check_bytes(schedule: Schedule, layout: Layouts, shards: ShardLayouts, optimizer: Optimizer) -> None:
    """The schedule's buffers of state are as large as this model's tensors."""
    for buffer in schedule.buffers:
        if buffer.kind not in HOME_KINDS:
            continue
        run = f"layers {buffer.layer_first}-{buffer.layer_last}"
        real = layout[buffer.kind].run_bytes(buffer.layer_first, buffer.layer_last)
        if buffer.shard is not None:
            run += f", shard {buffer.shard} of {schedule.plan.gpus},"
            real = shards.bytes(buffer.kind, buffer.layer_first, buffer.layer_last, buffer.shard)
        if real != buffer.bytes:
            whose = (
                f"{type(optimizer).__name__} keeps" if buffer.kind is TensorKind.OPTIMIZER_STATE else "this model has"
            )
            raise DifferentModel(
                f"the schedule moves {buffer.bytes} B of {buffer.kind.value} for {run} of {schedule.model}, {whose} "
                f"{real} B there: profile this model, with this dtype and optimizer, and plan again"
            )
