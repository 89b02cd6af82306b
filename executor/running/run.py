"""Run a schedule for some steps: from a Schedule to a measured Timeline."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

import torch
from msgspec.structs import replace

from sim.errors import DoesNotFit
from sim.hardware.machine import Machine
from sim.schedule import Schedule
from sim.timelines.critical_path import critical_path
from sim.timelines.replay import in_sequence
from sim.timelines.timeline import Timeline, TimelineInfo

from ..devices.facade import DeviceKind, Overruns, open_devices
from ..models.workloads import Workload, adam
from ..reporting import Progress, silent
from .optimizer import OptimizerFactory
from .session import Session


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
    _check_memory(schedule, machine)
    model = workload.layers(schedule.plan.minibatch)
    devices = open_devices(device, machine)
    session = Session(schedule, model, optimizer(workload.model.parameters()), devices, seed=seed)
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
    times = [result.times for result in results]
    measured = sorted(times[warmup_steps:alone], key=attrgetter("duration_ns"))
    typical = measured[(len(measured) - 1) // 2]
    info = replace(
        TimelineInfo.of(schedule, machine.name, "measured", steps=total, warmup_steps=warmup_steps),
        overlapping=overlapping,
        # Recompute is not timed apart from the backward that it is part of.
        critical_path=replace(
            critical_path(schedule, typical, lambda task: 0.0, machine),
            step=next(number for number, each in enumerate(times) if each is typical),
        ),
        notes={
            "device": device.value,
            "torch": str(torch.__version__),
            "overruns": overruns.count,
            "overrun_s": overruns.total_ns / 1e9,
        },
    )
    runs = [[step] for step in times[:alone]]
    if overlapping:
        runs.append(times[alone:])
    timeline = Timeline.from_times(schedule, info, in_sequence(runs))
    return RunResult(timeline, tuple(result.loss for result in results), overruns)


def _check_memory(schedule: Schedule, machine: Machine) -> None:
    """The machine has what the plan takes. (GPUs that are missing are the devices' matter.)"""
    memory, layers = schedule.memory, (0, schedule.layers - 1)
    what = f"the buffers of {schedule.plan.policy.value}"
    for gpu, (peak, spec) in enumerate(zip(memory.gpu_peak_bytes, machine.gpus, strict=False)):
        if peak > spec.usable_bytes:
            raise DoesNotFit(gpu, layers, what, peak, spec.usable_bytes)
    host = machine.host.memory_bytes
    if host is not None and memory.host_peak_bytes > host:
        raise DoesNotFit(None, layers, "the model's state, data and stash", memory.host_peak_bytes, host)
