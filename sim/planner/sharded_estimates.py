"""A bound from below on the step time of plans over shards, whose copies are all known.

Every copy counts as if it were alone. The first GPU has a microbatch in every round, so it does every step, between its
first fetch and the last reduction; then comes the host's update of all layers.
"""

from __future__ import annotations

import math

from traces.costs import Costs
from traces.schema import Phase

from ..builders.sharded import microbatches
from ..hardware.machine import Machine
from ..plan import ShardedPlan
from ..schedule import TensorKind
from ..shards import Shards
from .ways import Ways


def sharded_bound_ns(plan: ShardedPlan, costs: Costs, machine: Machine, ways: Ways) -> float:
    """No schedule of this plan takes less (ns). Raises TraceError where the trace does not cover the plan."""
    return _Bound(plan, costs, machine, ways).ns()


class _Bound:
    """Sums over all steps of one plan."""

    def __init__(self, plan: ShardedPlan, costs: Costs, machine: Machine, ways: Ways) -> None:
        self._plan, self._costs, self._machine, self._ways = plan, costs, machine, ways
        self._shards = Shards(costs, plan.gpus)
        self._layers = range(costs.layer_count)
        self._sizes = [[stop - start for start, stop in own] for own in microbatches(plan)]
        self._rounds = len(self._sizes[0])

    def ns(self) -> float:
        """The largest of: each GPU's work and copies, what the ring carries, and what every resource passes."""
        times = [self._costs.update_ns(layer, layer, Phase.UPDATE_CPU) for layer in self._layers]
        update = sum(math.floor(time / self._machine.host.speed) for time in times)
        gathers = sum(self._gather_ns(layer) for layer in self._layers)
        scatters = sum(self._scatter_ns(layer) for layer in self._layers)
        bound = self._rounds * (2 * gathers + scatters)
        loads = self._ways.ring_load(self._sent_bytes())
        for gpu in range(self._plan.gpus):
            into, out = self._ways.into[gpu], self._ways.out[gpu]
            bound = max(
                bound,
                self._fetch_ns(0, gpu) + self._compute_ns(gpu) + update,
                self._in_ns(gpu),
                self._rounds * sum(out.ns(self._part(TensorKind.GRADIENT, layer, gpu)) for layer in self._layers),
            )
            loads = loads + self._in_bytes(gpu) * into.load
            loads = loads + self._rounds * self._shards.bytes(TensorKind.GRADIENT, self._whole, gpu) * out.load
        last = self._scatter_ns(0) + self._ways.out[0].ns(self._part(TensorKind.GRADIENT, 0, 0))
        if not self._costs.updates(0):
            last = 0.0
        fetches = 2 * self._rounds * sum(self._fetch_ns(layer, 0) for layer in self._layers)
        ahead = fetches if self._plan.prefetch_depth == 0 else self._fetch_ns(0, 0)
        bound = max(bound, ahead + self._compute_ns(0) + last + update)
        return max(bound, float(self._ways.drain_ns(loads).max()))

    @property
    def _whole(self) -> tuple[int, int]:
        return 0, self._layers[-1]

    def _part(self, kind: TensorKind, layer: int, gpu: int) -> int:
        return self._shards.bytes(kind, (layer, layer), gpu)

    def _fetch_ns(self, layer: int, gpu: int) -> float:
        """From the start of a GPU's copy to whole weights."""
        return self._ways.into[gpu].ns(self._part(TensorKind.WEIGHT, layer, gpu)) + self._gather_ns(layer)

    def _gather_ns(self, layer: int) -> float:
        return self._ways.ring_ns((self._plan.gpus - 1) * self._costs.weight_bytes(layer, layer))

    def _scatter_ns(self, layer: int) -> float:
        return self._ways.ring_ns((self._plan.gpus - 1) * self._costs.gradient_bytes(layer, layer))

    def _sent_bytes(self) -> int:
        once = 2 * self._costs.weight_bytes(*self._whole) + self._costs.gradient_bytes(*self._whole)
        return self._rounds * (self._plan.gpus - 1) * once

    def _compute_ns(self, gpu: int) -> float:
        costs, speed = self._costs, self._machine.gpus[gpu].speed

        def layer_ns(layer: int, u: int) -> int:
            forward = costs.forward_ns(layer, layer, u)
            return math.floor(forward / speed) + math.floor((forward + costs.backward_ns(layer, layer, u)) / speed)

        return sum(layer_ns(layer, u) for u in self._sizes[gpu] for layer in self._layers)

    def _in_ns(self, gpu: int) -> float:
        into = self._ways.into[gpu]
        weights = sum(into.ns(self._part(TensorKind.WEIGHT, layer, gpu)) for layer in self._layers)
        gradients = sum(into.ns(self._part(TensorKind.GRADIENT, layer, gpu)) for layer in self._layers)
        buffers = sum(into.ns(self._costs.buffer_bytes(layer, layer)) for layer in self._layers)
        data = sum(
            into.ns(self._costs.input_bytes(0, u)) + into.ns(self._costs.label_bytes(u)) for u in self._sizes[gpu]
        )
        return 2 * self._rounds * weights + (self._rounds - 1) * gradients + buffers + data

    def _in_bytes(self, gpu: int) -> int:
        weights = 2 * self._rounds * self._shards.bytes(TensorKind.WEIGHT, self._whole, gpu)
        gradients = (self._rounds - 1) * self._shards.bytes(TensorKind.GRADIENT, self._whole, gpu)
        data = sum(self._costs.input_bytes(0, u) + self._costs.label_bytes(u) for u in self._sizes[gpu])
        return weights + gradients + data + self._costs.buffer_bytes(*self._whole)
