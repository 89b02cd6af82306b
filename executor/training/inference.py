"""Forwards that leave no trace: in eval mode, without gradients, random state and training modes put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..models.inputs import Inputs, call_model, logits_of
from ..models.layers import LayerModel, decompose
from ..models.losses import LossFunction
from ..running.compute import Chance, GpuModel, LayerTensors, Tensors


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients; each module's own mode and the random state of the host are put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def outputs_on_host(model: nn.Module, inputs: Inputs) -> Tensor:
    """What the model makes of the inputs: what it returns, or its ``logits``."""
    with evaluating(model):
        return logits_of(call_model(model, inputs))


def outputs_by_layer(model: nn.Module, loss_fn: LossFunction, inputs: Inputs, device: torch.device) -> Tensor:
    """The same on a device that holds one layer of the model at a time, and what passes between layers. The result is
    where the inputs are. Raises ModelError for a model that cannot be cut."""
    with evaluating(model):
        layers = decompose(model, loss_fn, inputs)
        gpu = GpuModel(layers)
        chance = Chance(torch.Generator(device), seed=0, step=0, first_sample=0)
        x: Tensors = inputs.map(lambda tensor: tensor.to(device)).tensors
        passed: list[Tensors] = []
        for layer in range(len(layers) - 1):
            tensors = {layer: _tensors_of(layers, layer, device)}
            gpu.forward(range(layer, layer + 1), x, tensors, chance, lambda _, y: passed.append(y))
            x = passed.pop()
    (logits,) = x
    return logits.to(inputs.tensors[0].device)


def _tensors_of(layers: LayerModel, layer: int, device: torch.device) -> LayerTensors:
    spec = layers.layers[layer]
    return LayerTensors(
        weights={name: named.tensor.detach().to(device) for name, named in spec.parameters.items()},
        buffers={name: named.tensor.to(device) for name, named in spec.buffers.items()},
        gradients={},
    )
