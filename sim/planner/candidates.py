"""Candidates of a search: all plans of a space, handed out in the order of their bounds."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count as counter
from itertools import product
from typing import Protocol

from traces.costs import Costs
from traces.errors import TraceError
from traces.schema import Phase

from ..plan import PagedPlan, Plan, Policy, shares
from .estimates import Estimator
from .group_work import Batches
from .space import Space


@dataclass(frozen=True)
class Candidate:
    """A plan and what it takes at least (ns). ``open_slots``: where the plan does not fit, it may with fewer slots."""

    plan: Plan
    bound_ns: float
    open_slots: bool = False


class Source(Protocol):
    """Some candidates, of which only the least bound is known so far."""

    @property
    def bound_ns(self) -> float:
        """None of them takes less."""

    def split(self) -> Iterable[Source | Candidate]:
        """The same candidates, some of them looked at more closely."""


@dataclass
class Candidates:
    """The candidates of one policy: how many, where they come from, and what is to be said about the selection."""

    count: int
    sources: list[Source | Candidate]
    notes: list[str]

    def by_bound(self) -> Iterator[Candidate]:
        """All of them, least bound first; among equals, in the order in which they were found."""
        number = counter()
        queue = [(each.bound_ns, next(number), each) for each in self.sources]
        heapq.heapify(queue)
        while queue:
            _, _, first = heapq.heappop(queue)
            if isinstance(first, Candidate):
                yield first
                continue
            for each in first.split():
                heapq.heappush(queue, (each.bound_ns, next(number), each))


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
        sizes = range(1, most + 1) if wanted is None else sorted({min(u, most) for u in wanted})
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


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Maximal runs of consecutive numbers, as first and last."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs


def paged_candidates(minibatch: int, gpus: int, costs: Costs, space: Space, estimator: Estimator) -> Candidates:
    """All ``dp-swap`` plans of a space. Raises TraceError as :meth:`Sizes.of`, or for lack of update times."""
    costs.update_ns(0, costs.layer_count - 1, Phase.UPDATE_GPU)
    sizes = Sizes(costs, [stop - start for start, stop in shares(minibatch, gpus)])
    wanted = space.u_fwd or space.u_bwd
    if space.u_fwd and space.u_bwd:
        wanted = tuple(sorted({*space.u_fwd} & {*space.u_bwd}))
    plans = [
        PagedPlan(
            policy=Policy.DP_SWAP,
            minibatch=minibatch,
            gpus=gpus,
            u_fwd=u,
            u_bwd=u,
            residency=residency,
            writeback=writeback,
        )
        for u, residency, writeback in product(sizes.of(Phase.BACKWARD, wanted), space.residency, space.writeback)
    ]
    return Candidates(len(plans), [Candidate(plan, estimator.lower_bound_ns(plan)) for plan in plans], sizes.notes())
