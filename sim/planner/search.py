"""The search: simulate plans, most promising first, skip what a bound rules out, say how far the best can be from the
truth.

For each policy, candidates come in the order of what they will probably take, and are simulated in waves until the
budget is spent or none is left. Whatever a bound from below proves no faster than the last of the top is passed over.
Then the best vary: plans that differ from them in an option that is not enumerated are simulated too, and the best of
those vary in turn. Of variations no bound says anything. Where steps overlap, what counts is the time from the end of
one to the end of the next; bounds are of a step alone, and rule nothing out.

Policies are searched apart from each other, so that each has its own best; what is found depends neither on timing nor
on how many processes help.
"""

from __future__ import annotations

import heapq
import math
import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import partial
from itertools import islice

import msgspec
import numpy as np
from msgspec.structs import replace

from traces.costs import Costs
from traces.errors import HarmonyError, TraceError
from traces.schema import Trace

from ..builders import build_from_costs
from ..builders.store_bytes import store_bytes
from ..engine.simulate import simulate
from ..errors import DoesNotFit, PlanError
from ..hardware.machine import Machine
from ..plan import Plan, Policy
from ..units import NS_PER_S, format_seconds
from .candidates import Candidates, paged_candidates, sharded_candidates
from .choice import PlanChoice
from .estimates import Estimator
from .evaluate import Found, evaluate, evaluate_encoded
from .harmony_candidates import harmony_candidates
from .refusals import Reason, Refusals
from .result import Best, Counts, SearchResult
from .space import Space
from .variations import CLIMBED, LAST, variations

ReportProgress = Callable[[float, str], object]
"""Called with the share done (0 to 1) and what is being done now."""

_WAVE = 4
"""Candidates evaluated between two looks at the bound, whether or not at once."""

_PATIENCE = 10
"""By how many times the budget may be exceeded in search of a plan that fits at all."""

_LOOKED_AT = 1000
"""So many candidates are looked at more closely: before the others are tried, and to raise the bound on those left."""

_VARIED_SHARE = 7
"""Unless told otherwise, a search simulates as many variations as a seventh of its candidates."""

_CLIMBERS = 3
"""So many of the best plans vary."""

_LAST = 1
"""So many variations are left for the fields that are tried last."""

_Outcome = Found | HarmonyError


