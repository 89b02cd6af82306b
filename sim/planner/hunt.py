"""The hunt for the best plans of one policy.

Candidates come in the order of what they will probably take, and are simulated in waves until the budget is spent or
none is left. Whatever a bound from below proves no faster than the last of the top is passed over. Then the best vary:
plans that differ from them in an option that is not enumerated are simulated too, and the best of those vary in turn.
Of variations no bound says anything. Where steps overlap, what counts is the time from the end of one to the end of the
next; bounds are of a step alone, and rule nothing out.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
from msgspec.structs import replace

from ..plan import Plan, Policy
from .candidates import Candidates
from .estimates import Estimator
from .evaluate import Evaluator, Found
from .refusals import Refusals
from .result import Counts

_WAVE = 4
"""Candidates evaluated between two looks at the bound, whether or not at once."""

_PATIENCE = 10
"""By how many times the budget may be exceeded in search of a plan that fits at all."""

_LOOKED_AT = 1000
"""So many candidates are looked at more closely: before the others are tried, and to raise the bound on those left."""


class Hunt:
    """Tries candidates, then variations of the best."""

    def __init__(
        self,
        policy: Policy,
        candidates: Candidates,
        estimator: Estimator,
        top: int,
        max_simulated: int,
        refusals: Refusals,
    ) -> None:
        self.policy = policy
        self._candidates, self._estimator, self._refusals = candidates, estimator, refusals
        self._bounds_ns = candidates.bounds_ns.copy()
        self._untried = np.ones(candidates.count, dtype=bool)
        self._top, self._budget = top, max_simulated
        self._tried = 0
        self.found: list[Found] = []  # fastest first; among equals, in the order in which they were simulated
        self._times_ns: list[int] = []  # of the candidates among them, each step alone
        self._overlap = False  # whether there are candidates whose steps overlap
        self._varied = 0
        self.least_ns = math.inf
        """No candidate takes less: the least time of those simulated, and bound of the others."""

    def run(self, evaluator: Evaluator, report: Callable[[Hunt], object]) -> None:
        """Evaluate candidates until none can be among the top any more, or the budget is spent."""
        promising = self._promising()
        while wave := list(islice(promising, min(_WAVE, self._budget_left))):
            self._tried += len(wave)
            for outcome in evaluator.outcomes(wave, self._candidates.open_slots):
                if isinstance(outcome, Found):
                    self._keep(outcome)
                    insort(self._times_ns, outcome.step_time_ns)
                    self._overlap |= outcome.plan.overlap_steps
                else:
                    self._refusals.add_built(self.policy, outcome)
            report(self)
        self.least_ns = min([self._least_left_ns(), *self._times_ns[:1]])

    def vary(self, evaluator: Evaluator, vary: Callable[[Plan], Iterable[Plan]], climbers: int, most: int) -> None:
        """Evaluate variations of so many of the best plans, and of the best of these, while there are new ones;
        ``most`` in all.

        Those that do not fit count for nothing but the limit.
        """
        seen = {found.plan for found in self.found}
        varied: set[Plan] = set()
        while climber := next((found.plan for found in self.found[:climbers] if found.plan not in varied), None):
            varied.add(climber)
            new = list(islice((plan for plan in vary(climber) if plan not in seen), most))
            seen.update(new)
            most -= len(new)
            for outcome in evaluator.outcomes(new, self._candidates.open_slots):
                if isinstance(outcome, Found):
                    self._varied += 1
                    self._keep(outcome)

    def _keep(self, found: Found) -> None:
        insort(self.found, found, key=lambda each: each.period_ns)

    @property
    def share_done(self) -> float:
        """Of the budget."""
        return min(1.0, self._tried / self._budget)

    @property
    def counts(self) -> Counts:
        """What became of the candidates."""
        refused = self._tried - len(self._times_ns)
        infeasible = self._refusals.count(self.policy)
        left = int((self._untried & (self._bounds_ns < self._to_beat_ns)).sum())
        return Counts(
            candidates=self._candidates.count + infeasible - refused,
            simulated=len(self._times_ns),
            pruned=self._candidates.count - self._tried - left,
            infeasible=infeasible,
            left=left,
            varied=self._varied,
        )

    @property
    def _to_beat_ns(self) -> float:
        """Time of the last candidate of the top; infinite while there are not so many, and where steps overlap: bounds
        are of a step alone."""
        return math.inf if self._overlap or len(self._times_ns) < self._top else self._times_ns[self._top - 1]

    @property
    def _budget_left(self) -> int:
        """How many more may be tried; more of them as long as none fits."""
        if self._tried >= self._budget and not self.found:
            return min(self._budget, _PATIENCE * self._budget - self._tried)
        return max(0, self._budget - self._tried)

    def _promising(self) -> Iterator[Plan]:
        """Plans not tried yet that can be among the top, as far as bounds tell when their turn comes."""
        seen: set[Plan] = set()
        for number in self._by_promise():
            if self._bounds_ns[number] >= self._to_beat_ns:
                continue
            plan = self._candidates.plan(number)
            if plan in seen:
                self._bounds_ns[number] = math.inf
            elif self._bound_ns(number) < self._to_beat_ns:
                seen.add(plan)
                self._untried[number] = False
                yield plan

    def _by_promise(self) -> Iterator[int]:
        """All candidates: first, by what they are expected to take, those of least hints and bounds; then by hint."""
        by_hint = np.argsort(self._candidates.hints_ns, kind="stable").tolist()
        by_bound = np.argsort(self._candidates.bounds_ns, kind="stable").tolist()
        first = dict.fromkeys(by_hint[:_LOOKED_AT] + by_bound[:_LOOKED_AT])
        yield from sorted(first, key=self._candidates.expected_ns)
        yield from (number for number in by_hint if number not in first)

    def _bound_ns(self, number: int) -> float:
        """The bound of a candidate, looked at as a whole; kept."""
        plan = self._candidates.plan(number)
        bound = self._estimator.lower_bound_ns(replace(plan, slots=1) if self._candidates.open_slots else plan)
        self._bounds_ns[number] = max(self._bounds_ns[number], bound)
        return float(self._bounds_ns[number])

    def _least_left_ns(self) -> float:
        """Least bound of those not tried, after a closer look at the least few."""
        queue = [(float(self._bounds_ns[number]), int(number)) for number in np.flatnonzero(self._untried)]
        heapq.heapify(queue)
        for _ in range(_LOOKED_AT):
            if not queue or queue[0][0] >= self._to_beat_ns:
                break
            bound, number = queue[0]
            closer = self._bound_ns(number)
            if closer == bound:
                break
            heapq.heapreplace(queue, (closer, number))
        return queue[0][0] if queue else math.inf
