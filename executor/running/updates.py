"""Update tasks: what the optimizer works on, in the host or on GPUs, and where it sees its own state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn

from sim.schedule import Schedule, Task, TaskKind, TensorKind

from ..devices.facade import Queue
from ..errors import OptimizerError
from ..models.layers import LayerModel
from .context import StepContext
from .gradients import Gradients
from .layout import SlotKey
from .optimizer import Moved, PackOptimizer, State
from .places import Places
from .roles import read_by_layer


class Updates:
    """Carries out the update tasks of a schedule. Lanes of different GPUs call it at once."""

    def __init__(self, schedule: Schedule, model: LayerModel, optimizer: PackOptimizer, places: Places) -> None:
        self._model, self._optimizer, self._places = model, optimizer, places
        self._buffers = schedule.buffers
        self._gradients = Gradients(model)
        # What of the optimizer's state does not move: for each home, or for each shard if shards are updated.
        updates = schedule.copies(TaskKind.UPDATE)
        sharers = schedule.plan.gpus if any(task.shard is not None for task in updates) else len(places.homes)
        self._states: list[dict[nn.Parameter, State]] = [{} for _ in range(sharers)]
        self.adopt_state()

    def norm(self, queue: Queue, context: StepContext) -> None:
        """Take the norm of the home gradients."""
        views = partial(self._places.home(None).views, TensorKind.GRADIENT)
        context.norms.append(queue.compute(lambda: self._gradients.norm(views, context.rule.loss_scale)))

    def update(self, task: Task, queue: Queue, context: StepContext) -> None:
        """Update what the task's layers own, on the host from the home gradients, or where it lies on a GPU; nothing if
        the step is to change nothing."""
        factor = context.update_factor()
        if factor is not None:
            update = self._update_on_host if task.gpu is None else self._update_on_gpu
            queue.compute(lambda: update(task, factor))

    def adopt_state(self) -> None:
        """Take over what the optimizer keeps (it was loaded, say), where schedules move it."""
        for layer in range(len(self._model)):
            if not self._places.layouts[TensorKind.OPTIMIZER_STATE].bytes[layer]:
                continue
            for name, named in self._model.owned(layer).items():
                state = self._optimizer.optimizer.state.get(named.tensor)
                if not state:
                    for states in self._states:
                        states.pop(named.tensor, None)
                    continue
                left = dict(state)
                for owner, entry in self._places.homes[0].views(TensorKind.OPTIMIZER_STATE, layer):
                    if owner == name:
                        if entry not in left:
                            raise OptimizerError(
                                f"the optimizer's state of {named.qualified} has no {entry!r}, which it keeps when it "
                                "has updated; load a state that is whole, or none"
                            )
                        value = left.pop(entry)
                        for home in self._places.homes:
                            home.views(TensorKind.OPTIMIZER_STATE, layer)[owner, entry].copy_(value)
                for states in self._states:
                    states[named.tensor] = copy.deepcopy(left)
            self._show_state(layer, self._states[0])

    def _update_on_host(self, task: Task, factor: float) -> None:
        views = partial(self._places.home(None).views, TensorKind.GRADIENT)
        self._optimizer.update_on_host(
            {
                named.tensor: _scaled(self._gradients.total(named.tensor, views), factor)
                for layer in _layers(task)
                for named in self._model.owned(layer).values()
            }
        )

    def _update_on_gpu(self, task: Task, factor: float) -> None:
        weights = read_by_layer(task, self._buffers, TensorKind.WEIGHT)
        gradients = read_by_layer(task, self._buffers, TensorKind.GRADIENT)
        states = read_by_layer(task, self._buffers, TensorKind.OPTIMIZER_STATE)
        views = self._places.state_views if task.shard is None else partial(self._shard_views, task.shard)
        moved = []
        for layer in _layers(task):
            state = views(states[layer], layer) if layer in states else {}
            own = views(gradients[layer], layer) if layer in gradients else {}
            for name, named in self._model.owned(layer).items():
                if (name, "") not in own:
                    continue  # no element of it is in the shard
                total = self._gradients.total(named.tensor, lambda user: views(gradients[user], user))
                moved.append(
                    Moved(
                        parameter=named.tensor,
                        weight=self._weight(weights[layer], layer, name, task.shard),
                        gradient=_scaled(total, factor),
                        state={entry: view for (owner, entry), view in state.items() if owner == name},
                    )
                )
        place = self._places.replica(task.gpu) if task.shard is None else task.shard
        kept = self._states[place]
        self._optimizer.update_on_gpu(moved, kept)
        if place == 0 or task.shard is not None:
            updated = {item.parameter: kept[item.parameter] for item in moved if item.parameter in kept}
            for layer in _layers(task):
                self._show_state(layer, updated)

    def _weight(self, number: int, layer: int, name: str, shard: int | None) -> Tensor:
        """A parameter, or what a shard has of it, in a buffer of weights, which may hold just that shard."""
        if shard is not None and self._buffers[number].shard is not None:
            return self._shard_views(shard, number, layer)[name, ""].requires_grad_()
        weight = self._places.state_views(number, layer)[name, ""]
        return weight if shard is None else self._places.shards.of(weight, layer, name, shard)

    def _show_state(self, layer: int, states: Mapping[nn.Parameter, State]) -> None:
        """Let the optimizer see the state that lies in the model's own home, and ``states`` that do not move."""
        views = self._places.homes[0].views(TensorKind.OPTIMIZER_STATE, layer)
        for name, named in self._model.owned(layer).items():
            if named.tensor in states:
                moving = {entry: view for (owner, entry), view in views.items() if owner == name}
                self._optimizer.optimizer.state[named.tensor] = {**states[named.tensor], **moving}

    def _shard_views(self, shard: int, number: int, layer: int) -> dict[SlotKey, Tensor]:
        """What a shard has of a layer's tensors in a buffer of state, flat."""
        return self._places.shards.views(self._buffers[number], self._places.block(number).bytes, layer, shard)


def _scaled(gradient: Tensor, factor: float) -> Tensor:
    """In place."""
    return gradient if factor == 1 else gradient.mul_(factor)


def _layers(task: Task) -> range:
    return range(task.layer_first, task.layer_last + 1)
