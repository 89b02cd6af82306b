"""How much memory of autograd's own one layer takes, measured while it runs as the executor runs it.

    forward without recording                    peak            → forward_workspace_bytes
    forward with recording, then what is alive   live            → saved_bytes
    the same and backward, from start to end     peak - saved    → workspace_bytes
    backward of a forward recorded before        peak            → unrecomputed_workspace_bytes
    forward and first part of backward, then     live            → held_bytes
    the same and second part                     peak - held     → parts_workspace_bytes

Inputs, parameters and gradient buffers lie in memory that schedules plan, and do not count. In a pack, a layer's
incoming gradient is made by the layer behind it; here a stand-in for that layer makes it. The scalar loss and its
gradient, which a pack with the loss holds until its backward has ended, belong to no layer in front of it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ..models.layers import LayerModel, LayerSpec, NamedBuffer, takes_gradient
from ..running.compute import Chance, GpuModel, LayerTensors, Tensors
from ..running.recording import Region, SavedTensors
from ..running.storage import MemoryMeter, measure_memory


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer at one microbatch size; see :class:`~traces.schema.SizeRow`."""

    input_bytes: int
    output_bytes: int
    input_gradient_bytes: int
    saved_bytes: int
    workspace_bytes: int
    forward_workspace_bytes: int
    relayed_bytes: int
    unrecomputed_workspace_bytes: int
    held_bytes: int | None = None
    parts_workspace_bytes: int | None = None


def measure_sizes(
    model: LayerModel,
    layer: int,
    inputs: Sequence[Tensor],
    tensors: LayerTensors,
    chance: Chance,
    *,
    in_parts: bool = False,
) -> LayerBytes:
    """Run a layer forward without recording, and then forward and backward with it; ``in_parts``: a second time, with a
    backward in two parts.

    ``inputs`` are the tensors of x of the layer and, for the loss, the labels. Adds to the layer's gradients.
    """
    spec = model.layers[layer]
    x = inputs[: len(spec.input_gradients)]
    if layer == len(model) - 1:
        spec = _labelled(spec, inputs[-1])
        tensors = replace(tensors, buffers={f"inner.{name}": tensor for name, tensor in tensors.buffers.items()})
    taking = model.layers[layer + 1].input_gradients if layer < len(model) - 1 else (True,)
    behind = _LayerBehind()
    gpu = GpuModel(LayerModel(model.model, model.loss_fn, (spec, behind.as_layer(taking))))
    every = {0: tensors, 1: LayerTensors({}, {}, {})}
    outputs: list[tuple[int, int]] = []
    with measure_memory(x[0].device) as meter:
        gpu.forward(
            range(1),
            x,
            every,
            chance,
            lambda _, output: outputs.append((_size(output), _made(output, x))),
            first_time=False,
        )
        forward_peak = meter.peak_bytes
    with measure_memory(x[0].device) as meter:
        behind.meter = meter
        gradients, _ = gpu.backward(range(2), x, 1.0, every, chance, first_time=False)
        peak = meter.peak_bytes
    ((output_bytes, made_bytes),) = outputs
    held, peak_of_parts = _in_parts(gpu, x, every, chance, behind) if in_parts else (None, 0)
    if held is not None:
        held = max(held, behind.saved_bytes)  # all of it is there while layers behind go back
    has_gradient = any(gradient is not None for gradient in gradients)
    return LayerBytes(
        input_bytes=_size(x),
        output_bytes=output_bytes,
        input_gradient_bytes=_size(takes_gradient(spec, x)) if has_gradient else 0,
        saved_bytes=behind.saved_bytes,
        workspace_bytes=peak - behind.saved_bytes,
        forward_workspace_bytes=forward_peak,
        relayed_bytes=max(0, output_bytes - made_bytes),
        unrecomputed_workspace_bytes=_backward_alone(gpu, x, every[0], chance, room_bytes=peak),
        held_bytes=held,
        parts_workspace_bytes=None if held is None else max(0, peak_of_parts - held),
    )


