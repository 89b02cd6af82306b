"""What the layers of a model are, without running it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ModelError
from .workloads import Workload


@dataclass(frozen=True)
class LayerSummary:
    """One layer. ``parameters``: how many numbers, shared ones included. ``passes_on``: form of what leaves it, for one
    sample. ``tied_with``: other layers that use parameters of it."""

    layer: int
    name: str
    kind: str
    parameters: int
    weight_bytes: int
    passes_on: tuple[str, ...]
    tied_with: tuple[int, ...]


def summarize_layers(workload: Workload) -> list[LayerSummary]:
    """The layers of a workload's model, the loss last. Raises ModelError if it cannot be cut."""
    model = workload.layers()
    inputs, labels = workload.checked_batch(1, 0)
    x = tuple(tensor.to("meta") for tensor in inputs.tensors)
    rows = []
    for index, layer in enumerate(model.layers):
        args = (*x, labels.to("meta")) if index == len(model) - 1 else x
        try:
            with torch.no_grad():
                output = layer.skeleton()(*args)
        except Exception as error:
            raise ModelError(
                f"layer {layer.name} ({layer.kind}) fails on inputs without values: {type(error).__name__}: {error}"
            ) from error
        x = output if isinstance(output, tuple) else (output,)
        rows.append(
            LayerSummary(
                layer=index,
                name=layer.name,
                kind=layer.kind,
                parameters=sum(named.tensor.numel() for named in layer.parameters.values()),
                weight_bytes=layer.weight_bytes,
                passes_on=tuple(_form(tensor) for tensor in x),
                tied_with=tuple(
                    sorted({at for group in model.tied if index in group.layers for at in group.layers} - {index})
                ),
            )
        )
    return rows


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape[1:])}"
