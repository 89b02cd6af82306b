"""What whoever reads a prediction should know: about the numbers it rests on, and about GPUs that stand still."""

from __future__ import annotations

from collections.abc import Iterable

from traces.costs import Costs
from traces.schema import Phase, Provenance

from ..hardware.machine import Machine
from ..plan import HarmonyPlan
from ..schedule import Lane, Schedule


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


def idle_gpus(schedule: Schedule) -> list[str]:
    """A sentence if GPUs have nothing to compute, for lack of packs."""
    plan = schedule.plan
    idle = [gpu for gpu in range(plan.gpus) if (gpu, Lane.COMPUTE) not in schedule.lanes]
    if not idle:
        return []
    names = f"GPU {idle[0]} has" if len(idle) == 1 else f"GPUs {', '.join(map(str, idle))} have"
    packs = len(plan.packs_fwd) + len(plan.packs_bwd) if isinstance(plan, HarmonyPlan) else plan.gpus - len(idle)
    return [f"{names} nothing to do: {packs} pack{'s' if packs != 1 else ''} for {plan.gpus} GPUs"]


def slow_gpus(schedule: Schedule, machine: Machine) -> list[str]:
    """A sentence if GPUs of different speeds have equal shares of the minibatch, so that the slow ones hold up all."""
    speeds = [gpu.speed for gpu in machine.gpus[: schedule.plan.gpus]]
    slow = [gpu for gpu, speed in enumerate(speeds) if speed < max(speeds)]
    if not slow or not schedule.plan.policy.splits_minibatch:
        return []
    names = f"GPU {slow[0]} holds" if len(slow) == 1 else f"GPUs {', '.join(map(str, slow))} hold"
    return [
        f"{names} the others up: every GPU has the same share of the minibatch, and the slowest has "
        f"{min(speeds) / max(speeds):.2g} times the speed of the fastest"
    ]
