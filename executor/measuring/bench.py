"""One layer on a bench: its tensors on a device, and the four pieces of work that schedules do with it, timed.

Each piece runs through the code of real runs. Tensors are copies, so the model stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..models.layers import LayerModel
from ..running.compute import Chance, GpuModel, LayerTensors
from ..running.optimizer import Moved, PackOptimizer, State
from .sampling import Clock

GRADIENT_SCALE = 1e-3
"""Size of the made-up gradients in updates."""

WEIGHT_SCALE = 0.02
"""Standard deviation of made-up weights."""


def layer_tensors(model: LayerModel, layer: int, device: torch.device) -> LayerTensors:
    """Copies of a layer's weights and buffers on a device, and zeros for its gradients.

    Of a model without memory (device ``meta``) values are made up.
    """
    spec = model.layers[layer]
    return LayerTensors(
        weights={
            name: _copied(named.tensor, device).requires_grad_(named.tensor.requires_grad)
            for name, named in spec.parameters.items()
        },
        buffers={name: _copied(named.tensor, device) for name, named in spec.buffers.items()},
        gradients={name: torch.zeros_like(named.tensor, device=device) for name, named in spec.trainable.items()},
    )


class LayerBench:
    """A layer ready to be timed. Durations are in nanoseconds."""

    def __init__(self, model: LayerModel, layer: int, gpu: GpuModel, tensors: LayerTensors, chance: Chance) -> None:
        self._run = range(layer, layer + 1)
        self._gpu, self._chance = gpu, chance
        self._tensors = {layer: tensors}

    def forward_ns(self, inputs: Sequence[Tensor], clock: Clock) -> int:
        """Forward without recording."""

        def work() -> None:
            self._gpu.forward(self._run, inputs, self._tensors, self._chance, lambda layer, x: None)

        return clock(work)

    def forward_and_backward_ns(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor] | float, clock: Clock
    ) -> int:
        """Forward with recording, and backward from the gradients of the output."""

        def work() -> None:
            self._gpu.backward(self._run, inputs, gradients, self._tensors, self._chance, first_time=True)

        return clock(work)

    def parts_ns(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor] | float, clock: Clock, *, both: bool
    ) -> int:
        """Forward with recording, and the first part of the backward; ``both``: and the second."""
        (own,) = self._tensors.items()
        added = {(own[0], name): each for name, each in own[1].gradients.items()}

        def work() -> None:
            weight_part = self._gpu.backward_input(
                self._run, inputs, gradients, self._tensors, self._chance, first_time=True
            )[2]
            if both:
                weight_part.add_to(added)

        return clock(work)


class UpdateBench:
    """The update of what a layer owns, ready to be timed on the host and on a device, by one like the given optimizer.

    Of a parameter that several layers use, adding their gradients up is part of the update.
    """

    def __init__(self, model: LayerModel, layer: int, device: torch.device, optimizer: PackOptimizer) -> None:
        users = {group.name: len(group.layers) for group in model.tied}
        owned = [named for named in model.owned(layer).values() if optimizer.updates(named.tensor)]
        parameters = [nn.Parameter(_copied(named.tensor, torch.device("cpu"))) for named in owned]
        self._packs = optimizer.over({p: named.tensor for p, named in zip(parameters, owned, strict=True)})
        self._host = {
            parameter: [_made_up(parameter) for _ in range(users.get(named.qualified, 1))]
            for parameter, named in zip(parameters, owned, strict=True)
        }
        self._states: dict[nn.Parameter, State] = {}
        self._device = {
            parameter: [gradient.to(device, copy=True) for gradient in gradients]
            for parameter, gradients in self._host.items()
        }
        self._moved = [self._on_device(parameter, device) for parameter in parameters]

    def host_ns(self, clock: Clock) -> int:
        """Update on the host."""
        return clock(lambda: self._packs.update_on_host({p: _total(g) for p, g in self._host.items()}))

    def device_ns(self, clock: Clock) -> int:
        """Update where weights, gradients and state lie on the device."""

        def work() -> None:
            for gradients in self._device.values():
                _total(gradients)
            self._packs.update_on_gpu(self._moved, self._states)

        return clock(work)

    def _on_device(self, parameter: nn.Parameter, device: torch.device) -> Moved:
        state = {
            entry: torch.zeros_like(parameter, dtype=dtype, device=device)
            for entry, dtype in self._packs.state_entries(parameter).items()
        }
        weight = parameter.detach().to(device, copy=True).requires_grad_()
        return Moved(parameter, weight, self._device[parameter][0], state)


def _copied(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_meta or device.type == "meta":
        return tensor.detach().to(device, copy=True)
    made = torch.zeros_like(tensor, device=device)
    return (
        made.normal_(0, WEIGHT_SCALE, generator=torch.Generator(device).manual_seed(0))
        if made.is_floating_point()
        else made
    )


def _made_up(parameter: nn.Parameter) -> Tensor:
    return torch.full_like(parameter, GRADIENT_SCALE)


def _total(gradients: Sequence[Tensor]) -> Tensor:
    """The sum, in the first one's place."""
    total, *others = gradients
    for other in others:
        total.add_(other)
    return total
