"""Which layers each GPU of a plain schedule has, and in which order it works on microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from traces.costs import Costs

from ..errors import PlanError
from ..plan import Pack, PagedPlan, Policy, pieces, shares
from ..schedule import Interval, TaskKind

Turn = tuple[TaskKind, int]
"""Forward or backward of a microbatch, through all layers of a stage."""


class Assignment(NamedTuple):
    """What a GPU has: the layers of stage number ``stage`` of ``stages``, and its microbatches."""

    layers: Pack
    stage: int
    stages: int
    microbatches: list[Interval]


def assignments(plan: PagedPlan, costs: Costs) -> list[Assignment]:
    """Of each GPU. Raises PlanError for a pipeline of fewer layers than GPUs."""
    if plan.policy.splits_minibatch:
        whole = (0, costs.layer_count - 1)
        return [Assignment(whole, 0, 1, pieces(*share, plan.u_fwd)) for share in shares(plan.minibatch, plan.gpus)]
    microbatches = pieces(0, plan.minibatch, plan.u_fwd)
    stages = cut_stages(costs, plan.gpus, min(plan.u_fwd, plan.minibatch))
    return [Assignment(layers, stage, len(stages), microbatches) for stage, layers in enumerate(stages)]


def cut_stages(costs: Costs, gpus: int, u: int) -> tuple[Pack, ...]:
    """Runs of consecutive layers, one a GPU, whose longest forward and backward of ``u`` samples is as short as can be.

    Of several such cuts, the one whose stages end first. Raises PlanError for fewer layers than GPUs.
    """
    layers = range(costs.layer_count)
    if costs.layer_count < gpus:
        raise PlanError(
            f"a pipeline over {gpus} GPUs needs at least as many layers; {costs.trace.model} has {costs.layer_count}; "
            "use fewer GPUs"
        )
    until = list(accumulate((costs.forward_ns(at, at, u) + costs.backward_ns(at, at, u) for at in layers), initial=0))
    # least[n][first]: the longest of n stages over the layers from `first` on, at its shortest
    least: list[dict[int, int]] = [{costs.layer_count: 0}]
    for number in range(1, gpus + 1):
        rest = least[-1]
        least.append(
            {
                first: min(max(until[stop] - until[first], rest[stop]) for stop in rest if stop > first)
                for first in range(costs.layer_count - number + 1)
            }
        )
    longest, stages, first = least[gpus][0], [], 0
    for rest in reversed(least[:-1]):
        stop = next(at for at in sorted(rest) if at > first and max(until[at] - until[first], rest[at]) <= longest)
        stages.append((first, stop - 1))
        first = stop
    return tuple(stages)


def turns(policy: Policy, stage: int, stages: int, microbatches: int) -> Iterator[Turn]:
    """What a stage does, in order.

    GPipe goes forward with all microbatches, then backward in reverse order. The others go forward with as many as
    there are stages after it, none if it is the whole model; then one forward and one backward in turn; then backward
    with what is left.
    """
    if policy is Policy.GPIPE_SWAP:
        yield from ((TaskKind.FORWARD, m) for m in range(microbatches))
        yield from ((TaskKind.BACKWARD, m) for m in reversed(range(microbatches)))
        return
    ahead = min(stages - 1 - stage, microbatches)
    yield from ((TaskKind.FORWARD, m) for m in range(ahead))
    for m in range(ahead, microbatches):
        yield TaskKind.FORWARD, m
        yield TaskKind.BACKWARD, m - ahead
    yield from ((TaskKind.BACKWARD, m) for m in range(microbatches - ahead, microbatches))
