"""Where the shards of a layer's tensors lie: in whole blocks, in blocks that hold just one shard, and at home.

Cut as ``sim/shards.py`` says: the parameters of a layer that are not tied, one after the other as they lie in its
block, and each tied one by itself. The optimizer state of a shard is that of the elements whose gradients it has. A
block of one shard holds what it has of each tensor, in the order of the layer's block, layer after layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from sim.schedule import Buffer, TensorKind
from sim.shards import cuts

from ..errors import ModelError
from ..models.layers import LayerModel
from .layout import Layouts, Slot, SlotKey, typed


class Stretch(NamedTuple):
    """Elements ``[start, stop)`` of a flattened tensor; never none."""

    slot: Slot
    start: int
    stop: int

    @property
    def first_byte(self) -> int:
        """Its place in the block of the layer."""
        return self.slot.offset + self.start * self.slot.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Its size."""
        return (self.stop - self.start) * self.slot.dtype.itemsize


class _Span(NamedTuple):
    """Neighbouring stretches of one dtype: where they lie in the layer's block, and in its shard."""

    dtype: torch.dtype
    start: int
    in_shard: int
    bytes: int


class ShardLayouts:
    """Shards of a model over so many GPUs."""

    def __init__(self, model: LayerModel, layouts: Layouts, gpus: int) -> None:
        self._model, self._layouts, self._gpus = model, layouts, gpus
        self._tied = {group.name for group in model.tied}
        self._stretches: dict[tuple[TensorKind, int], list[list[Stretch]]] = {}

    def stretches(self, kind: TensorKind, layer: int, shard: int) -> list[Stretch]:
        """What the shard has of a layer's tensors, in the order of its block."""
        by_shard = self._stretches.get((kind, layer))
        if by_shard is None:
            cut = self._cut_state(layer) if kind is TensorKind.OPTIMIZER_STATE else self._cut(kind, layer)
            by_shard = self._stretches[kind, layer] = cut
        return by_shard[shard]

    def bytes(self, kind: TensorKind, first: int, last: int, shard: int) -> int:
        """Size of a shard of a run of layers."""
        layers = range(first, last + 1)
        return sum([each.bytes for layer in layers for each in self.stretches(kind, layer, shard)])

    def parts(self, buffer: Buffer, block: Tensor, layer: int, shard: int) -> list[Tensor]:
        """The shard's bytes (uint8) of a layer in a buffer, which holds whole tensors or this shard of them; one part
        for each run of bytes that lie together in the layer's own block."""
        base = self._base(buffer, layer)
        spans = self._spans(buffer.kind, layer, shard)
        starts = [span.start if buffer.shard is None else span.in_shard for span in spans]
        return [block[base + at : base + at + span.bytes] for at, span in zip(starts, spans, strict=True)]

    def flat(self, buffer: Buffer, block: Tensor, layer: int, shard: int) -> list[Tensor]:
        """The same as flat tensors of their dtypes."""
        spans = self._spans(buffer.kind, layer, shard)
        parts = self.parts(buffer, block, layer, shard)
        return [typed(part, span.dtype, (-1,)) for part, span in zip(parts, spans, strict=True)]

    def home_parts(self, pieces: Sequence[Tensor], kind: TensorKind, layer: int, shard: int) -> list[list[Tensor]]:
        """The same parts in the layer's block at home, which is given in pieces; each part in as many."""
        return [_slice(pieces, span.start, span.start + span.bytes) for span in self._spans(kind, layer, shard)]

    def views(self, buffer: Buffer, block: Tensor, layer: int, shard: int) -> dict[SlotKey, Tensor]:
        """What the shard has of each tensor of a layer, flat; tensors of which it has nothing are left out."""
        at = base = self._base(buffer, layer)
        views = {}
        for stretch in self.stretches(buffer.kind, layer, shard):
            start = at if buffer.shard is not None else base + stretch.first_byte
            views[stretch.slot.key] = typed(block[start : start + stretch.bytes], stretch.slot.dtype, (-1,))
            at += stretch.bytes
        return views

    def of(self, weight: Tensor, layer: int, name: str, shard: int) -> Tensor:
        """What a shard has of one of a layer's trained weights, flat: a leaf of autograd."""
        stretches = self.stretches(TensorKind.GRADIENT, layer, shard)
        own = next(each for each in stretches if each.slot.name == name)
        return weight.detach().view(-1)[own.start : own.stop].requires_grad_()

    def check_trained(self) -> None:
        """Raises ModelError unless all weights of each layer are trained, or none: else the shards of its weights are
        not those of its gradients, and a GPU could not update its own."""
        for layer in self._model.layers:
            if layer.trainable and len(layer.trainable) < len(layer.parameters):
                frozen = sorted(layer.parameters.keys() - layer.trainable.keys())
                raise ModelError(
                    f"layer {layer.name} has trained weights and frozen ones ({', '.join(frozen[:3])}); with "
                    "reduce=scatter and update=gpu each GPU updates a piece of a layer, which must be trained as a "
                    "whole: plan with --update cpu or --reduce ring"
                )

    def _base(self, buffer: Buffer, layer: int) -> int:
        """Where the layer starts in a buffer."""
        if buffer.shard is None:
            return self._layouts[buffer.kind].offset(buffer.layer_first, layer)
        return self.bytes(buffer.kind, buffer.layer_first, layer - 1, buffer.shard)

    def _spans(self, kind: TensorKind, layer: int, shard: int) -> list[_Span]:
        spans: list[_Span] = []
        at = 0
        for stretch in self.stretches(kind, layer, shard):
            last, dtype = spans[-1] if spans else None, stretch.slot.dtype
            if last and last.dtype is dtype and last.start + last.bytes == stretch.first_byte:
                spans[-1] = last._replace(bytes=last.bytes + stretch.bytes)
            else:
                spans.append(_Span(dtype, stretch.first_byte, at, stretch.bytes))
            at += stretch.bytes
        return spans

    def _cut(self, kind: TensorKind, layer: int) -> list[list[Stretch]]:
        """Weights or gradients of a layer."""
        slots = self._layouts[kind].layers[layer]
        parameters = self._model.layers[layer].parameters
        tied = [slot for slot in slots if parameters[slot.name].qualified in self._tied]
        rest = [slot for slot in slots if slot not in tied]
        starts = dict(zip(rest, accumulate((slot.bytes for slot in rest), initial=0), strict=False))
        rest_cuts = cuts(sum(slot.bytes for slot in rest), self._gpus)
        found: list[list[Stretch]] = [[] for _ in range(self._gpus)]
        for slot in slots:
            start, at = (starts[slot], rest_cuts) if slot in starts else (0, cuts(slot.bytes, self._gpus))
            for shard, stretches in enumerate(found):
                size = slot.dtype.itemsize
                first, stop = (min(max(cut - start, 0), slot.bytes) // size for cut in at[shard : shard + 2])
                if first < stop:
                    stretches.append(Stretch(slot, first, stop))
        return found

    def _cut_state(self, layer: int) -> list[list[Stretch]]:
        """As the gradients of the parameters that the layer owns."""
        found = []
        for shard in range(self._gpus):
            have = {each.slot.name: each for each in self.stretches(TensorKind.GRADIENT, layer, shard)}
            slots = [s for s in self._layouts[TensorKind.OPTIMIZER_STATE].layers[layer] if s.name in have]
            found.append([Stretch(slot, have[slot.name].start, have[slot.name].stop) for slot in slots])
        return found


def _slice(pieces: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    """Bytes ``[start, stop)`` of pieces that follow one another."""
    found = []
    for piece in pieces:
        if start < len(piece) and stop > 0:
            found.append(piece[max(start, 0) : stop])
        start, stop = start - len(piece), stop - len(piece)
    return found
