"""How tensors that pass between layers lie in the blocks of bytes that schedules move.

A block holds one tensor or several of the same samples, one after the other, those of larger elements first, so that
each is aligned. Cut by samples, a block comes in as many pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from sim.schedule import Buffer, Interval, TensorKind

from ..models.layers import LayerModel, takes_gradient
from .layout import typed

Spec = tuple[torch.Size, torch.dtype]
"""Shape of one sample of a tensor, and its dtype."""


@dataclass(frozen=True)
class Record:
    """What passes at one place, in the order in which layers take it."""

    specs: tuple[Spec, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor]) -> Record:
        """From the tensors of some samples."""
        return Record(tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors))

    @property
    def sample_bytes(self) -> int:
        """Size of a sample of all tensors together."""
        return sum(map(_bytes, self.specs))

    def tensors(self, block: Tensor, samples: int) -> list[Tensor]:
        """The tensors in a block (uint8), sharing its memory."""
        found: dict[int, Tensor] = {}
        for at, start, stop in self._places(samples):
            shape, dtype = self.specs[at]
            found[at] = typed(block[start:stop], dtype, (samples, *shape))
        return [found[at] for at in range(len(self.specs))]

    def pieces(self, block: Tensor, held: Interval, wanted: Interval) -> list[Tensor]:
        """The bytes of the samples ``wanted`` in a block of the samples ``held``."""
        skip, count = wanted[0] - held[0], wanted[1] - wanted[0]
        pieces = []
        for at, start, _ in self._places(held[1] - held[0]):
            size = _bytes(self.specs[at])
            pieces.append(block[start + skip * size : start + (skip + count) * size])
        return pieces

    def _places(self, samples: int) -> Iterator[tuple[int, int, int]]:
        """Index, start and stop of each tensor, in the order in which they lie."""
        start = 0
        for at in sorted(range(len(self.specs)), key=lambda at: -self.specs[at][1].itemsize):
            stop = start + samples * _bytes(self.specs[at])
            yield at, start, stop
            start = stop


class Records:
    """What passes at each layer, known since it last passed there."""

    def __init__(self, model: LayerModel) -> None:
        self._model = model
        self._values: dict[int, Record] = {}
        self._gradients: dict[int, Record] = {}

    def note(self, layer: int, x: Sequence[Tensor]) -> None:
        """x(layer), as it has just come out."""
        self._values[layer] = Record.of(x)
        self._gradients[layer] = Record.of(takes_gradient(self._model.layers[layer], x))

    def of(self, buffer: Buffer) -> Record:
        """What lies in a buffer of x(l) or g(l)."""
        known = self._gradients if buffer.kind is TensorKind.ACTIVATION_GRADIENT else self._values
        return known[buffer.layer_first]


def _bytes(spec: Spec) -> int:
    return prod(spec[0]) * spec[1].itemsize
