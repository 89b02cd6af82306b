"""Where each tensor lies in the blocks of bytes that schedules move.

Weights, module buffers, gradients and optimizer state of a layer form one block each; the block of a run of layers is
theirs, one after the other, without gaps. The same layout holds in the host store and on the GPUs, so copies need not
know what they move.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from sim.schedule import TensorKind

from ..errors import ModelError
from ..models.layers import LayerModel

HOME_KINDS = (TensorKind.WEIGHT, TensorKind.BUFFER, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE)
"""Tensors that have a home in the host store."""

StateEntries = Mapping[str, torch.dtype]
"""Names and dtypes of what an optimizer keeps for a parameter in the parameter's own shape."""


SlotKey = tuple[str, str]
"""A tensor's name in its layer's module, and, of optimizer state, the entry's name (else "")."""


class Slot(NamedTuple):
    """A tensor's place in its layer's block."""

    name: str
    entry: str
    shape: torch.Size
    dtype: torch.dtype
    offset: int

    @property
    def key(self) -> SlotKey:
        """What tells it from the other tensors of the layer."""
        return self.name, self.entry

    @property
    def bytes(self) -> int:
        """Size of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, block: Tensor) -> Tensor:
        """The tensor in its layer's block (uint8), sharing its memory but not its version counter."""
        return typed(block[self.offset : self.offset + self.bytes], self.dtype, self.shape)


def typed(bytes: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Bytes (uint8 [n]) as a tensor that shares their memory.

    Views of one arena share a version counter, and a copy next door would then look to autograd like a change of what
    it saved; ``.data`` gives this one a counter of its own. Raises ModelError where the bytes are not aligned.
    """
    if bytes.storage_offset() % dtype.itemsize:
        raise ModelError(
            f"a tensor of {dtype} would start at byte {bytes.storage_offset()}, which is no multiple of its "
            f"{dtype.itemsize} bytes: layers that mix dtypes must hold an even number of the smaller elements"
        )
    return bytes.view(dtype).view(tuple(shape)).data


class BlockLayout:
    """Slots of every layer for one kind of tensor."""

    def __init__(self, layers: Iterable[Iterable[tuple[str, str, torch.Size, torch.dtype]]]) -> None:
        self.layers = tuple(tuple(_place(tensors)) for tensors in layers)
        self.bytes = tuple(sum(slot.bytes for slot in slots) for slots in self.layers)
        self._starts = (0, *accumulate(self.bytes))

    def offset(self, first: int, layer: int) -> int:
        """Where ``layer`` starts in the block of a run of layers that starts with ``first``."""
        return self._starts[layer] - self._starts[first]

    def run_bytes(self, first: int, last: int) -> int:
        """Size of the block of layers first … last."""
        return self._starts[last + 1] - self._starts[first]

    def part(self, block: Tensor, first: int, layers: tuple[int, int]) -> Tensor:
        """The bytes of ``layers`` in the block of a run of layers that starts with ``first``."""
        return block[self.offset(first, layers[0]) : self.offset(first, layers[1] + 1)]

    def views(self, block: Tensor, first: int, layer: int) -> dict[SlotKey, Tensor]:
        """One layer's tensors in the block of a run of layers that starts with ``first``."""
        own = self.part(block, first, (layer, layer))
        return {slot.key: slot.view(own) for slot in self.layers[layer]}

    def flat(self, block: Tensor, first: int, last: int) -> list[Tensor]:
        """The block of layers first … last as flat tensors, one for each stretch of equal dtype."""
        stretches: list[tuple[torch.dtype, int, int]] = []
        for layer in range(first, last + 1):
            for slot in self.layers[layer]:
                start = self.offset(first, layer) + slot.offset
                if stretches and stretches[-1][0] is slot.dtype:
                    stretches[-1] = (slot.dtype, stretches[-1][1], start + slot.bytes)
                else:
                    stretches.append((slot.dtype, start, start + slot.bytes))
        return [typed(block[start:stop], dtype, (-1,)) for dtype, start, stop in stretches]


def _place(tensors: Iterable[tuple[str, str, torch.Size, torch.dtype]]) -> Iterator[Slot]:
    offset = 0
    # Larger elements first (the order is otherwise kept), so that each is aligned where the layer is.
    for name, entry, shape, dtype in sorted(tensors, key=lambda tensor: -tensor[3].itemsize):
        slot = Slot(name, entry, shape, dtype, offset)
        offset += slot.bytes
        yield slot


Layouts = Mapping[TensorKind, BlockLayout]
"""A layout for each of :data:`HOME_KINDS`."""


def layouts(model: LayerModel, state: Mapping[int, StateEntries]) -> Layouts:
    """Layouts of a model. ``state`` says what the optimizer keeps, by ``id`` of the parameter."""
    return {
        TensorKind.WEIGHT: BlockLayout(
            [(name, "", p.tensor.shape, p.tensor.dtype) for name, p in layer.parameters.items()]
            for layer in model.layers
        ),
        TensorKind.BUFFER: BlockLayout(
            [(name, "", b.tensor.shape, b.tensor.dtype) for name, b in layer.buffers.items()] for layer in model.layers
        ),
        TensorKind.GRADIENT: BlockLayout(
            [(name, "", p.tensor.shape, p.tensor.dtype) for name, p in layer.trainable.items()]
            for layer in model.layers
        ),
        TensorKind.OPTIMIZER_STATE: BlockLayout(
            [
                (name, entry, p.tensor.shape, dtype)
                for name, p in model.owned(layer).items()
                for entry, dtype in state.get(id(p.tensor), {}).items()
            ]
            for layer in range(len(model))
        ),
    }
