"""The search: bound every plan from below, simulate the promising ones, say how far the best can be from the truth.

For each policy, candidates come in the order of their bounds and are simulated in waves, until the next one's bound is
no less than the time of the last of the top, or the budget is spent. Policies are searched apart from each other, so
that each has its own best; what is found depends neither on timing nor on how many processes help.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

import msgspec

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
from .candidates import Candidate, Candidates, paged_candidates
from .choice import PlanChoice
from .estimates import Estimator
from .evaluate import Found, evaluate, evaluate_encoded
from .harmony_candidates import harmony_candidates
from .refusals import Reason, Refusals
from .result import Best, Counts, SearchResult
from .space import Space

ReportProgress = Callable[[float, str], object]
"""Called with the share done (0 to 1) and what is being done now."""

_WAVE = 4
"""Candidates evaluated between two looks at the bound, whether or not at once."""

_Outcome = Found | HarmonyError


def search(
    trace: Trace,
    machine: Machine,
    minibatch: int,
    *,
    policies: Sequence[Policy] = (Policy.HARMONY_DP, Policy.HARMONY_PP),
    choice: PlanChoice | Space | None = None,
    top: int = 10,
    max_simulated: int = 200,
    extrapolate: bool = False,
    progress: ReportProgress | None = None,
    executor: Executor | None = None,
) -> SearchResult:
    """Find the plans with the shortest steps for ``minibatch`` samples on all GPUs of the machine.

    ``choice`` restricts the plans. At most ``max_simulated`` plans of each policy are simulated. An ``executor`` (of
    processes, here or elsewhere) evaluates several at once; the result is the same.

    Raises NothingFits if no plan fits, TraceError if the trace does not cover what is asked for, PlanError for
    restrictions that concern none of the policies.
    """
    start = time.perf_counter()
    space = choice if isinstance(choice, Space) else Space.of(choice or PlanChoice())
    wanted, notes = _distinct(policies, len(machine.gpus))
    space.check(wanted)
    costs = Costs(trace, extrapolate=extrapolate)
    evaluator = _Evaluator(costs, machine, executor)
    refusals = Refusals()
    hunts: list[_Hunt] = []
    uncovered: list[TraceError] = []
    for number, policy in enumerate(wanted):
        try:
            candidates = _candidates(policy, minibatch, costs, machine, space, refusals)
        except TraceError as error:
            uncovered.append(error)
            notes.append(f"{policy.value} is left out: {error}")
            continue
        hunts.append(_Hunt(policy, candidates, top, max_simulated, refusals))
        hunts[-1].run(evaluator, partial(_report, progress, number, len(wanted)))
        notes += [f"{policy.value}: {note}" for note in candidates.notes]
    if not hunts:
        raise uncovered[0]
    return _result(hunts, top, refusals, notes, start, trace, costs, machine)


class NothingFits(PlanError):
    """No plan of a search fits; names each reason with its nearest miss."""

    def __init__(self, reasons: tuple[str, ...]) -> None:
        super().__init__(reasons)
        self.reasons = reasons

    def __str__(self) -> str:
        return "no plan fits:\n  " + "\n  ".join(self.reasons)


def _distinct(policies: Sequence[Policy], gpus: int) -> tuple[tuple[Policy, ...], list[str]]:
    """Each policy once; a pipeline over one GPU is data parallel over one GPU."""
    wanted = tuple(dict.fromkeys(policies))
    if not wanted:
        raise PlanError("no policy to search; give at least one")
    if gpus == 1 and {Policy.HARMONY_DP, Policy.HARMONY_PP} <= set(wanted):
        wanted = tuple(policy for policy in wanted if policy is not Policy.HARMONY_PP)
        return wanted, ["harmony-pp is left out: on one GPU it is the same as harmony-dp"]
    return wanted, []


def _candidates(
    policy: Policy, minibatch: int, costs: Costs, machine: Machine, space: Space, refusals: Refusals
) -> Candidates:
    """The candidates of a policy; none if they all are refused for the same reason."""
    gpus = len(machine.gpus)
    if policy is not Policy.HARMONY_PP and minibatch < gpus:
        error = PlanError(
            f"{policy.value} gives each GPU a share of the minibatch: {minibatch} samples are fewer than {gpus} GPUs"
        )
        refusals.add(policy, Reason.PLAN, error)
        return Candidates(0, [], [])
    estimator = Estimator(costs, machine)
    if policy is Policy.DP_SWAP:
        candidates = paged_candidates(minibatch, gpus, costs, space, estimator)
    else:
        candidates = harmony_candidates(policy, minibatch, costs, machine, space, estimator, refusals)
    copies = gpus if policy is Policy.DP_SWAP else 1
    stored, cap = store_bytes(costs, minibatch, copies=copies), machine.host.memory_bytes
    if cap is not None and stored > cap:
        what = f"{copies} x weights, gradients and optimizer state, and the data"
        miss = DoesNotFit(None, (0, costs.layer_count - 1), what, stored, cap)
        refusals.add(policy, Reason.HOST, miss, candidates.count)
        return Candidates(0, [], candidates.notes)
    return candidates


class _Evaluator:
    """Evaluates candidates, here or with the help of an executor."""

    def __init__(self, costs: Costs, machine: Machine, executor: Executor | None) -> None:
        self._costs, self._machine, self._executor = costs, machine, executor
        self._encoded = b"" if executor is None else msgspec.msgpack.encode(costs.trace)
        self._encoded_machine = b"" if executor is None else msgspec.msgpack.encode(machine)

    def outcomes(self, candidates: Sequence[Candidate]) -> list[_Outcome]:
        """What became of each, in order."""
        if self._executor is None:
            return [evaluate(each.plan, each.open_slots, self._costs, self._machine) for each in candidates]
        elsewhere = partial(
            evaluate_encoded,
            trace=self._encoded,
            extrapolate=self._costs.extrapolate,
            machine=self._encoded_machine,
        )
        answers = self._executor.map(
            elsewhere, [each.plan for each in candidates], [each.open_slots for each in candidates]
        )
        return [
            answer if isinstance(answer, HarmonyError) else msgspec.msgpack.decode(answer, type=Found)
            for answer in answers
        ]


class _Hunt:
    """The search of one policy."""

    def __init__(
        self, policy: Policy, candidates: Candidates, top: int, max_simulated: int, refusals: Refusals
    ) -> None:
        self.policy, self.notes = policy, candidates.notes
        self._candidates, self._refusals = candidates, refusals
        self._top, self._budget = top, max_simulated
        self._tried = 0
        self.found: list[Found] = []  # fastest first; among equals, in the order in which they were simulated
        self.next_bound_ns: float | None = None
        """Least bound of the plans that were not simulated; None: there are none."""

    def run(self, evaluator: _Evaluator, report: Callable[[_Hunt], object]) -> None:
        """Evaluate candidates until none can be among the top any more, or the budget is spent."""
        stream = self._candidates.by_bound()
        seen: set[Plan] = set()
        following = next(stream, None)
        while following and following.bound_ns < self._to_beat_ns and self._budget_left:
            wave: list[Candidate] = []
            while following and following.bound_ns < self._to_beat_ns and len(wave) < min(_WAVE, self._budget_left):
                if following.plan not in seen:
                    seen.add(following.plan)
                    wave.append(following)
                following = next(stream, None)
            for candidate, outcome in zip(wave, evaluator.outcomes(wave), strict=True):
                self._note(candidate, outcome)
            report(self)
        self.next_bound_ns = following.bound_ns if following else None

    @property
    def share_done(self) -> float:
        """Of the budget."""
        return min(1.0, self._tried / self._budget)

    @property
    def counts(self) -> Counts:
        """What became of the candidates."""
        refused = self._tried - len(self.found)
        infeasible = self._refusals.count(self.policy)
        untouched = self._candidates.count - self._tried
        proven = self.next_bound_ns is None or self.next_bound_ns >= self._to_beat_ns
        return Counts(
            candidates=self._candidates.count + infeasible - refused,
            simulated=len(self.found),
            pruned=untouched if proven else 0,
            infeasible=infeasible,
            left=0 if proven else untouched,
        )

    @property
    def _to_beat_ns(self) -> float:
        """Time of the last of the top; infinite while there are not so many."""
        return self.found[self._top - 1].step_time_ns if len(self.found) >= self._top else math.inf

    @property
    def _budget_left(self) -> int:
        """How many more may be tried; as long as none fits, always some."""
        return max(0, self._budget - self._tried) if self.found else _WAVE

    def _note(self, candidate: Candidate, outcome: _Outcome) -> None:
        self._tried += 1
        if isinstance(outcome, Found):
            insort(self.found, outcome, key=lambda found: found.step_time_ns)
        else:
            self._refusals.add_built(candidate.plan.policy, outcome)


def _report(progress: ReportProgress | None, number: int, of: int, hunt: _Hunt) -> None:
    if progress is None:
        return
    best = f", best {format_seconds(hunt.found[0].step_time_ns / NS_PER_S)}" if hunt.found else ""
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
    fastest = sorted((found for hunt in hunts for found in hunt.found), key=lambda found: found.step_time_ns)
    if not fastest:
        raise NothingFits(tuple(refusal.line() for refusal in refusals.list()))
    best_by_policy = {}
    for hunt in hunts:
        if hunt.found:
            schedule = build_from_costs(hunt.found[0].plan, costs, machine)
            timeline = simulate(schedule, trace, machine, extrapolate=costs.extrapolate)
            best_by_policy[hunt.policy] = Best(hunt.found[0], schedule, timeline)
    bounds = [hunt.next_bound_ns for hunt in hunts if hunt.next_bound_ns is not None]
    counts = {hunt.policy: hunt.counts for hunt in hunts}
    return SearchResult(
        best=best_by_policy[fastest[0].plan.policy],
        best_by_policy=best_by_policy,
        top=tuple(fastest[:top]),
        counts=sum(counts.values(), start=Counts()),
        counts_by_policy=counts,
        refusals=refusals.list(),
        lower_bound_ns=int(min([fastest[0].step_time_ns, *bounds])),
        seconds=time.perf_counter() - start,
        notes=tuple(notes),
    )
