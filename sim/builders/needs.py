"""What each step of a Harmony plan must find on its GPU besides its weights, and how large those tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from traces.costs import Costs

from ..plan import HarmonyPlan, Reduce, UpdateOn, UpdateWhen
from ..schedule import Interval, TaskKind, TensorKind
from ..shards import Shards
from .order import Step, is_data_parallel, shard_of

Run = tuple[int, int]
"""Layers first … last, both included."""


class Need(NamedTuple):
    """A tensor: x(l) or g(l) of some samples (then ``run`` is (l, l)), or a home tensor of a run of layers, or just a
    ``shard`` of that."""

    kind: TensorKind
    run: Run
    samples: Interval | None = None
    shard: int | None = None

    @property
    def at_boundary(self) -> bool:
        """True for x(l) and g(l) that another pack made; such a tensor has dynamic host copies, not a home."""
        return self.samples is not None and self.kind is not TensorKind.DATA


class Needs:
    """Answers for one plan and trace."""

    def __init__(self, plan: HarmonyPlan, costs: Costs) -> None:
        self._costs = costs
        self._plan, self._shards = plan, Shards(costs, plan.gpus)
        self.last_layer = plan.layer_count - 1
        self.reduced_by_host = plan.reduce is Reduce.HOST and is_data_parallel(plan) and plan.gpus > 1
        self.updates_at_end = plan.update_when is UpdateWhen.END
        # Else only what other packs add to their gradients goes there.
        self.gradients_go_home = plan.update is UpdateOn.CPU or self.updates_at_end

    def of(self, step: Step) -> list[Need]:
        """What the step must find on its GPU, in the order in which it should come; tensors without bytes left out."""
        return [need for need in self._all(step) if self.bytes(need)]

    def _all(self, step: Step) -> list[Need]:
        first, last = pack = step.group.pack
        if step.kind is TaskKind.UPDATE:
            own = [pack] if self.reduced_by_host or self.updates_at_end else []
            runs = own + list(self.partial_gradients(pack))
            needed = [(TensorKind.GRADIENT, run) for run in runs]
            if step.group.pack_index not in self._plan.resident_state:
                needed.append((TensorKind.OPTIMIZER_STATE, pack))
            return [Need(kind, run, shard=shard_of(self._plan, step.gpu)) for kind, run in needed]
        if step.kind is TaskKind.BACKWARD_WEIGHT:
            return []  # its first part left all of it on the GPU
        fused = step.kind.goes_back and last == self.last_layer
        boundary = TensorKind.ACTIVATION if fused or step.kind is TaskKind.FORWARD else TensorKind.STASH
        needs = [Need(boundary if first else TensorKind.DATA, (first, first), step.samples)]
        if step.kind.goes_back:
            incoming = TensorKind.DATA if fused else TensorKind.ACTIVATION_GRADIENT
            needs.append(Need(incoming, (last + 1, last + 1), step.samples))
        return needs

    def partial_gradients(self, pack: Run) -> Iterator[Run]:
        """Runs of later layers whose gradients the pack's update adds to its own: users of tied weights it owns."""
        first, last = pack
        partners = {p for layer in range(first, last + 1) for p in self._costs.tied_partners(layer) if p > last}
        return runs_where((last + 1, self.last_layer), lambda layer: layer in partners)

    def bytes(self, need: Need) -> int:
        """Size of the tensor."""
        layer = need.run[0]
        if need.samples is None:
            return self._shards.bytes(need.kind, need.run, need.shard)
        batch = need.samples[1] - need.samples[0]
        if need.kind is TensorKind.ACTIVATION_GRADIENT:
            return self._costs.input_gradient_bytes(layer, batch)
        return self._costs.label_bytes(batch) if layer > self.last_layer else self._costs.input_bytes(layer, batch)


def runs_where(run: Run, holds: Callable[[int], bool]) -> Iterator[Run]:
    """Maximal runs of consecutive layers within ``run`` for which ``holds``."""
    first, last = run
    start: int | None = None
    for layer in range(first, last + 2):
        inside = layer <= last and holds(layer)
        if inside and start is None:
            start = layer
        elif not inside and start is not None:
            yield start, layer - 1
            start = None
