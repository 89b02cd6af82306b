"""A measured Timeline, of the times of steps that ran."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from msgspec.structs import replace

from sim.hardware.machine import Machine
from sim.schedule import Schedule
from sim.timelines.critical_path import critical_path
from sim.timelines.replay import StepTimes, in_sequence
from sim.timelines.timeline import Timeline, TimelineInfo

from ..devices.facade import DeviceKind, Overruns


def measured_timeline(
    schedule: Schedule,
    machine: Machine,
    device: DeviceKind,
    times: Sequence[StepTimes],
    *,
    warmup_steps: int,
    overlapping: int = 0,
    overruns: Overruns,
) -> Timeline:
    """Of steps that ran one after the other; the last ``overlapping`` of them without a barrier. Figures are of those
    after the first ``warmup_steps``, of which one at least ran alone."""
    alone = len(times) - overlapping
    measured = sorted(times[warmup_steps:alone], key=attrgetter("duration_ns"))
    typical = measured[(len(measured) - 1) // 2]
    info = replace(
        TimelineInfo.of(schedule, machine.name, "measured", steps=len(times), warmup_steps=warmup_steps),
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
        runs.append(list(times[alone:]))
    return Timeline.from_times(schedule, info, in_sequence(runs))
