"""How busy each half of a Harmony plan makes GPUs, links and host at least: times that add up over both halves.

The forward half of a plan is a microbatch size and its forward packs, the backward half likewise. Each is a vector of
times (ns), by what they are times of; the largest element of the sum of two is a bound from below on the step. So the
bounds of all pairs of halves cost little more than an addition::

    each GPU │ all GPUs, if evenly shared out │ bytes into GPUs │ out of them │ DRAM │ updates in the host

In the time of a GPU, a forward half includes what must come before its first group, and a backward half what must
follow its last one; likewise what precedes the first byte out of GPUs, and follows the last byte into them. In a
pipeline packs are dealt round robin, and a backward half begins at the GPU after the last forward pack: it has a row
for each such *deal*, the number of forward packs modulo the number of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from traces.costs import Costs
from traces.schema import Phase

from ..hardware.machine import HOST, Machine
from ..plan import Pack, Reduce, StashPlace, UpdateOn, UpdateWhen, shares
from ..schedule import TensorKind
from ..shards import Shards
from ..units import NS_PER_S
from .group_work import norm_ns
from .jobs import Batches, Size
from .ways import Ways

Busy = NDArray[np.float64]
"""Times (ns), by what they are times of, on the last axis."""

_ROUNDING_NS = 0.5
"""By so much a task may be shorter than its share of the time."""


class Halves:
    """Halves of plans that have minibatch, update, reduction and order of GPUs in common.

    ``parallel``: every GPU runs all packs. ``turns``: the GPUs in the order in which they take turns. ``split``: some
    backwards are done in two parts, and packs hand on after the first of them. ``stays``: some weights or optimizer
    state stay on GPUs; then none of either counts, as packs of both halves decide what still moves.
    """

    def __init__(
        self,
        costs: Costs,
        machine: Machine,
        *,
        parallel: bool,
        minibatch: int,
        update: UpdateOn,
        update_when: UpdateWhen,
        reduce: Reduce,
        turns: Sequence[int],
        split: bool = False,
        stays: bool = False,
    ) -> None:
        self._costs, self._machine, self._ways = costs, machine, Ways(machine)
        self._parallel, self._update, self._reduce = parallel, update, reduce
        self._at_end = update_when is UpdateWhen.END
        self._gpus, self._turns, self._split, self._stays = len(machine.gpus), turns, split, stays
        self._shards = Shards(costs, self._gpus)
        self._scattered = parallel and reduce is Reduce.SCATTER and self._gpus > 1
        self._samples = [b - a for a, b in shares(minibatch, self._gpus)] if parallel else [minibatch]
        self._speeds = np.array([gpu.speed for gpu in machine.gpus])
        top = [*(link for link in machine.links if link.parent == HOST), *(g for g in machine.gpus if g.link == HOST)]
        into = [sum(end.bandwidth for end in ends) for ends in (top, machine.gpus)]
        out = [sum(end.rate_up for end in ends) for ends in (top, machine.gpus)]
        self._in_ns, self._out_ns = (NS_PER_S / min(*rates, machine.host.dram_bandwidth) for rates in (into, out))
        self._dram_ns = NS_PER_S / machine.host.dram_bandwidth
        self._totals: dict[tuple[Callable[[int, int], int], int], list[int]] = {}

    @property
    def no_forward(self) -> Busy:
        """The forward half of a plan whose backward is one pack."""
        return np.zeros(self._gpus + 5)

    def forward(self, u: int, packs: Sequence[Pack]) -> Busy:
        """A forward half with at least one pack."""
        costs = self._costs
        batches = self._batches(u)
        work = np.array([[b.total(partial(costs.forward_ns, *pack)) for b in batches] for pack in packs])
        firsts = [costs.forward_ns(*pack, batches[0].first) for pack in packs]
        state = self._group_bytes(packs[0])
        tasks = len(packs) * sum(b.number for b in batches)
        if self._parallel:
            own = work.sum(axis=0) / self._speeds
            own += [self._ways.into[gpu].ns(state) for gpu in range(self._gpus)]
        else:
            own = np.zeros(self._gpus)
            before = self._ways.into[self._turns[0]].ns(state)
            for position, first in enumerate(firsts):
                gpu = self._turns[position % self._gpus]
                own[gpu] += work[position, 0] / self._speeds[gpu] + (before if position < self._gpus else 0.0)
                before += first / self._speeds[gpu] - _ROUNDING_NS
        into, out = self._forward_bytes(u, packs)
        busy = self._busy(own - _ROUNDING_NS * tasks, work.sum(), tasks, into, out, 0.0)
        fetched = min(self._ways.into[gpu].ns(state) for gpu in (self._turns if self._parallel else self._turns[:1]))
        smallest = min(costs.forward_ns(*packs[0], b.first) for b in batches)
        busy[self._gpus + 2] += fetched + smallest / self._speeds.max() - _ROUNDING_NS
        return busy

    def backward(self, u: int, packs: Sequence[Pack], stash: Mapping[int, StashPlace]) -> Busy:
        """A row for each deal; only one in data parallel, where it does not matter. ``stash``: by pack."""
        costs, last = self._costs, self._costs.layer_count - 1
        batches = self._batches(u)

        def pack_ns(pack: Pack, v: int) -> int:
            both = costs.backward_ns(*pack, v)
            if self._split:
                both = min(both, costs.backward_input_ns(*pack, v) + costs.backward_weight_ns(*pack, v))
            return costs.forward_ns(*pack, v) + both

        work = np.array([[b.total(partial(pack_ns, pack)) for b in batches] for pack in packs])
        updates = [0] * len(packs)
        host = 0.0
        if self._update is UpdateOn.GPU:
            updates = [costs.update_ns(*pack, Phase.UPDATE_GPU) for pack in packs]
        else:
            host = costs.update_ns(0, last, Phase.UPDATE_CPU) / self._machine.host.speed - _ROUNDING_NS * len(packs)
        tasks = len(packs) * (1 + (1 + self._split) * sum(b.number for b in batches))
        if self._parallel:
            own = (work.sum(axis=0) / self._speeds + self._homeward_ns(packs[0], 0))[None, :]
            for index, (pack, update) in enumerate(zip(packs, updates, strict=True)):
                own[0] += update * self._update_parts(pack, self._turns[index % self._gpus]) / self._speeds
        else:
            lasts = [pack_ns(pack, batches[0].last) for pack in packs]
            own = np.array([self._dealt(deal, work[:, 0] + updates, lasts, packs) for deal in range(self._gpus)])
        into, out = self._backward_bytes(u, packs, stash)
        busy = self._busy(own - _ROUNDING_NS * tasks, work.sum(), tasks, into, out, host)
        if self._update is UpdateOn.CPU:  # else the last byte in may be for an update
            smallest = min(pack_ns(packs[0], b.last) for b in batches)
            busy[..., self._gpus + 1] += smallest / self._speeds.max() - _ROUNDING_NS
            busy[..., self._gpus + 1] += min(self._homeward_ns(packs[0], gpu) for gpu in range(self._gpus))
        return busy

    def _update_parts(self, pack: Pack, owner: int) -> NDArray[np.float64]:
        """By GPU, which part of a pack's update it does at least."""
        if self._scattered:
            return np.array([self._shards.updated(pack, gpu) for gpu in range(self._gpus)])
        return np.array([float(gpu == owner) for gpu in range(self._gpus)])

    def _dealt(self, deal: int, work: Busy, lasts: Sequence[int], packs: Sequence[Pack]) -> Busy:
        """Time of each GPU if the last backward pack takes turn ``deal``, and what follows its last group."""
        own = np.zeros(self._gpus)
        gpus = [self._turns[(deal + len(packs) - 1 - index) % self._gpus] for index in range(len(packs))]
        after = self._homeward_ns(packs[0], gpus[0])
        for index, gpu in enumerate(gpus):
            own[gpu] += work[index] / self._speeds[gpu] + (after if index < self._gpus else 0.0)
            # What other GPUs do after the first part of a backward may be done while this one does its second part.
            after = 0.0 if self._split else after + lasts[index] / self._speeds[gpu] - _ROUNDING_NS
        return own

    def _homeward_ns(self, pack: Pack, gpu: int) -> float:
        """From the last backward to the end of what the host does then: its pack's update, or the norm (which ends
        before the updates of GPUs) and all updates."""
        if self._update is UpdateOn.GPU and not self._at_end:
            return 0.0
        update = 0.0
        if self._update is UpdateOn.CPU:
            updated = (0, self._costs.layer_count - 1) if self._at_end else pack
            update = self._costs.update_ns(*updated, Phase.UPDATE_CPU) / self._machine.host.speed
            update -= _ROUNDING_NS * (self._costs.layer_count if self._at_end else 1)
        if self._at_end:
            update += norm_ns(self._costs, self._machine) - _ROUNDING_NS
        gpus = range(self._gpus) if self._parallel else [gpu]
        if self._scattered:
            sizes = [self._shards.bytes(TensorKind.GRADIENT, pack, each) for each in gpus]
            return max(self._ways.out[each].ns(size) for each, size in zip(gpus, sizes, strict=True)) + update
        return min(self._ways.out[each].ns(self._costs.gradient_bytes(*pack)) for each in gpus) + update

    def _forward_bytes(self, u: int, packs: Sequence[Pack]) -> tuple[float, float]:
        inputs = self._over_layers(u, self._costs.input_bytes)
        into, out = self._state_bytes(packs[-1][1]) + inputs[0], 0
        if self._parallel:
            edges = sum(inputs[first] for first, _ in packs[1:])
            into, out = into + edges, edges + inputs[packs[-1][1] + 1]
        return into, out

    def _backward_bytes(self, u: int, packs: Sequence[Pack], stash: Mapping[int, StashPlace]) -> tuple[float, float]:
        costs, last = self._costs, self._costs.layer_count - 1
        inputs = self._over_layers(u, costs.input_bytes)
        firsts = [first for first, _ in packs]
        swapped = [packs[index][0] for index, place in stash.items() if place is StashPlace.SWAP]
        # In a pipeline the fused pack's input, and all gradients between packs, may come from other GPUs.
        come = [0, *swapped, *(firsts[1:][-1:] if self._parallel else [])]
        into = self._state_bytes(last) + self._total(u, costs.label_bytes) + sum(inputs[at] for at in come)
        gradient, out = costs.gradient_bytes(0, last), 0
        again = gradient if self._at_end and self._update is UpdateOn.GPU else 0
        if self._parallel:
            gradients = self._over_layers(u, costs.input_gradient_bytes)
            edges = sum(gradients[at] for at in firsts[1:])
            into, out = into + edges, out + edges
        else:
            out += sum(inputs[at] for at in swapped)
        if self._parallel and self._reduce is Reduce.HOST and self._gpus > 1:
            out += self._gpus * gradient
        elif self._update is UpdateOn.CPU or self._at_end:
            out += gradient
        if self._update is UpdateOn.GPU and not self._stays:
            layers = [layer for layer in range(costs.layer_count) if costs.updates(layer)]
            state = sum(costs.optimizer_state_bytes(layer, layer) for layer in layers)
            weight = sum(costs.weight_bytes(layer, layer) for layer in layers)
            into, out = into + state + (weight if self._at_end else 0), out + state + weight
        return into + again, out

    def _batches(self, u: int) -> list[Batches]:
        return [Batches.of(samples, u) for samples in self._samples]

    def _state_bytes(self, last: int) -> int:
        """Weights and buffers up to a layer, on all GPUs that need them."""
        return len(self._samples) * self._group_bytes((0, last))

    def _group_bytes(self, pack: Pack) -> int:
        """Weights and buffers that come in for a group."""
        return (0 if self._stays else self._costs.weight_bytes(*pack)) + self._costs.buffer_bytes(*pack)

    def _over_layers(self, u: int, size: Callable[[int, int], int]) -> list[int]:
        """Of every layer, bytes of a tensor over the minibatch."""
        if (size, u) not in self._totals:
            self._totals[size, u] = [self._total(u, partial(size, layer)) for layer in range(self._costs.layer_count)]
        return self._totals[size, u]

    def _total(self, u: int, size: Size) -> int:
        """Bytes of a tensor over the minibatch."""
        return sum(batches.total_bytes(size) for batches in self._batches(u))

    def _busy(self, own: Busy, work: float, tasks: float, into: float, out: float, host: float) -> Busy:
        shared = (work - _ROUNDING_NS * tasks * self._speeds.max()) / self._speeds.sum()
        columns = [shared, into * self._in_ns, out * self._out_ns, (into + out) * self._dram_ns, host]
        return np.concatenate([own, np.broadcast_to(columns, (*own.shape[:-1], len(columns)))], axis=-1)
