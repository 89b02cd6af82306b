"""Forward and backward tasks: which tensors they work on, and where the results go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from torch import Tensor

from sim.schedule import Schedule, Task, TaskKind

from ..devices.facade import Devices, Queue
from ..errors import DifferentModel, WorkspaceOverrun
from ..models.layers import LayerModel
from .compute import Chance, GpuModel, LayerTensors, Tensors
from .context import LossPart, StepContext
from .parts import WeightPart
from .places import Places
from .recording import Memory, Region, SavedTensors
from .roles import Roles, find_roles
from .storage import StorageTracker

_PASSES = (
    TaskKind.FORWARD,
    TaskKind.BACKWARD,
    TaskKind.BACKWARD_INPUT,
    TaskKind.BACKWARD_WEIGHT,
    TaskKind.RECOMPUTE,
)
_SCALARS_BYTES = 64  # a loss and its factor: no part of a trace


class Calculations:
    """Carries out the forward and backward tasks of a schedule. Lanes of different GPUs call it at once."""

    def __init__(
        self,
        schedule: Schedule,
        model: LayerModel,
        places: Places,
        devices: Devices,
    ) -> None:
        self._model, self._places, self._devices = model, places, devices
        self._buffers = schedule.buffers
        self._loss_layer = schedule.layers - 1
        self._gpu_models = [GpuModel(model) for _ in range(schedule.plan.gpus)]
        # Layers that no forward task runs have their forward in their backward task.
        self._run_forward = frozenset(
            layer
            for task in schedule.copies(TaskKind.FORWARD)
            for layer in range(task.layer_first, task.layer_last + 1)
        )
        self._recorded = frozenset(
            (range(task.layer_first, task.layer_last + 1), task.samples)
            for task in schedule.copies(TaskKind.BACKWARD)
            if not task.recompute
        )
        self._roles = {task.id: find_roles(task, self._buffers, self._loss_layer) for task in schedule.copies(*_PASSES)}

    def forward(self, task: Task, queue: Queue, context: StepContext) -> None:
        """Run a pack, for the first time or again; write what goes on or is stashed. It is recorded only if its
        backward does not repeat it."""
        roles, gpu = self._roles[task.id], _gpu(task)
        first_time = task.kind is TaskKind.FORWARD
        chance = self._chance(roles, gpu, context)

        def emit(layer: int, x: Tensors) -> None:
            if layer > self._loss_layer:
                self._record_loss(roles, x[0], queue, context)
                return
            self._places.records.note(layer, x)
            for number in roles.outputs.get(layer, ()):
                self._check_size(number, layer, x)
                for target, value in zip(self._tensors(number), x, strict=True):
                    target.copy_(value)

        def work() -> None:
            inputs = [tensor for number in roles.inputs for tensor in self._tensors(number)]
            tensors = self._layer_tensors(roles)
            if (roles.layers, roles.samples) in self._recorded:
                context.recordings[roles.layers, roles.samples] = self._gpu_models[gpu].record(
                    roles.layers, inputs, tensors, chance, emit, SavedTensors(self._memory(roles), self._kept(roles))
                )
            else:
                self._gpu_models[gpu].forward(roles.layers, inputs, tensors, chance, emit, first_time=first_time)

        self._run(task, queue, context, work)

    def backward(self, task: Task, queue: Queue, context: StepContext) -> None:
        """Repeat a pack's forward, unless it was recorded, and go back through it; add to its gradient, write the
        gradient of its input."""
        roles, gpu = self._roles[task.id], _gpu(task)
        chance = self._chance(roles, gpu, context)
        first_time = roles.layers[-1] not in self._run_forward

        def work() -> None:
            self._start_gradient(task, roles)
            if roles.incoming is None and roles.layers[-1] != self._loss_layer:
                return  # what comes out has no gradient
            incoming = self._incoming(roles, context)
            tensors = self._layer_tensors(roles)
            if not task.recompute:
                recording = context.recordings.pop((roles.layers, roles.samples))
                gradients = recording.backward(self._memory(roles), incoming, _gradients(tensors))
            else:
                inputs = [tensor for number in roles.inputs for tensor in self._tensors(number)]
                gradients, loss = self._gpu_models[gpu].backward(
                    roles.layers, inputs, incoming, tensors, chance, first_time=first_time
                )
                if loss is not None and first_time:
                    self._record_loss(roles, loss, queue, context)
            self._hand_on(roles, gradients)

        self._run(task, queue, context, work)

    def backward_input(self, task: Task, queue: Queue, context: StepContext) -> None:
        """The first part of a backward: repeat a pack's forward and write the gradient of its input."""
        roles, gpu = self._roles[task.id], _gpu(task)
        chance = self._chance(roles, gpu, context)
        first_time = roles.layers[-1] not in self._run_forward

        def work() -> None:
            gradients: list[Tensor | None] = []
            weight_part = WeightPart()
            if roles.incoming is not None or roles.layers[-1] == self._loss_layer:
                incoming = self._incoming(roles, context)
                inputs = [tensor for number in roles.inputs for tensor in self._tensors(number)]
                gradients, loss, weight_part = self._gpu_models[gpu].backward_input(
                    roles.layers, inputs, incoming, self._layer_tensors(roles), chance, first_time=first_time
                )
                if loss is not None and first_time:
                    self._record_loss(roles, loss, queue, context)
            context.weight_parts[gpu, roles.layers, roles.samples] = weight_part
            self._hand_on(roles, gradients)

        self._run(task, queue, context, work)

    def backward_weight(self, task: Task, queue: Queue, context: StepContext) -> None:
        """The second part of a backward: add to a pack's gradient."""
        roles, gpu = self._roles[task.id], _gpu(task)

        def work() -> None:
            self._start_gradient(task, roles)
            weight_part = context.weight_parts.pop((gpu, roles.layers, roles.samples))
            weight_part.add_to(_gradients(self._layer_tensors(roles)))

        self._run(task, queue, context, work)

    def _run(self, task: Task, queue: Queue, context: StepContext, work: Callable[[], None]) -> None:
        if not context.checks_memory:
            queue.compute(work)
            return
        roles, gpu = self._roles[task.id], _gpu(task)
        allowed = roles.workspace_bytes + self._kept(roles) + _SCALARS_BYTES

        def measured() -> None:
            # Not what the device's allocator counts: other lanes take memory too, and libraries keep some for good.
            with StorageTracker() as meter:
                work()
            if meter.peak_bytes > allowed:
                raise WorkspaceOverrun(gpu, (roles.layers[0], roles.layers[-1]), meter.peak_bytes, allowed)
            if roles.held_bytes and meter.live_bytes > (may_hold := roles.held_bytes + _SCALARS_BYTES):
                raise WorkspaceOverrun(gpu, (roles.layers[0], roles.layers[-1]), meter.live_bytes, may_hold)

        queue.compute(measured)

    def _start_gradient(self, task: Task, roles: Roles) -> None:
        """The first task that adds to a gradient starts from zero."""
        if roles.gradient in task.allocates:
            self._places.block(roles.gradient).bytes.zero_()

    def _hand_on(self, roles: Roles, gradients: Sequence[Tensor | None]) -> None:
        """Write the gradients of the input, if they go on to another pack; what has none is zero."""
        if roles.outgoing is not None:
            for target, gradient in zip_longest(self._tensors(roles.outgoing), gradients):
                target.zero_() if gradient is None else target.copy_(gradient)

    def _chance(self, roles: Roles, gpu: int, context: StepContext) -> Chance:
        return Chance(self._devices.generator(gpu), context.seed, context.number, roles.samples[0])

    def _incoming(self, roles: Roles, context: StepContext) -> Sequence[Tensor] | float:
        """The gradient that comes from the next pack; the loss begins with the factor that it counts with."""
        if roles.incoming is None:
            return context.shares.factor(roles.samples) * context.rule.loss_scale
        return self._tensors(roles.incoming)

    def _record_loss(self, roles: Roles, loss: Tensor, queue: Queue, context: StepContext) -> None:
        context.losses.append(
            LossPart(roles.samples, context.shares.factor(roles.samples), loss.detach(), queue.mark())
        )

    def _tensors(self, number: int) -> list[Tensor]:
        """A buffer of x(l) or g(l) as the tensors that it holds."""
        buffer = self._buffers[number]
        assert buffer.samples is not None
        record = self._places.record(buffer)
        return record.tensors(self._places.block(number).bytes, buffer.samples[1] - buffer.samples[0])

    def _check_size(self, number: int, layer: int, x: Tensors) -> None:
        """A buffer is as large as the x(l) that is to be written to it."""
        size, planned = sum(value.nbytes for value in x), self._buffers[number].bytes
        if size != planned:
            raise DifferentModel(
                f"layer {layer - 1} ({self._model.layers[layer - 1].name}) returned {size} B for {len(x[0])} samples; "
                f"the schedule was made for {planned} B: profile this model with these batches and plan again"
            )

    def _memory(self, roles: Roles) -> Memory:
        """Where a task's buffers are now, for what autograd saves."""
        regions = {
            Region.WEIGHTS: next(iter(roles.weights.values()), None),  # what is recorded has them in one buffer
            Region.BUFFERS: roles.buffers,
            Region.SAVED: None if self._kept(roles) else roles.saved,
            **dict(zip((Region.INPUT, Region.LABELS), roles.inputs, strict=False)),
        }
        return {region: self._places.block(number).bytes for region, number in regions.items() if number is not None}

    def _kept(self, roles: Roles) -> int:
        """Bytes of what autograd saves where it is, as it does not move before its backward."""
        if roles.saved is None or not self._places.is_reserved(roles.saved):
            return 0
        return self._buffers[roles.saved].bytes

    def _layer_tensors(self, roles: Roles) -> dict[int, LayerTensors]:
        return {
            layer: LayerTensors(
                weights=self._named(roles.weights.get(layer), layer),
                buffers=self._named(roles.buffers, layer),
                gradients=self._named(roles.gradient, layer),
            )
            for layer in roles.layers
        }

    def _named(self, number: int | None, layer: int) -> dict[str, Tensor]:
        if number is None:
            return {}
        return {name: view for (name, _), view in self._places.state_views(number, layer).items()}


def _gpu(task: Task) -> int:
    assert task.gpu is not None
    return task.gpu


def _gradients(tensors: Mapping[int, LayerTensors]) -> dict[tuple[int, str], Tensor]:
    return {(layer, name): each for layer, own in tensors.items() for name, each in own.gradients.items()}
