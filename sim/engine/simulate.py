"""The simulator: a schedule runs on a machine.

    wait until all predecessors have ended → allocate → spend time, then send bytes → free → next task of the lane

``run.py`` does it. Copies at the same time share links: see ``hardware/fluid.py``, and ``urgency.py`` for those that go
first. Memory is planned in the schedule; ``device_memory.py`` replays it afterwards, and fails if a buffer does not
have the place that the plan promised.
"""

from __future__ import annotations

from msgspec.structs import replace

from traces.costs import Costs
from traces.schema import Trace

from ..errors import DoesNotFit, PlanError, ScheduleError
from ..hardware.machine import Machine
from ..home import Ties, tied_layers
from ..schedule import Schedule
from ..timelines.critical_path import critical_path
from ..timelines.replay import StepTimes, in_sequence
from ..timelines.timeline import Timeline, TimelineInfo
from ..units import NS_PER_S
from ..unrolling import split_steps, unroll
from .bounds import bound_ns
from .caveats import caveats, idle_gpus, slow_gpus
from .durations import CostDurations, Demands, Durations, forward_share, used_durations
from .run import Run

_OVERLAPPING = 3
"""So many steps that overlap show their period."""

_MOST_ROWS = 4_000_000
"""Rows that are recorded of all steps together. So many take gigabytes already."""

_LONGEST_NS = 2**62
"""What the tables of a timeline can hold."""


def simulate(
    schedule: Schedule,
    trace: Trace,
    machine: Machine,
    *,
    steps: int | None = None,
    extrapolate: bool = False,
    durations: Durations | None = None,
) -> Timeline:
    """Predict when every task of ``schedule`` starts and ends on ``machine``.

    A barrier separates steps and the simulation has no chance in it, so all ``steps`` (by default one) are alike. A
    plan whose steps overlap has one step alone, and then as many as are asked for (by default three) without barriers;
    asked for one, only that alone. ``durations`` replaces what the trace says about tasks that are no copies.

    Raises PlanError or DoesNotFit if the machine is too small, TraceError if the trace lacks a figure (unless
    ``extrapolate``), Stalled if no task can go on, ScheduleError if the memory plan does not hold.
    """
    if steps is None:
        steps = _OVERLAPPING if schedule.plan.overlap_steps else 1
    if steps < 1:
        raise PlanError(f"{steps} steps asked for; simulate at least 1")
    costs = Costs(trace, extrapolate=extrapolate)
    _check(schedule, trace, machine)
    demands = Demands(machine, durations or CostDurations(costs, machine, schedule.plan.gpus), schedule.plan.gpus)
    step = run_step(schedule, demands)
    overlapping = steps if schedule.plan.overlap_steps and steps > 1 else 0
    if (steps + 1) * step.duration_ns > _LONGEST_NS:
        raise PlanError(
            f"{steps} step(s) take {steps * step.duration_ns / NS_PER_S:.3g} s, and times end at "
            f"{_LONGEST_NS / NS_PER_S:.3g} s; look for a layer's time, a speed or a link that is out of all proportion"
        )
    if steps > 1 and steps * len(schedule.tasks) > _MOST_ROWS:
        raise PlanError(
            f"{steps} steps of {len(schedule.tasks)} tasks asked for, and at most {_MOST_ROWS} rows are recorded; "
            f"simulate at most {max(1, _MOST_ROWS // len(schedule.tasks))} steps"
        )
    used = used_durations(schedule.tasks)
    said = [*caveats(costs, used), *idle_gpus(schedule), *slow_gpus(schedule, machine)]
    runs = [[step]] * (1 if overlapping else steps)
    if overlapping:
        runs.append(run_overlapping(schedule, demands, tied_layers(costs), overlapping))
    info = replace(
        TimelineInfo.of(schedule, machine.name, "simulated", steps=sum(map(len, runs))),
        overlapping=overlapping,
        lower_bound_ns=bound_ns(schedule, demands),
        critical_path=critical_path(schedule, step, lambda task: forward_share(task, costs), machine),
        provenance={where.value: count for where, count in costs.tally(used).items()},
        notes={"caveats": said} if said else {},
    )
    return Timeline.from_times(schedule, info, in_sequence(runs))


def run_step(schedule: Schedule, demands: Demands) -> StepTimes:
    """One isolated step, without the tables: what a search needs of a simulation."""
    return Run(schedule, demands).times()


def run_overlapping(schedule: Schedule, demands: Demands, ties: Ties, steps: int = _OVERLAPPING) -> list[StepTimes]:
    """So many steps without a barrier between them; times count from the start of the first."""
    return split_steps(run_step(unroll(schedule, steps, ties), demands), steps)


def _check(schedule: Schedule, trace: Trace, machine: Machine) -> None:
    if not schedule.tasks:
        raise ScheduleError(("it has no tasks",))
    if schedule.model != trace.model or schedule.layers != len(trace.layers):
        raise ScheduleError(
            (
                f"it is of {schedule.model} with {schedule.layers} layers, and the trace of {trace.model} with "
                f"{len(trace.layers)}; simulate it with a trace of the model it was built for",
            )
        )
    if schedule.plan.gpus > len(machine.gpus):
        raise PlanError(
            f"the schedule is for {schedule.plan.gpus} GPUs, machine {machine.name} has {len(machine.gpus)}; "
            f"choose the machine's count with --gpus {schedule.plan.gpus}"
        )
    layers, planned = (0, schedule.layers - 1), "the planned buffers"
    for gpu, needed in enumerate(schedule.memory.gpu_peak_bytes):
        if needed > (usable := machine.gpus[gpu].usable_bytes):
            raise DoesNotFit(gpu, layers, planned, needed, usable)
    cap = machine.host.memory_bytes
    if cap is not None and schedule.memory.host_peak_bytes > cap:
        raise DoesNotFit(None, layers, "the store and the planned buffers", schedule.memory.host_peak_bytes, cap)
