"""Which layers cost the same: equal in structure, shapes and options, so that measuring one tells of all."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import Tensor

from ..models.layers import LayerSpec
from ..models.structure import structure


def likeness(layer: LayerSpec, inputs: Sequence[Tensor]) -> Hashable:
    """A key that two layers share only if their modules, called on inputs like these, do the same work."""
    reached = tuple((tuple(tensor.shape), tensor.dtype) for tensor in inputs)
    return structure(layer.module), reached, layer.input_gradients
