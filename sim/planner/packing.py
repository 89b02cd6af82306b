"""Packing: cutting layers into packs of nearly equal time that fit the memory, by dynamic programming.

A forward pack takes its forward time; a backward pack its forward (recompute) and backward time. Of all cuts into a
given number of packs, none of which exceeds the memory cap, the one is taken whose largest pack takes least; among
those the one whose smallest pack takes most (the most even); among those the leftmost, with the smallest first packs.

    L layers, 3 packs       largest pack of the first j layers in k packs:
    ├──┤├────┤├───┤         f(k, j) = min over i < j of max(f(k - 1, i), time of layers i … j - 1)

What a pack has to hold on its GPU is no monotone function of its layers (a longer pack can end at a thinner
boundary), so every cut is looked at: L² per count, in numpy. Figures are float64, exact below 2^53.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from traces.costs import Costs
from traces.schema import Phase

from ..hardware.machine import Machine
from ..plan import Pack, UpdateOn

Figures = NDArray[np.float64]


class Packer:
    """Packs of one phase at one microbatch size, of the layers from 0 on, for any count and any end.

    ``stop`` is one past the last layer of a cut. Tables are filled as far as questions need them. Raises TraceError
    for microbatch sizes outside the trace.
    """

    def __init__(
        self,
        costs: Costs,
        u: int,
        phase: Phase,
        cap_bytes: int,
        *,
        update: UpdateOn = UpdateOn.CPU,
    ) -> None:
        if phase.is_update:
            raise ValueError(f"packs are of the forward or the backward phase, not {phase.value}")
        self._size = costs.layer_count
        self._time = _prefix(costs, lambda a, b: _time_ns(costs, (a, b), u, phase))
        self._held = _forward_bytes(costs, u) if phase is Phase.FORWARD else _backward_bytes(costs, u)
        if phase is Phase.BACKWARD and update is UpdateOn.GPU:
            np.maximum(self._held, _update_bytes(costs), out=self._held)
        # Both tables are over boundaries: pack (i, j) holds the layers i … j - 1, i < j.
        self._fits = np.zeros((self._size + 1, self._size + 1), dtype=bool)
        self._fits[:-1, 1:] = np.triu(self._held <= cap_bytes)
        durations = self._time[None, :] - self._time[:, None]
        self._into = np.ascontiguousarray(np.where(self._fits, durations, np.inf).T)
        self._largest: list[Figures] = [_start(self._size + 1, 0.0)]
        self._cuts: dict[tuple[int, int], tuple[Pack, ...] | None] = {}
        self._fewest = self._fewest_packs()

    def time_ns(self, pack: Pack) -> int:
        """What one microbatch of a pack takes."""
        return int(self._time[pack[1] + 1] - self._time[pack[0]])

    def held_bytes(self, pack: Pack) -> int:
        """What a pack cannot do without on its GPU while it works on a microbatch (or, on the GPU, updates)."""
        return int(self._held[pack])

    def smallest_count(self, stop: int) -> int | None:
        """The fewest packs that fit; None if there is no cut that does."""
        fewest = self._fewest[stop]
        return None if np.isinf(fewest) else int(fewest)

    def bottleneck_ns(self, count: int, stop: int) -> int | None:
        """Time of the largest pack of the best cut into ``count`` packs; None if no such cut fits."""
        if not 0 <= count <= stop:
            return None
        while len(self._largest) <= count:
            self._largest.append(np.maximum(self._into, self._largest[-1]).min(axis=1))
        largest = self._largest[count][stop]
        return None if np.isinf(largest) else int(largest)

    def balanced(self, count: int, stop: int) -> tuple[Pack, ...] | None:
        """The best cut into ``count`` packs; None if no such cut fits."""
        key = count, stop
        if key not in self._cuts:
            limit = self.bottleneck_ns(count, stop)
            self._cuts[key] = None if limit is None else self._most_even(count, stop, limit)
        return self._cuts[key]

    def hungriest(self, stop: int) -> tuple[Pack, int]:
        """The pack that decides whether there is a cut at all, and the bytes it holds: of the smallest packs around
        each layer, the largest."""
        held = np.where(np.triu(np.ones((stop, stop), dtype=bool)), self._held[:stop, :stop], np.inf)
        within = np.minimum.accumulate(np.minimum.accumulate(held, axis=0)[:, ::-1], axis=1)[:, ::-1]
        layer = int(within.diagonal().argmax())
        least = within[layer, layer]
        first, last = np.argwhere(held[: layer + 1, layer:] == least)[-1]
        return (int(first), layer + int(last)), int(least)

    def _fewest_packs(self) -> Figures:
        fewest = _start(self._size + 1, 0.0)
        for end in range(1, self._size + 1):
            reached = fewest[:end][self._fits[:end, end]]
            fewest[end] = reached.min() + 1 if reached.size else np.inf
        return fewest

    def _most_even(self, count: int, size: int, limit: int) -> tuple[Pack, ...]:
        """Among cuts of ``size`` layers whose largest pack takes ``limit``: largest smallest pack, then leftmost.

        ``smallest[k][i]`` is the best smallest pack of the layers from i on, cut into k packs; -1: no such cut.
        """
        if count == 0:
            return ()
        into = self._into[: size + 1, : size + 1].T
        starts = np.arange(size + 1)
        longest = int(np.where(into <= limit, starts[None, :] - starts[:, None], 1).max())
        ends = np.minimum(starts[:, None] + 1 + np.arange(longest)[None, :], size)
        times = np.take_along_axis(np.where(into <= limit, into, -1.0), ends, axis=1)
        smallest = [np.full(size + 1, -1.0)]
        smallest[0][size] = np.inf
        for _ in range(count):
            smallest.append(np.minimum(times, smallest[-1][ends]).max(axis=1))
        goal = smallest[count][0]
        packs: list[Pack] = []
        at = 0
        for left in range(count - 1, -1, -1):
            good = (times[at] >= goal) & (smallest[left][ends[at]] >= goal)
            end = int(ends[at, good.argmax()])
            packs.append((at, end - 1))
            at = end
        return tuple(packs)


def packing_gpu(costs: Costs, machine: Machine, u: int, *, in_pipeline: bool) -> int:
    """The GPU for whose memory layers are cut into packs, in microbatches of ``u``.

    It is the smallest one, as a pack may come to lie on any. In a pipeline each lies on one GPU only: there it is the
    smallest one on which all layers can be cut (the largest one if there is none), and a plan that puts too much on a
    smaller one is refused when it is built.
    """
    by_size = sorted(range(len(machine.gpus)), key=lambda gpu: machine.gpus[gpu].usable_bytes)
    if not in_pipeline:
        return by_size[0]
    for gpu in by_size[:-1]:
        packer = Packer(costs, u, Phase.BACKWARD, machine.gpus[gpu].usable_bytes, update=UpdateOn.CPU)
        if packer.smallest_count(costs.layer_count) is not None:
            return gpu
    return by_size[-1]


def _time_ns(costs: Costs, run: Pack, u: int, phase: Phase) -> int:
    forward = costs.forward_ns(*run, u)
    return forward if phase is Phase.FORWARD else forward + costs.backward_ns(*run, u)


def _start(size: int, value: float) -> Figures:
    """Infinity everywhere but at the start."""
    figures = np.full(size, np.inf)
    figures[0] = value
    return figures


def _prefix(costs: Costs, total: Callable[[int, int], int]) -> Figures:
    """Sums over the first 0, 1, … layers."""
    return np.array([0, *(total(0, last) for last in range(costs.layer_count))], dtype=np.float64)


def _each(costs: Costs, figure: Callable[[int], int]) -> Figures:
    return np.array([figure(layer) for layer in range(costs.layer_count)], dtype=np.float64)


def _runs(prefix: Figures) -> Figures:
    """Sums over layers i … j as a matrix."""
    return prefix[None, 1:] - prefix[:-1, None]


def _forward_bytes(costs: Costs, u: int) -> Figures:
    """Of pack i … j: weights, buffers, input, output, and the forward's peak (see Costs.forward_workspace_bytes)."""
    inputs = _each(costs, lambda layer: costs.input_bytes(layer, u))
    outputs = _each(costs, lambda layer: costs.output_bytes(layer, u))
    alone = _each(costs, lambda layer: costs.forward_workspace_bytes(layer, layer, u))
    held = _runs(_prefix(costs, lambda a, b: costs.weight_bytes(a, b) + costs.buffer_bytes(a, b)))
    held += inputs[:, None] + outputs[None, :]
    for at in range(len(alone)):
        peaks = inputs[at:] + alone[at:]
        peaks[0] = alone[at]
        held[at, at:] += np.maximum.accumulate(peaks)
    return held


