"""A Session: a schedule, a model and an optimizer, put on devices, ready to train step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from sim.home import Ties
from sim.schedule import Lane, Schedule, Task, TaskKind, TensorKind
from sim.timelines.replay import MemoryChange, StepTimes, resident_changes
from sim.unrolling import unroll

from ..devices.facade import Devices, Overruns, Queue
from ..errors import DeviceError, DifferentModel
from ..models.inputs import Inputs
from ..models.layers import LayerModel
from .calculations import Calculations
from .context import StepContext
from .lanes import LaneRunner, Walked
from .layout import HOME_KINDS, Layouts, StateEntries, layouts
from .optimizer import PackOptimizer
from .places import Places
from .rules import UpdateRule
from .shards import ShardLayouts
from .shares import Shares
from .transfers import Transfers
from .updates import Updates

_AS_THEY_ARE = UpdateRule()


@dataclass(frozen=True)
class StepResult:
    """What came of a step: the loss of its minibatch (before the update), and when everything happened.

    ``gradient_norm`` is that of the whole model's gradient, before it was clipped; None if the schedule does not take
    it. ``skipped``: the step changed nothing.
    """

    loss: float
    times: StepTimes
    gradient_norm: float | None = None
    skipped: bool = False


class Session:
    """Trains ``model`` with ``optimizer`` as ``schedule`` says, on ``devices``.

    The model's parameters and buffers move into the host store and stay its own: after every step they are current, and
    so is the optimizer's state; but for what the schedule lets stay on GPUs, which is only after :meth:`write_home`.
    ``seed`` is where dropout and the like draw from, ``first_step`` the number of the first step, where training goes
    on. Raises DifferentModel if the schedule was made for another model or optimizer, DeviceError if there are too few
    devices, OptimizerError if the optimizer cannot update packs one by one, or shards of them where the schedule asks
    for that, ModelError if the model is not in host memory.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: LayerModel,
        optimizer: Optimizer,
        devices: Devices,
        *,
        seed: int = 0,
        first_step: int = 0,
    ) -> None:
        self.schedule = schedule
        self._devices = devices
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
        self._transfers = [Transfers(schedule, self._places, self._places.minibatch)]  # by step of those that overlap
        self._calculations = Calculations(schedule, model, self._places, devices)
        self._updates = Updates(schedule, model, pack_optimizer, self._places)
        self._ties = _ties(model)
        self._model = model
        self._host = devices.queue((None, Lane.UPDATE))
        self._runners: dict[int, LaneRunner] = {}  # by number of steps
        self._transfers[0].load_residents()
        self.go_on(first_step, seed)

    def go_on(self, step: int, seed: int) -> None:
        """The next step is number ``step``, and draws from ``seed``."""
        self._steps, self._seed = step, seed

    @property
    def overruns(self) -> Overruns:
        """Tasks that took longer than their device should have, so far."""
        return self._devices.overruns

    def step(
        self, inputs: Any, labels: Tensor, *, check_memory: bool = False, rule: UpdateRule = _AS_THEY_ARE
    ) -> StepResult:
        """Train on one minibatch: forward, backward and update.

        ``inputs`` are a tensor, a tuple of tensors, or a dictionary of them by the names of the model's arguments.

        ``rule`` says what happens to gradients before the update; raises RuleError if the schedule cannot follow it. A
        loss that is not finite, or, where the schedule takes the norm, a gradient that is not, raises NonFinite or, if
        the rule says so, skips the step. Then weights, optimizer and module buffers are as before.

        ``check_memory`` measures what the mathematics of each task takes, which costs some time, and raises
        WorkspaceOverrun (as the cause of TaskFailed) beyond what the schedule reserves. Raises TaskFailed when a task
        fails; the parameters may be updated in part then. Raises NeverFreed if the step leaves buffers behind.
        """
        rule.check(self.schedule)
        kept = [(buffer, buffer.clone()) for buffer in self._places.changing_buffers()]
        ((context, times),) = self._run([(inputs, labels)], rule, check_memory)
        if context.problem is not None:
            for buffer, before in kept:
                buffer.copy_(before)
            if not rule.skips(context.problem):
                raise context.problem
        self._steps += 1
        return _result(context, times)

    def overlapping_steps(self, batches: Sequence[tuple[Any, Tensor]]) -> list[StepResult]:
        """Train on one minibatch (inputs, labels) after the other, without a barrier between them. Times count from the
        start of the first. All minibatches are taken in beforehand.

        Raises as :meth:`step`. A step that raises NonFinite, and those after it, update nothing; but module buffers are
        as all forwards left them.
        """
        results = []
        for context, times in self._run(batches, _AS_THEY_ARE, check_memory=False):
            if context.problem is not None:
                raise context.problem
            self._steps += 1
            results.append(_result(context, times))
        return results

    def _run(
        self, batches: Sequence[tuple[Any, Tensor]], rule: UpdateRule, check_memory: bool
    ) -> list[tuple[StepContext, StepTimes]]:
        while len(self._transfers) < len(batches):
            self._transfers.append(Transfers(self.schedule, self._places, self._places.new_minibatch()))
        for transfers, (inputs, labels) in zip(self._transfers, batches, strict=False):
            transfers.minibatch.load(Inputs.of(inputs), labels)
        contexts: list[StepContext] = []
        for number, (_, labels) in enumerate(batches, start=self._steps):
            before = contexts[-1] if contexts else None
            shares = Shares.of(self._model, labels)
            contexts.append(StepContext(number, self._seed, shares, check_memory, rule, self._host, before))
        tasks = self.schedule.tasks

        def perform(task: Task, queue: Queue) -> int:
            step, place = divmod(task.id, len(tasks))
            return self._perform(tasks[place], queue, contexts[step], self._transfers[step])

        with self._devices.running():
            try:
                walked = self._runner(len(batches)).run(self._steps, perform)
                self._places.check_empty()
            except BaseException:
                self._places.clear()
                raise
            return list(zip(contexts, self._times(walked, len(batches)), strict=True))

    def write_home(self) -> None:
        """Bring the model and the optimizer's state up to date with what stays on GPUs from step to step."""
        self._transfers[0].residents_home()

    def read_home(self) -> None:
        """Take over the values that the model and the optimizer have now, wherever copies of them are: in the homes of
        other GPUs, and on GPUs. What stayed on GPUs and was not brought home is lost."""
        self._places.copy_home()
        self._updates.adopt_state()
        self._transfers[0].load_residents()

    @property
    def updates_residents(self) -> bool:
        """Whether after a step what stays on GPUs may be newer than what the model and the optimizer hold."""
        stays = {buffer.id for buffer in self.schedule.buffers if buffer.resident}
        return any(not stays.isdisjoint(task.writes) for task in self.schedule.copies(TaskKind.UPDATE))

    @property
    def homes_agree(self) -> bool:
        """Whether all homes have the weights that the model has."""
        return self._places.homes_agree()

    def _runner(self, steps: int) -> LaneRunner:
        if steps not in self._runners:
            unrolled = unroll(self.schedule, steps, self._ties)
            memory = _MemoryOfSteps(self._places, len(self.schedule.buffers))
            self._runners[steps] = LaneRunner(unrolled, self._devices, memory, steps)
        return self._runners[steps]

    def _perform(self, task: Task, queue: Queue, context: StepContext, transfers: Transfers) -> int:
        """Carry out a task; returns the bytes it copied."""
        match task.kind:
            case TaskKind.FORWARD | TaskKind.RECOMPUTE:
                self._calculations.forward(task, queue, context)
            case TaskKind.BACKWARD:
                self._calculations.backward(task, queue, context)
            case TaskKind.BACKWARD_INPUT:
                self._calculations.backward_input(task, queue, context)
            case TaskKind.BACKWARD_WEIGHT:
                self._calculations.backward_weight(task, queue, context)
            case TaskKind.UPDATE:
                self._updates.update(task, queue, context)
            case TaskKind.NORM:
                self._updates.norm(queue, context)
            case TaskKind.REDUCE:
                transfers.reduce(task)
            case TaskKind.SWAP_IN:
                return transfers.swap_in(task, queue)
            case TaskKind.SWAP_OUT:
                return transfers.swap_out(task, queue)
            case TaskKind.P2P:
                return transfers.p2p(task, queue)
            case TaskKind.ALLREDUCE:
                return transfers.all_reduce(task, queue)
            case TaskKind.REDUCE_SCATTER:
                return transfers.reduce_scatter(task, queue)
            case TaskKind.ALL_GATHER:
                return transfers.all_gather(task, queue)
        return 0

    def _times(self, walked: Walked, steps: int) -> list[StepTimes]:
        """Marks as times that count from the first start of all."""
        origin = min([self._devices.time_ns(mark) for mark in walked.starts], default=0)
        buffers, count = self.schedule.buffers, len(self.schedule.tasks)
        memory: list[list[MemoryChange]] = [[] for _ in range(steps)]
        for change in walked.changes:
            step, number = divmod(change.buffer, len(buffers))
            memory[step].append(
                MemoryChange(self._devices.time_ns(change.mark) - origin, buffers[number], change.bytes)
            )
        end = max([self._devices.time_ns(mark) for mark in walked.ends], default=origin) - origin
        memory[0] += resident_changes(self.schedule, 0, end)
        parts = [slice(step * count, (step + 1) * count) for step in range(steps)]
        return [
            StepTimes(
                start_ns=[self._devices.time_ns(mark) - origin for mark in walked.starts[part]],
                end_ns=[self._devices.time_ns(mark) - origin for mark in walked.ends[part]],
                copied_bytes=walked.copied_bytes[part],
                memory=changes,
            )
            for part, changes in zip(parts, memory, strict=True)
        ]