def _in_parts(
    gpu: GpuModel, x: Sequence[Tensor], every: dict[int, LayerTensors], chance: Chance, behind: _LayerBehind
) -> tuple[int, int]:
    """What is held between the two parts of a backward, the output included, and the most that either takes."""
    gradients = {(0, name): each for name, each in every[0].gradients.items()}
    behind.meter, behind.keeps = None, True
    with measure_memory(x[0].device) as meter:
        weight_part = gpu.backward_input(range(2), x, 1.0, every, chance, first_time=True)[2]
        held = meter.live_bytes
        weight_part.add_to(gradients)
        peak = meter.peak_bytes
    behind.kept = ()
    return held, peak


def _backward_alone(gpu: GpuModel, x: Sequence[Tensor], tensors: LayerTensors, chance: Chance, room_bytes: int) -> int:
    """The most that a backward takes whose forward was recorded, with what that saved in memory of its own."""
    state = {**tensors.weights, **tensors.buffers}
    memory: dict[Hashable, Tensor] = {name: _bytes_of(tensor) for name, tensor in state.items()}
    memory |= {(Region.INPUT, at): _bytes_of(value) for at, value in enumerate(x)}
    memory[Region.SAVED] = torch.empty(room_bytes + _size(x), dtype=torch.uint8, device=x[0].device)
    outputs: list[Tensors] = []
    recording = gpu.record(range(1), x, {0: tensors}, chance, lambda _, y: outputs.append(y), SavedTensors(memory))
    gradient = [torch.ones_like(value) for value in gpu.taking(0, outputs.pop())]
    gradients = {(0, name): each for name, each in tensors.gradients.items()}
    with measure_memory(x[0].device) as meter:
        recording.backward(memory, gradient, gradients)
        return meter.peak_bytes


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _made(output: Sequence[Tensor], x: Sequence[Tensor]) -> int:
    """Bytes of the storages of the output that are not the input's."""
    storages = {value.untyped_storage()._cdata: value.untyped_storage().nbytes() for value in output}
    for value in x:
        storages.pop(value.untyped_storage()._cdata, None)
    return sum(storages.values())


class _Gradient(torch.autograd.Function):
    """Nothing forward; in backward new gradients in the shapes of what came in, which nobody else holds."""

    @staticmethod
    def forward(ctx: Any, *x: Tensor) -> Tensor:
        ctx.like = [(value.shape, value.dtype, value.device) for value in x]
        return torch.empty(0, device=x[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.ones(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )


class _LayerBehind(nn.Module):
    """Stands in for the layer behind: notes what is alive when the layer's output reaches it, and ``keeps`` that."""

    def __init__(self) -> None:
        super().__init__()
        self.meter: MemoryMeter | None = None
        self.saved_bytes = 0
        self.keeps = False
        self.kept: tuple[Tensor, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Skeletons are copies; this one is to be asked afterwards.
        return self

    def forward(self, *x: Tensor) -> Tensor:
        """Take the output and return a tensor of no bytes."""
        if self.meter is not None:
            self.saved_bytes = self.meter.live_bytes
        self.kept = x if self.keeps else ()
        result: Tensor = _Gradient.apply(*x)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return result

    def as_layer(self, input_gradients: tuple[bool, ...]) -> LayerSpec:
        return LayerSpec(
            "behind", "stand-in", self, {}, {}, random=False, changes_buffers=False, input_gradients=input_gradients
        )


class _Labelled(nn.Module):
    """A loss whose labels are given, so that something can stand behind it."""

    def __init__(self, inner: nn.Module, labels: Tensor) -> None:
        super().__init__()
        self.inner, self.labels = inner, labels

    def forward(self, logits: Tensor) -> Tensor:
        """The loss."""
        loss: Tensor = self.inner(logits, self.labels)
        return loss


def _labelled(spec: LayerSpec, labels: Tensor) -> LayerSpec:
    buffers = {f"inner.{name}": NamedBuffer(*named) for name, named in spec.buffers.items()}
    return replace(spec, module=_Labelled(spec.module, labels), buffers=buffers)
