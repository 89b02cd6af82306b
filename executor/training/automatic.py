"""``"auto"``: from a model, its optimizer and a batch to the best schedule for the machine at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from sim.hardware.machine import Machine
from sim.plan import Policy, UpdateWhen
from sim.planner.choice import PlanChoice
from sim.planner.search import search
from sim.schedule import Schedule
from sim.timelines.timeline import Timeline
from traces.schema import Trace

from ..devices.facade import DeviceKind
from ..errors import ModelError
from ..measuring.profile import default_microbatches, profile
from ..models.losses import LossFunction
from ..models.workloads import Workload
from ..reporting import Progress
from .batches import Batch
from .target import Target

PROFILE_S = 30.0
MAX_SIMULATED = 60
"""Plans simulated per policy."""
HARMONY = (Policy.HARMONY_DP, Policy.HARMONY_PP)


@dataclass(frozen=True)
class Planned:
    """What came of planning. ``predicted`` is None for a schedule that was given."""

    schedule: Schedule
    machine: Machine
    predicted: Timeline | None = None


def plan_automatically(
    model: nn.Module,
    loss_fn: LossFunction,
    optimizer: Optimizer,
    batch: Batch,
    target: Target,
    policies: Sequence[Policy],
    choice: PlanChoice,
    progress: Progress,
) -> Planned:
    """Calibrate (unless the machine is given), profile with this batch as the minibatch, and search."""
    machine = target.measured(_part(progress, 0.0, 0.1, "calibrating"))
    workload = Workload(type(model).__name__, model, loss_fn, lambda samples, _: _pair(batch.first(samples)))
    report = _part(progress, 0.1, 0.7, "profiling")
    trace = _profiled(workload, default_microbatches(batch.samples), optimizer, target.kind, report)
    found = search(
        trace,
        machine,
        batch.samples,
        policies=policies,
        choice=choice,
        max_simulated=MAX_SIMULATED,
        progress=_part(progress, 0.7, 1.0, "searching"),
    )
    progress(1.0, "planned")
    return Planned(found.best.schedule, machine, found.best.timeline)


def _profiled(
    workload: Workload, microbatches: Sequence[int], optimizer: Optimizer, kind: DeviceKind, progress: Progress
) -> Trace:
    """At these sizes of microbatches, but for one sample if the model cannot train on that (batch normalisation of
    vectors), and for the largest if they take more memory than a GPU has. Schedules leave those out, then."""
    device = torch.device("cuda" if kind is DeviceKind.CUDA else "cpu")
    try:
        return profile(
            workload,
            microbatches=microbatches,
            optimizer=lambda _: optimizer,
            device=device,
            budget_s=PROFILE_S,
            progress=progress,
        )
    except ModelError as error:
        fewer: Sequence[int] = ()
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            fewer = microbatches[:-1]
        elif microbatches[0] == 1:
            fewer = microbatches[1:]
        if not fewer:
            raise
    return _profiled(workload, fewer, optimizer, kind, progress)


def _part(progress: Progress, start: float, stop: float, name: str) -> Progress:
    """Progress of a part of the whole."""
    return lambda share, what: progress(start + (stop - start) * share, f"{name}: {what}")


def choice_for(policies: Sequence[Policy], update_when: UpdateWhen | None) -> PlanChoice:
    """What plans for a loop have in common: it ends each step before it begins the next one."""
    apart = False if any(policy.is_harmony for policy in policies) else None
    return PlanChoice(overlap_steps=apart, update_when=update_when)


def _pair(batch: Batch) -> tuple[object, torch.Tensor]:
    return batch.inputs, batch.labels
