"""Run a schedule for some steps: from a Schedule to a measured Timeline."""

from __future__ import annotations

from dataclasses import dataclass

from sim.hardware.machine import Machine
from sim.schedule import Schedule
from sim.timelines.timeline import Timeline

from ..devices.facade import DeviceKind, Overruns
from ..models.workloads import Workload, adam
from ..reporting import Progress, silent
from .measured import measured_timeline
from .opening import open_session
from .optimizer import OptimizerFactory


@dataclass(frozen=True)
class RunResult:
    """What a run measured. ``losses`` has the loss of every step, warm-up steps first, each before its update;
    ``overruns`` are of the steps after the warm-up."""

    timeline: Timeline
    losses: tuple[float, ...]
    overruns: Overruns


def run(
    schedule: Schedule,
    workload: Workload,
    machine: Machine,
    *,
    device: DeviceKind = DeviceKind.EMULATED,
    steps: int = 3,
    warmup_steps: int = 1,
    optimizer: OptimizerFactory = adam,
    seed: int = 0,
    progress: Progress = silent,
) -> RunResult:
    """Train the workload's model for ``warmup_steps + steps`` steps, and measure.

    Where the plan's steps overlap, one more runs alone, after the warm-up, and then ``steps`` without a barrier between
    them (if that is one, only the one alone).

    Step k trains on ``workload.batch(minibatch, seed + k)``, and ``seed`` fixes dropout as well. Warm-up steps also
    check that no task takes more memory than the schedule reserves; figures are of the steps after them.

    Raises DoesNotFit if the schedule needs more memory than the machine has, DifferentModel if it was made for another
    model, DeviceError if the devices are not there, TaskFailed if a task fails.
    """
    model = workload.layers(schedule.plan.minibatch)
    session = open_session(schedule, model, optimizer(workload.model.parameters()), machine, device, seed=seed)
    overlapping = steps if schedule.plan.overlap_steps and steps > 1 else 0
    alone = warmup_steps + (1 if overlapping else steps)
    total = alone + overlapping
    batches = (workload.checked_batch(schedule.plan.minibatch, seed + number) for number in range(total))
    results = []
    warmed_up = Overruns()
    for number in range(alone):
        progress(number / total, f"step {number + 1} of {total}" + (", warming up" if number < warmup_steps else ""))
        inputs, labels = next(batches)
        if number == warmup_steps:
            warmed_up = session.overruns
        results.append(session.step(inputs, labels, check_memory=number < warmup_steps))
    if overlapping:
        progress(alone / total, f"steps {alone + 1} to {total}, which overlap")
        results += session.overlapping_steps(list(batches))
    session.write_home()
    progress(1.0, "ran")
    overruns = session.overruns.since(warmed_up)
    timeline = measured_timeline(
        schedule,
        machine,
        device,
        [result.times for result in results],
        warmup_steps=warmup_steps,
        overlapping=overlapping,
        overruns=overruns,
    )
    return RunResult(timeline, tuple(result.loss for result in results), overruns)
