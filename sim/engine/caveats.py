"""What whoever reads a prediction should know about the numbers it rests on."""

from __future__ import annotations

from collections.abc import Iterable

from traces.costs import Costs
from traces.schema import Phase, Provenance


def caveats(costs: Costs, used: Iterable[tuple[Phase, int]]) -> list[str]:
    """Sentences about a mixture: updates whose times are modelled beside passes whose times are not.

    ``used`` are the (phase, microbatch size) pairs that the prediction asked for.
    """
    phases = {phase for phase, _ in used}
    modelled = {phase: costs.tally([(phase, 0)]).get(Provenance.MODELLED, 0) for phase in phases if phase.is_update}
    passes = costs.tally((phase, u) for phase, u in used if not phase.is_update)
    if Provenance.MODELLED in passes:
        return []
    places = {Phase.UPDATE_GPU: "GPU", Phase.UPDATE_CPU: "CPU"}
    return [
        f"updates on the {places[phase]}: the times of {count} layers are modelled, not measured"
        for phase, count in modelled.items()
        if count
    ]
