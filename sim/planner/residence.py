"""What comes and goes of the weights and optimizer state of a plan's packs, as some may stay on GPUs."""

from __future__ import annotations

from typing import NamedTuple

from traces.costs import Costs

from ..builders.residents import Residents
from ..plan import HarmonyPlan, Pack


class Residence(NamedTuple):
    """Of a pack on its GPU (bytes): weights that come in for a group, and for the packs repeated for it; after an
    update, weights that go home, and state either way; and what stays, of all packs."""

    weights_in: int
    again_in: int
    weights_home: int
    state: int
    held: int


class Residences:
    """Answers for plans of one trace; what stays nowhere is worked out once."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._swapped: dict[tuple[Pack, tuple[Pack, ...]], Residence] = {}

    def residents(self, plan: HarmonyPlan) -> Residents | None:
        """What stays; None if nothing does."""
        return Residents(plan, self._costs) if plan.resident_weights or plan.resident_state else None

    def of(
        self, residents: Residents | None, gpu: int, pack: Pack, again: tuple[Pack, ...], *, state_stays: bool
    ) -> Residence:
        """Of a pack on a GPU; in data parallel, weights stay on all GPUs alike."""
        if residents is not None:
            return self._work_out(residents, gpu, pack, again, state_stays)
        key = pack, again
        if key not in self._swapped:
            self._swapped[key] = self._work_out(None, gpu, pack, again, state_stays)
        return self._swapped[key]

    def _work_out(
        self, residents: Residents | None, gpu: int, pack: Pack, again: tuple[Pack, ...], state_stays: bool
    ) -> Residence:
        costs = self._costs
        first, last = pack
        owned = [layer for layer in range(first, last + 1) if costs.updates(layer)]
        return Residence(
            weights_in=costs.weight_bytes(first, last) if residents is None else residents.swapped_bytes(gpu, pack),
            again_in=sum(
                costs.weight_bytes(*each) if residents is None else residents.swapped_bytes(gpu, each) for each in again
            ),
            weights_home=sum(
                costs.weight_bytes(at, at) for at in owned if residents is None or residents.go_home(gpu, at)
            ),
            state=0 if state_stays else costs.optimizer_state_bytes(first, last),
            held=0 if residents is None else residents.held_bytes(gpu),
        )