def _result(context: StepContext, times: StepTimes) -> StepResult:
    return StepResult(context.loss(), times, context.norm, skipped=context.problem is not None)


@dataclass(frozen=True)
class _MemoryOfSteps:
    """The places of a schedule's ``buffers``, for steps of it that are unrolled: each buffer is the same every time."""

    places: Places
    buffers: int

    def allocate(self, number: int) -> int:
        """Take a buffer's memory."""
        return self.places.allocate(number % self.buffers)

    def free(self, number: int) -> int:
        """Give it back."""
        return self.places.free(number % self.buffers)


def _moving_state(schedule: Schedule, model: LayerModel, optimizer: PackOptimizer) -> dict[int, StateEntries]:
    """What of the optimizer's state the schedule moves, by ``id`` of the parameter; nothing if the host updates."""
    if not any(buffer.kind is TensorKind.OPTIMIZER_STATE for buffer in schedule.buffers):
        return {}
    owned = [named.tensor for layer in range(len(model)) for named in model.owned(layer).values()]
    return {id(parameter): optimizer.state_entries(parameter) for parameter in owned}


def _ties(model: LayerModel) -> Ties:
    users: dict[int, tuple[int, ...]] = {}
    for group in model.tied:
        owner, *others = group.layers
        users[owner] = (*users.get(owner, ()), *others)
    return Ties(users)


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
