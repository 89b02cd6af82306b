"""Candidates of a search: all plans of a space, by number, each with a bound and a guess of what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product

import numpy as np
from numpy.typing import NDArray

from traces.costs import Costs
from traces.errors import TraceError
from traces.schema import Phase

from ..errors import PlanError
from ..plan import PagedPlan, Plan, Policy, ShardedPlan, UpdateWhen, shares
from .estimates import Estimator
from .jobs import Batches
from .space import Space

Times = NDArray[np.float64]
"""Times (ns) of all candidates, by number."""


@dataclass(frozen=True)
class Candidates:
    """The candidates of one policy. None takes less than its ``bounds_ns``; ``hints_ns`` say roughly what they take,
    ``expected_ns`` (slower) better.

    ``open_slots``: where a plan does not fit, it may with fewer slots. ``notes``: what to say about the selection.
    """

    bounds_ns: Times = field(default_factory=lambda: np.zeros(0))
    hints_ns: Times = field(default_factory=lambda: np.zeros(0))
    plan: Callable[[int], Plan] = [].__getitem__
    expected_ns: Callable[[int], float] = [].__getitem__
    open_slots: bool = False
    notes: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.bounds_ns)


class Sizes:
    """Microbatch sizes worth trying: what the trace covers, up to the largest share of the minibatch.

    ``samples`` are the shares that are cut into microbatches. ``uncovered`` collects sizes that the trace lacks.
    """

    def __init__(self, costs: Costs, samples: Iterable[int]) -> None:
        self._costs, self._samples = costs, tuple(samples)
        self.uncovered: set[int] = set()

    def of(self, phase: Phase, wanted: tuple[int, ...] | None) -> list[int]:
        """All sizes, or those wanted. All that are no smaller than the largest share are one.

        Raises TraceError if the trace covers none of them, or lacks one that is wanted.
        """
        most = max(self._samples)
        sizes = self._all(most) if wanted is None else sorted({min(u, most) for u in wanted})
        covered = []
        refusal: TraceError | None = None
        for u in sizes:
            try:
                self._ask(phase, u)
            except TraceError as error:
                if wanted is not None:
                    raise
                self.uncovered.add(u)
                refusal = refusal or error
            else:
                covered.append(u)
        if refusal and not covered:
            raise refusal
        return covered

    def _all(self, most: int) -> list[int]:
        """Sizes up to ``most``; of those larger than any in the trace only the first and the last."""
        largest = max((row.microbatch for row in self._costs.trace.sizes), default=0)
        asked = most if self._costs.extrapolate else min(most, largest)
        return sorted({*range(1, asked + 1), min(asked + 1, most), most})

    def _ask(self, phase: Phase, u: int) -> None:
        for samples in self._samples:
            batches = Batches.of(samples, u)
            for size in {batches.first, batches.last}:
                self._costs.input_bytes(0, size)
                self._costs.forward_ns(0, 0, size)
                if phase is Phase.BACKWARD:
                    self._costs.backward_ns(0, 0, size)

    def notes(self) -> list[str]:
        """What to say about sizes that were left out."""
        if not self.uncovered:
            return []
        left_out = f"{min(self.uncovered)}-{max(self.uncovered)}" if len(self.uncovered) > 1 else min(self.uncovered)
        return [
            f"microbatch sizes {left_out} are not all covered by the trace and left out; --extrapolate guesses them"
        ]


def paged_candidates(
    policy: Policy, minibatch: int, gpus: int, costs: Costs, space: Space, estimator: Estimator
) -> Candidates:
    """All plans of a baseline in a space. Raises TraceError as :meth:`Sizes.of`, or for lack of update times; PlanError
    for a pipeline of fewer layers than GPUs, or if updates must be at the end."""
    if UpdateWhen.JIT not in space.update_when:
        raise PlanError(
            f"{policy.value} updates each GPU's layers after that GPU's backwards, without a norm of the whole "
            "gradient; with --update-when end choose harmony-dp, harmony-pp or zero3-offload"
        )
    costs.update_ns(0, costs.layer_count - 1, Phase.UPDATE_GPU)
    split = shares(minibatch, gpus) if policy.splits_minibatch else [(0, minibatch)]
    sizes = Sizes(costs, [stop - start for start, stop in split])
    plans: list[Plan] = [
        PagedPlan(
            policy=policy,
            minibatch=minibatch,
            gpus=gpus,
            u_fwd=u,
            u_bwd=u,
            residency=residency,
            writeback=writeback,
            recompute=recompute,
            prefetch_depth=depth,
        )
        for u, residency, writeback, recompute, depth in product(
            sizes.of(Phase.BACKWARD, _one_size(space)),
            space.residency,
            space.writeback,
            space.recompute,
            space.prefetch_depth,
        )
    ]
    return _listed(plans, sizes, estimator)


def sharded_candidates(
    policy: Policy, minibatch: int, gpus: int, costs: Costs, space: Space, estimator: Estimator
) -> Candidates:
    """All plans over shards in a space. Raises TraceError as :meth:`Sizes.of`, or for lack of update times."""
    costs.update_ns(0, costs.layer_count - 1, Phase.UPDATE_CPU)
    sizes = Sizes(costs, [stop - start for start, stop in shares(minibatch, gpus)])
    plans: list[Plan] = [
        ShardedPlan(
            policy=policy, minibatch=minibatch, gpus=gpus, u_fwd=u, u_bwd=u, update_when=when, prefetch_depth=depth
        )
        for u, when, depth in product(
            sizes.of(Phase.BACKWARD, _one_size(space)), space.update_when, space.prefetch_depth
        )
    ]
    return _listed(plans, sizes, estimator)


def _one_size(space: Space) -> tuple[int, ...] | None:
    """Microbatch sizes wanted where forward and backward have the same; None: all."""
    if space.u_fwd and space.u_bwd:
        return tuple(sorted({*space.u_fwd} & {*space.u_bwd}))
    return space.u_fwd or space.u_bwd


def _listed(plans: list[Plan], sizes: Sizes, estimator: Estimator) -> Candidates:
    """Few plans, each with its bound."""
    bounds = np.array([estimator.lower_bound_ns(plan) for plan in plans], dtype=np.float64)
    return Candidates(bounds, bounds, plans.__getitem__, bounds.__getitem__, notes=tuple(sizes.notes()))
