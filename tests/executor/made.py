"""A quick emulated machine, small models, and traces of them with made-up times."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from executor.models.inputs import Inputs
from executor.models.layers import LayerModel, LossFunction, decompose, takes_gradient
from sim.hardware.machine import Emulation, Gpu, Host, Link, Machine
from traces.schema import Layer, Phase, SizeRow, TiedWeight, TimeRow, Trace

WORKSPACE_BYTES = 2**20


def machine(gpus: int = 1, *, memory_bytes: int = 2**30, p2p: bool = True, speed: float = 1.0) -> Machine:
    """GPUs as fast as the CPU, on links that cost next to nothing."""
    gpu = Gpu(name="0", memory_bytes=memory_bytes, bandwidth=1e11, link="root", p2p=p2p, speed=speed)
    return Machine(
        name="quick",
        host=Host(memory_bytes=None, dram_bandwidth=1e11, cores=2),
        gpus=(gpu,),
        links=(Link(name="root", bandwidth=1e11),),
        emulation=Emulation(pace=1, gpu_bandwidth=1e11, links={"root": 1e11}),
    ).with_gpus(gpus)


def trace_of(
    model: LayerModel,
    batch: Callable[[int], tuple[Any, Tensor]],
    *,
    state_tensors: int = 2,
    microbatches: Sequence[int] = (1, 2, 3, 4, 8),
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Trace:
    """The model's true sizes, made-up times, and a workspace that suffices for all.

    ``state_tensors`` is how many the optimizer keeps in each parameter's shape.
    """
    tied = {group.name: group for group in model.tied}
    layers = []
    for index, layer in enumerate(model.layers):
        owned = sum(named.tensor.nbytes for named in model.owned(index).values())
        layers.append(
            Layer(
                name=layer.name,
                kind=layer.kind,
                weight_bytes=layer.weight_bytes,
                gradient_bytes=layer.gradient_bytes,
                optimizer_state_bytes=state_tensors * owned,
                buffer_bytes=layer.buffer_bytes,
                trainable=bool(layer.trainable),
                tied=tuple(
                    TiedWeight(group=named.qualified, weight_bytes=named.tensor.nbytes)
                    for named in layer.parameters.values()
                    if named.qualified in tied
                ),
                changes_buffers=layer.changes_buffers,
                cut_sensitive=layer.random or layer.changes_buffers,
            )
        )
    boundaries, labels = _boundaries(model, batch)
    sizes = [
        SizeRow(
            layer=index,
            microbatch=u,
            input_bytes=u * _sample_bytes(boundaries[index]),
            output_bytes=u * _sample_bytes(boundaries[index + 1]),
            input_gradient_bytes=u * _sample_bytes(takes_gradient(model.layers[index], boundaries[index])),
            saved_bytes=0,
            workspace_bytes=workspace_bytes,
            forward_workspace_bytes=workspace_bytes,
            held_bytes=workspace_bytes,
            parts_workspace_bytes=workspace_bytes,
        )
        for index in range(len(model))
        for u in microbatches
    ]
    times = [
        TimeRow(layer=index, phase=phase, microbatch=0 if phase.is_update else u, duration_ns=1000)
        for index in range(len(model))
        for phase in Phase
        for u in ((0,) if phase.is_update else microbatches)
    ]
    return Trace(
        model="made",
        device="cpu",
        dtype="float64",
        optimizer="any",
        label_bytes_per_sample=_sample_bytes([labels]),
        layers=tuple(layers),
        times=tuple(times),
        sizes=tuple(sizes),
    )


def _boundaries(
    model: LayerModel, batch: Callable[[int], tuple[Any, Tensor]]
) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """x(0) … x(L) of one sample, and its label. x(L), the loss, counts as a sample."""
    inputs, labels = batch(1)
    x = Inputs.of(inputs).tensors
    boundaries = [x]
    with torch.no_grad(), torch.random.fork_rng():
        for layer in model.layers[:-1]:
            x = called(copy.deepcopy(layer.module).eval(), x)
            boundaries.append(x)
        boundaries.append((model.layers[-1].module(*x, labels).reshape(1),))
    return boundaries, labels


def called(module: nn.Module, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What a layer passes on."""
    output = module(*x)
    return output if isinstance(output, tuple) else (output,)


def _sample_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes // len(tensor) for tensor in tensors)


def mlp(widths: Sequence[int] = (6, 10, 7, 9, 5), *, seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers in float64, each a layer of its own, with ReLU between them."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for into, out in pairwise(widths):
        layers.append(nn.Linear(into, out, dtype=torch.float64))
        layers.append(nn.Tanh())
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def tied(width: int = 4, *, bias: bool = False) -> nn.Sequential:
    """Linear layers in float64; the first and the third share their weight, but not their bias, if there is any."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=bias, dtype=torch.float64) for _ in range(4)))
    model[2].weight = model[0].weight
    return model


def vectors(features: int = 6, classes: int = 5) -> Callable[..., tuple[Tensor, Tensor]]:
    """Batches for :func:`mlp`: (samples, seed) → inputs [n, features] in float64, labels [n]."""

    def batch(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(samples, features, dtype=torch.float64, generator=generator)
        return inputs, torch.randint(classes, (samples,), generator=generator)

    return batch


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def split(model: nn.Module, loss_fn: LossFunction = nn.functional.cross_entropy) -> LayerModel:
    return decompose(model, loss_fn)
