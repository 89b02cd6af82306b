"""The search: simulate the most promising plans of each policy, and say how far the best can be from the truth.

Policies are searched apart from each other (``hunt.py``), so that each has its own best; what is found depends neither
on timing nor on how many processes help.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial

from traces.costs import Costs
from traces.errors import TraceError
from traces.schema import Trace

from ..builders import build_from_costs
from ..builders.store_bytes import store_bytes
from ..engine.simulate import simulate
from ..errors import DoesNotFit, PlanError
from ..hardware.machine import Machine
from ..plan import Policy
from ..units import NS_PER_S, format_seconds
from .candidates import Candidates, paged_candidates, sharded_candidates
from .choice import PlanChoice
from .estimates import Estimator
from .evaluate import Evaluator
from .harmony_candidates import harmony_candidates
from .hunt import Hunt
from .refusals import Reason, Refusals
from .result import Best, Counts, SearchResult
from .space import Space
from .variations import CLIMBED, LAST, variations

ReportProgress = Callable[[float, str], object]
"""Called with the share done (0 to 1) and what is being done now."""

MOST_SAMPLES = 100_000
"""In a minibatch: with more, listing microbatch sizes alone takes long, and no step of that size is simulated soon."""

_VARIED_SHARE = 7
"""Unless told otherwise, a search simulates as many variations as a seventh of its candidates."""

_CLIMBERS = 3
"""So many of the best plans vary."""

_LAST = 1
"""So many variations are left for the fields that are tried last."""


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
    if minibatch > MOST_SAMPLES:
        raise PlanError(f"{minibatch} samples in a minibatch; a search looks at {MOST_SAMPLES} at most")
    if max_variations is None:
        max_variations = -(-max_simulated // _VARIED_SHARE)
    if max_variations < 0:
        raise PlanError(f"{max_variations} variations to simulate; ask for 0 or more")
    space = choice if isinstance(choice, Space) else Space.of(choice or PlanChoice())
    wanted, notes = _distinct(policies, len(machine.gpus))
    space.check(wanted)
    costs = Costs(trace, extrapolate=extrapolate)
    evaluator, estimator = Evaluator(costs, machine, executor), Estimator(costs, machine)
    refusals = Refusals()
    hunts: list[Hunt] = []
    uncovered: list[TraceError] = []
    for number, policy in enumerate(wanted):
        try:
            candidates = _candidates(policy, minibatch, costs, machine, space, estimator, refusals)
        except TraceError as error:
            uncovered.append(error)
            notes.append(f"{policy.value} is left out: {error}")
            continue
        hunt = Hunt(policy, candidates, estimator, top, max_simulated, refusals)
        hunts.append(hunt)
        hunt.run(evaluator, partial(_report, progress, number, len(wanted)))
        vary = partial(variations, costs=costs, machine=machine, space=space)
        last = min(_LAST, max_variations)
        hunt.vary(evaluator, partial(vary, fields=CLIMBED), _CLIMBERS, max_variations - last)
        hunt.vary(evaluator, partial(vary, fields=LAST), 1, last)
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


def _report(progress: ReportProgress | None, number: int, of: int, hunt: Hunt) -> None:
    if progress is None:
        return
    best = f", best {format_seconds(hunt.found[0].period_ns / NS_PER_S)}" if hunt.found else ""
    counts = hunt.counts
    what = f"{hunt.policy.value}: {counts.simulated} simulated of {counts.candidates}{best}"
    progress((number + hunt.share_done) / of, what)


def _result(
    hunts: Sequence[Hunt],
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