def _backward_bytes(costs: Costs, u: int) -> Figures:
    """Of pack i … j: weights, buffers, gradient, input, incoming gradient (labels for the last layer), outgoing
    gradient (none for layer 0), and autograd's peak (see Costs.backward_workspace_bytes)."""
    last_layer = costs.layer_count - 1

    def incoming(layer: int) -> int:
        return costs.label_bytes(u) if layer == last_layer else costs.input_gradient_bytes(layer + 1, u)

    def in_and_out(layer: int) -> int:
        return costs.input_bytes(layer, u) + (costs.input_gradient_bytes(layer, u) if layer else 0)

    state = _prefix(
        costs, lambda a, b: costs.weight_bytes(a, b) + costs.buffer_bytes(a, b) + costs.gradient_bytes(a, b)
    )
    held = _runs(state) + _each(costs, in_and_out)[:, None] + _each(costs, incoming)[None, :]
    saved = _prefix(costs, lambda a, b: costs.saved_bytes(a, b, u))
    peaks = saved[:-1] + _each(costs, lambda layer: costs.backward_workspace_bytes(layer, layer, u))
    for at in range(len(peaks)):
        held[at, at:] += np.maximum.accumulate(peaks[at:]) - saved[at]
    return held


def _update_bytes(costs: Costs) -> Figures:
    """Of pack i … j while it is updated on the GPU: weights, buffers, gradient, optimizer state."""
    return _runs(
        _prefix(
            costs,
            lambda a, b: (
                costs.weight_bytes(a, b)
                + costs.buffer_bytes(a, b)
                + costs.gradient_bytes(a, b)
                + costs.optimizer_state_bytes(a, b)
            ),
        )
    )