def search(
    trace: Trace,
    machine: Machine,
    minibatch: int,
    *,
    policies: Sequence[Policy] = (Policy.HARMONY_DP, Policy.HARMONY_PP),
    choice: PlanChoice | Space | None = None,
    top: int = 10,
    max_simulated: int = 100,
    max_variations: int | None = None,
    extrapolate: bool = False,
    progress: ReportProgress | None = None,
    executor: Executor | None = None,
) -> SearchResult:
    """Find the plans with the shortest steps for ``minibatch`` samples on all GPUs of the machine.

    ``choice`` restricts the plans. At most ``max_simulated`` plans of each policy are tried (more while none fits), and
    then at most ``max_variations`` of the best of them (see ``variations.py``; None: a seventh as many). An
    ``executor`` (of processes, here or elsewhere) evaluates several at once; the result is the same.

    Raises NothingFits if no plan fits, TraceError if the trace does not cover what is asked for, PlanError for
    restrictions that concern none of the policies.
    """
    start = time.perf_counter()
    asked = {"samples in a minibatch": minibatch, "plans in the top": top, "plans to simulate": max_simulated}
    for what, number in asked.items():
        if number < 1:
            raise PlanError(f"{number} {what}; ask for at least 1")
    if max_variations is None:
        max_variations = -(-max_simulated // _VARIED_SHARE)
    if max_variations < 0:
        raise PlanError(f"{max_variations} variations to simulate; ask for 0 or more")
    space = choice if isinstance(choice, Space) else Space.of(choice or PlanChoice())
    wanted, notes = _distinct(policies, len(machine.gpus))
    space.check(wanted)
    costs = Costs(trace, extrapolate=extrapolate)
    evaluator, estimator = _Evaluator(costs, machine, executor), Estimator(costs, machine)
    refusals = Refusals()
    hunts: list[_Hunt] = []
    uncovered: list[TraceError] = []
    for number, policy in enumerate(wanted):
        try:
            candidates = _candidates(policy, minibatch, costs, machine, space, estimator, refusals)
        except TraceError as error:
            uncovered.append(error)
            notes.append(f"{policy.value} is left out: {error}")
            continue
        hunts.append(_Hunt(policy, candidates, estimator, top, max_simulated, refusals))
        hunts[-1].run(evaluator, partial(_report, progress, number, len(wanted)))
        vary = partial(variations, costs=costs, machine=machine, space=space)
        last = min(_LAST, max_variations)
        hunts[-1].vary(evaluator, partial(vary, fields=CLIMBED), _CLIMBERS, max_variations - last)
        hunts[-1].vary(evaluator, partial(vary, fields=LAST), 1, last)
        notes += [f"{policy.value}: {note}" for note in candidates.notes]
    if not hunts:
        raise uncovered[0]
    return _result(hunts, top, refusals, notes, start, trace, costs, machine)


class NothingFits(PlanError):
    """No plan of a search fits; names each reason with its nearest miss. ``left``: so many were not tried."""

    def __init__(self, reasons: tuple[str, ...], left: int) -> None:
        super().__init__(reasons, left)
        self.reasons, self.left = reasons, left

    def __str__(self) -> str:
        what = f"none of the plans tried fits, {self.left} more were not tried" if self.left else "no plan fits"
        return f"{what}:\n  " + "\n  ".join(self.reasons)


def _distinct(policies: Sequence[Policy], gpus: int) -> tuple[tuple[Policy, ...], list[str]]:
    """Each policy once; a pipeline over one GPU is data parallel over one GPU."""
    try:
        wanted = tuple(dict.fromkeys(Policy(policy) for policy in policies))  # names of policies are as good
    except ValueError as error:
        known = ", ".join(policy.value for policy in Policy)
        raise PlanError(f"{error}; give a list of some of {known}") from None
    if not wanted:
        raise PlanError("no policy to search; give at least one")
    if gpus == 1 and {Policy.HARMONY_DP, Policy.HARMONY_PP} <= set(wanted):
        wanted = tuple(policy for policy in wanted if policy is not Policy.HARMONY_PP)
        return wanted, ["harmony-pp is left out: on one GPU it is the same as harmony-dp"]
    return wanted, []


def _candidates(
    policy: Policy,
    minibatch: int,
    costs: Costs,
    machine: Machine,
    space: Space,
    estimator: Estimator,
    refusals: Refusals,
) -> Candidates:
    """The candidates of a policy; none if they all are refused for the same reason."""
    gpus = len(machine.gpus)
    if policy.splits_minibatch and minibatch < gpus:
        error = PlanError(
            f"{policy.value} gives each GPU a share of the minibatch: {minibatch} samples are fewer than {gpus} GPUs"
        )
        refusals.add(policy, Reason.PLAN, error)
        return Candidates()
    try:
        if policy.is_harmony:
            candidates = harmony_candidates(policy, minibatch, costs, machine, space, refusals)
        elif policy.is_paged:
            candidates = paged_candidates(policy, minibatch, gpus, costs, space, estimator)
        else:
            candidates = sharded_candidates(policy, minibatch, gpus, costs, space, estimator)
    except PlanError as error:
        refusals.add(policy, Reason.PLAN, error)
        return Candidates()
    copies = gpus if policy.has_private_stores else 1
    stored, cap = store_bytes(costs, minibatch, copies=copies), machine.host.memory_bytes
    if cap is not None and stored > cap:
        what = f"{copies} x weights, gradients and optimizer state, and the data"
        miss = DoesNotFit(None, (0, costs.layer_count - 1), what, stored, cap)
        refusals.add(policy, Reason.HOST, miss, candidates.count)
        return Candidates(notes=candidates.notes)
    return candidates


class _Evaluator:
    """Evaluates candidates, here or with the help of an executor."""

    def __init__(self, costs: Costs, machine: Machine, executor: Executor | None) -> None:
        self._costs, self._machine, self._executor = costs, machine, executor
        self._encoded = b"" if executor is None else msgspec.msgpack.encode(costs.trace)
        self._encoded_machine = b"" if executor is None else msgspec.msgpack.encode(machine)

    def outcomes(self, plans: Sequence[Plan], open_slots: bool) -> list[_Outcome]:
        """What became of each, in order."""
        if self._executor is None:
            return [evaluate(plan, open_slots, self._costs, self._machine) for plan in plans]
        elsewhere = partial(
            evaluate_encoded,
            open_slots=open_slots,
            trace=self._encoded,
            extrapolate=self._costs.extrapolate,
            machine=self._encoded_machine,
        )
        return [
            answer if isinstance(answer, HarmonyError) else msgspec.msgpack.decode(answer, type=Found)
            for answer in self._executor.map(elsewhere, plans)
        ]


class _Hunt:
    """The search of one policy."""

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

    def run(self, evaluator: _Evaluator, report: Callable[[_Hunt], object]) -> None:
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

    def vary(self, evaluator: _Evaluator, vary: Callable[[Plan], Iterable[Plan]], climbers: int, most: int) -> None:
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


def _report(progress: ReportProgress | None, number: int, of: int, hunt: _Hunt) -> None:
    if progress is None:
        return
    best = f", best {format_seconds(hunt.found[0].period_ns / NS_PER_S)}" if hunt.found else ""
    counts = hunt.counts
    what = f"{hunt.policy.value}: {counts.simulated} simulated of {counts.candidates}{best}"
    progress((number + hunt.share_done) / of, what)


def _result(
    hunts: Sequence[_Hunt],
    top: int,
    refusals: Refusals,
    notes: list[str],
    start: float,
    trace: Trace,
    costs: Costs,
    machine: Machine,
) -> SearchResult:
    fastest = sorted((found for hunt in hunts for found in hunt.found), key=lambda found: found.period_ns)
    if not fastest:
        raise NothingFits(tuple(refusal.line() for refusal in refusals.list()), sum(hunt.counts.left for hunt in hunts))
    best_by_policy = {}
    for hunt in hunts:
        if hunt.found:
            schedule = build_from_costs(hunt.found[0].plan, costs, machine)
            timeline = simulate(schedule, trace, machine, extrapolate=costs.extrapolate)
            best_by_policy[hunt.policy] = Best(hunt.found[0], schedule, timeline)
    notes += [refusal.line() for refusal in refusals.list() if refusal.policy not in best_by_policy]
    counts = {hunt.policy: hunt.counts for hunt in hunts}
    return SearchResult(
        best=best_by_policy[fastest[0].plan.policy],
        best_by_policy=best_by_policy,
        top=tuple(fastest[:top]),
        counts=sum(counts.values(), start=Counts()),
        counts_by_policy=counts,
        refusals=refusals.list(),
        lower_bound_ns=int(min(fastest[0].period_ns, *(hunt.least_ns for hunt in hunts))),
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )
