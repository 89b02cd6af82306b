"""Gradients of parameters that one layer uses, or several: their sums, and the norm of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..models.layers import LayerModel
from .layout import SlotKey

Views = Callable[[int], Mapping[SlotKey, Tensor]]
"""The gradients of a layer, wherever they are."""

_PIECE = 2**20
"""So many elements are added at a time, with 64 bits each: so no copy of a large parameter is made."""


class GradientNorm(NamedTuple):
    """The 2-norm of a gradient. If it is not finite, ``culprit`` is the first parameter whose own norm is not."""

    value: float
    culprit: str | None


class Gradients:
    """Which layers have gradients of which parameters."""

    def __init__(self, model: LayerModel) -> None:
        self._model = model
        self._users: dict[nn.Parameter, list[tuple[int, SlotKey]]] = {}
        for index, layer in enumerate(model.layers):
            for name, parameter in layer.trainable.items():
                self._users.setdefault(parameter.tensor, []).append((index, (name, "")))

    def total(self, parameter: nn.Parameter, views: Views) -> Tensor:
        """A parameter's gradient: the sum over the layers that use it, in their order, in the first one's place."""
        (owner, key), *others = self._users[parameter]
        total = views(owner)[key]
        for layer, other_key in others:
            total.add_(views(layer)[other_key])
        return total

    def norm(self, views: Views, scale: float) -> GradientNorm:
        """The 2-norm over all parameters, of gradients that are ``scale`` times too large; nothing changes."""
        squares = 0.0
        culprit: str | None = None
        for uses in self._users.values():
            own = sum(_squares([views(layer)[key].view(-1) for layer, key in uses]))
            if culprit is None and not math.isfinite(own):
                layer, (name, _) = uses[0]
                spec = self._model.layers[layer]
                culprit = f"{spec.trainable[name].qualified} (layer {layer}, {spec.name})"
            squares += own
        return GradientNorm(math.sqrt(squares) / scale, culprit)


def _squares(parts: list[Tensor]) -> Iterator[float]:
    """The sums of the squares of the elements of a sum of flat tensors, piece by piece."""
    for start in range(0, parts[0].numel(), _PIECE):
        first, *others = [part[start : start + _PIECE] for part in parts]
        total = first.double()
        for other in others:
            total = total + other
        yield torch.dot(total, total).item()
