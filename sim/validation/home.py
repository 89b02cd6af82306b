"""Faults in the use of home tensors: their order is checked here, as no buffer stands for them."""

from __future__ import annotations

from collections.abc import Iterator

from traces.costs import Costs

from ..home import NO_TIES, HomeTensor, home_accesses, in_conflict, tied_layers
from ..schedule import Schedule, TensorKind
from ..shards import Shards
from .happens_before import HappensBefore


def home_faults(schedule: Schedule, surely: HappensBefore, costs: Costs | None) -> Iterator[str]:
    """Tasks that touch a home tensor at the same time as one that writes it, and gradients used before they are there.

    Which layers have gradients, and which share weights, is known only with a trace.
    """
    said: set[tuple[int, int]] = set()  # layers of a pack have the same faults; say them once
    ties = NO_TIES if costs is None else tied_layers(costs)
    for home, used in home_accesses(schedule, ties).items():
        for other, task in in_conflict(used):
            if (other.id, task.id) not in said and not surely(other.id, task.id):
                said.add((other.id, task.id))
                what = f"{home.kind.value} {home.layer} in the store"
                yield f"{other} and {task} may touch {what} at the same time, and one of them writes it"
        first, writes = used[0]
        if home.kind is TensorKind.GRADIENT and not writes and _is_updated(home, costs, schedule.plan.gpus):
            yield f"{first} takes gradient {home.layer} from the store before anything has written it there"


def _is_updated(home: HomeTensor, costs: Costs | None, gpus: int) -> bool:
    """Whether there are trained weights in the layer (in the shard), if that is known."""
    if costs is None or not costs.updates(home.layer):
        return False
    return home.shard is None or Shards(costs, gpus).bytes(home.kind, (home.layer, home.layer), home.shard) > 0
