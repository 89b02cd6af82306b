"""Builders: from a Plan, a Trace and a Machine to a Schedule.

==================  ======================================================================================
``harmony.py``      Harmony plans, by passes: ``order`` (place, order), ``transfers``, ``memory``
``transfers.py``    the walk over their steps: ``weights`` (with ``residents``) and ``inputs`` (with ``needs``)
                    come in, what was made is passed on, ``gradients`` lead to updates; ``copies`` for all
``baselines.py``    paged plans: ``stages`` (who does what in which order), ``plain_steps`` (what each
                    step touches), ``paging`` (what comes and goes for it), ``paged_tasks``
``sharded.py``      sharded plans: ``zero3-offload``
``draft.py``        what both write: entries in total order that become a Schedule
==================  ======================================================================================
"""

from __future__ import annotations

from traces.costs import Costs
from traces.schema import Trace

from ..errors import PlanError
from ..hardware.machine import Machine
from ..plan import HarmonyPlan, PagedPlan, Plan, ShardedPlan, shares
from ..schedule import Schedule
from .baselines import build_paged
from .harmony import build_harmony
from .sharded import build_sharded

__all__ = ["build", "build_from_costs"]

_MOST_COMPUTATIONS = 1_000_000
"""Forwards and backwards of a step that are planned. So many take minutes and gigabytes already."""


def build(plan: Plan, trace: Trace, machine: Machine, *, extrapolate: bool = False) -> Schedule:
    """Build the schedule of a plan.

    Raises PlanError when the plan does not go with the trace or the machine, DoesNotFit when memory is too small,
    TraceError when the trace does not cover a microbatch size of the plan (unless ``extrapolate``).
    """
    return build_from_costs(plan, Costs(trace, extrapolate=extrapolate), machine)


def build_from_costs(plan: Plan, costs: Costs, machine: Machine) -> Schedule:
    """As :func:`build`, for callers that build many schedules from one trace."""
    if plan.gpus != len(machine.gpus):
        raise PlanError(
            f"the plan is for {plan.gpus} GPUs, machine {machine.name} has {len(machine.gpus)}; "
            f"choose the machine's count with --gpus {plan.gpus}"
        )
    _check_size(plan, costs)
    match plan:
        case HarmonyPlan():
            _check_layers(plan, costs)
            return build_harmony(plan, costs, machine)
        case PagedPlan():
            return build_paged(plan, costs, machine)
        case ShardedPlan():
            return build_sharded(plan, costs, machine)


def _check_size(plan: Plan, costs: Costs) -> None:
    forwards = backwards = costs.layer_count
    if isinstance(plan, HarmonyPlan):
        forwards, backwards = len(plan.packs_fwd), len(plan.packs_bwd)
    stretches = shares(plan.minibatch, plan.gpus) if plan.policy.splits_minibatch else [(0, plan.minibatch)]
    samples = [stop - start for start, stop in stretches]
    computations = sum(forwards * -(-each // plan.u_fwd) + backwards * -(-each // plan.u_bwd) for each in samples)
    if computations > _MOST_COMPUTATIONS:
        raise PlanError(
            f"a minibatch of {plan.minibatch} samples in microbatches of {plan.u_fwd} forward and {plan.u_bwd} "
            f"backward makes {computations} forwards and backwards, and steps of at most {_MOST_COMPUTATIONS} are "
            "planned; use larger microbatches (--u-fwd, --u-bwd) or a smaller minibatch"
        )


def _check_layers(plan: HarmonyPlan, costs: Costs) -> None:
    if plan.layer_count != costs.layer_count:
        raise PlanError(
            f"packs_bwd cover {plan.layer_count} layers, the trace of {costs.trace.model} has {costs.layer_count} "
            f"(0-{costs.layer_count - 1}); the packs must cover them all"
        )
    if plan.u_fwd == plan.u_bwd:
        return
    for index, layer in enumerate(costs.trace.layers):
        if layer.cut_sensitive:
            raise PlanError(
                f"layer {index} ({layer.name}) depends on how the minibatch is cut, or on chance: recompute needs "
                f"u_fwd = u_bwd; got {plan.u_fwd} and {plan.u_bwd}"
            )
