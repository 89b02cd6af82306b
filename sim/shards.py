"""Shards: what each of N GPUs has of a layer's weights, gradients or optimizer state.

A layer's parameters, flattened and one after the other, are cut into N parts of whole grains of 16 bytes, so that no
element of any dtype is cut in two; the first parts have one grain more. A tied parameter is cut by itself: its parts
are the same in every layer that uses it. The optimizer state of a part is that part's share of the layer's: exact for
optimizers that keep as much for every byte of weights. The shard of a run of layers is the shards of its layers, one
after the other, so bytes of runs and of shards add up::

    layer of 72 B on 2 GPUs     0 ────────── 48 ─────── 72        5 grains, the last one half full: 3 and 2
                                │  shard 0   │ shard 1 │
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from traces.costs import Costs

from .home import home_bytes
from .schedule import TensorKind

GRAIN_BYTES = 16
"""Shards end at multiples of so many bytes; the largest element of torch (complex128) has as many."""


def cuts(size: int, parts: int) -> list[int]:
    """Where the parts of ``size`` bytes begin and end: ``parts + 1`` offsets."""
    base, extra = divmod(-(-size // GRAIN_BYTES), parts)
    return [min(size, GRAIN_BYTES * (part * base + min(part, extra))) for part in range(parts + 1)]


class Shards:
    """Bytes of the shards of one model over so many GPUs."""

    def __init__(self, costs: Costs, gpus: int) -> None:
        self.gpus = gpus
        self._costs = costs
        self._groups = costs.trace.tied_groups
        self._totals: dict[tuple[TensorKind, int], list[int]] = {}

    def bytes(self, kind: TensorKind, run: tuple[int, int], shard: int | None) -> int:
        """Of a run of layers: weights or gradients of the parameters they use, or state of those that they own. Of all
        shards together (None), and then of any tensor that has a home."""
        if shard is None:
            return home_bytes(self._costs, kind, run)
        totals = self._totals.get((kind, shard))
        if totals is None:
            layers = range(self._costs.layer_count)
            sizes = [self._layer_cuts(kind, layer) for layer in layers]
            totals = list(accumulate((at[shard + 1] - at[shard] for at in sizes), initial=0))
            self._totals[kind, shard] = totals
        return totals[run[1] + 1] - totals[run[0]]

    def updated(self, run: tuple[int, int], shard: int) -> float:
        """Which part of the layers' optimizer step the shard takes (0 … 1)."""
        owned = [self._owned(layer) for layer in range(run[0], run[1] + 1) if self._costs.updates(layer)]
        total = sum(at[-1] for at in owned)
        return sum(at[shard + 1] - at[shard] for at in owned) / total if total else 0.0

    def _layer_cuts(self, kind: TensorKind, layer: int) -> list[int]:
        """Where the layer's shards begin and end."""
        match kind:
            case TensorKind.WEIGHT | TensorKind.GRADIENT:
                return self._cut(self._pieces(layer, home_bytes(self._costs, kind, (layer, layer))))
            case TensorKind.OPTIMIZER_STATE:
                owned, state = self._owned(layer), self._costs.optimizer_state_bytes(layer, layer)
                return [state * at // owned[-1] if owned[-1] else 0 for at in owned]
            case _:
                raise ValueError(f"{kind.value} is never cut into shards")

    def _owned(self, layer: int) -> list[int]:
        """The same for the gradients of just the parameters that the layer owns."""
        return self._cut(self._pieces(layer, self._costs.gradient_bytes(layer, layer), owned=True))

    def _pieces(self, layer: int, size: int, *, owned: bool = False) -> list[int]:
        """Of ``size`` bytes: of all parameters that are not tied together, and of each tied one."""
        tied = self._costs.trace.layers[layer].tied
        rest = size - sum(each.weight_bytes for each in tied)
        if rest < 0:  # not all of them are trained
            return [size]
        mine = [each for each in tied if not owned or self._groups[each.group][0] == layer]
        return [rest, *(each.weight_bytes for each in mine)]

    def _cut(self, pieces: Sequence[int]) -> list[int]:
        return [sum(at) for at in zip(*(cuts(size, self.gpus) for size in pieces), strict=True)]
