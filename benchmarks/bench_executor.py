"""How much time the executor wastes: its steps beside what they cannot do without, in one run on this computer.

fits        one emulated GPU that holds everything, unpaced, links without limit, no recompute: beside a plain loop
            with the same microbatches, optimizer and number of threads
swapping    two emulated GPUs that hold a third of the state: the steady period of overlapping steps, beside the longer
            of the busiest GPU's calculations and the busiest link's copies alone, for plans predicted within 5 %
policies    the best Harmony plan beside the best plan of each paged baseline: speed-up and swapped bytes, predicted and
            measured

Ratios are medians over pairs of steps that follow each other, or over one run's steps.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

import torch
from msgspec.structs import replace
from rich.console import Console

import sim
from executor import DeviceKind, Workload, calibrate, load_workload, profile, run
from executor.devices.facade import open_devices
from executor.devices.processor import quiet
from executor.models.inputs import Inputs, call_model, logits_of
from executor.models.workloads import adam
from executor.running.session import Session
from sim.hardware.fabric import Fabric
from sim.planner.choice import PlanChoice
from sim.schedule import Task, TaskKind
from sim.tables import Table
from sim.units import format_bytes, format_seconds

MODEL = "gpt2-demo"
UNLIMITED = 1e15  # bytes/s
PAIRS = 12
STEPS = 6
WITHIN = 1.05
"""Plans are run whose predicted period is at most this multiple of what it cannot go below."""


class Fit(NamedTuple):
    """Seconds of a step of ours, and of the plain loop's."""

    ours_s: float
    plain_s: float


def roomy(machine: sim.Machine) -> sim.Machine:
    """One of the machine's GPUs, unpaced, with memory for everything and links without limit."""
    assert machine.emulation is not None
    gpu = replace(machine.gpus[0], memory_bytes=8 * 2**30, speed=1.0, bandwidth=UNLIMITED, copy_overhead_ns=0)
    return replace(
        machine,
        gpus=(replace(gpu, p2p_bandwidth=UNLIMITED),),
        host=replace(machine.host, speed=1.0),
        links=tuple(replace(link, bandwidth=UNLIMITED) for link in machine.links),
        emulation=replace(
            machine.emulation,
            pace=0.0,
            gpu_bandwidth=UNLIMITED,
            p2p_bandwidth=UNLIMITED,
            links=dict.fromkeys(machine.emulation.links, UNLIMITED),
        ),
    )


def fits(model: str, minibatch: int, microbatch: int, pairs: int) -> list[Fit]:
    """Steps of ours and of the plain loop, in turn; the first pair warms up."""
    trace = profile(load_workload(model), microbatches=(microbatch,), budget_s=10)
    machine = roomy(sim.load_machine("emulated"))
    choice = PlanChoice(recompute=False, u_fwd=microbatch, u_bwd=microbatch)
    schedule = sim.search(trace, machine, minibatch, policies=(sim.Policy.DP_SWAP,), choice=choice).best.schedule
    workload, plain = load_workload(model), load_workload(model)
    session = Session(
        schedule,
        workload.layers(minibatch),
        adam(workload.model.parameters()),
        open_devices(DeviceKind.EMULATED, machine),
    )
    step = plain_step(plain, minibatch, microbatch)
    found = []
    for number in range(pairs + 1):
        batch = workload.batch(minibatch, number)
        with quiet():
            plain_s = timed(lambda batch=batch: step(*batch))
        found.append(Fit(timed(lambda batch=batch: session.step(*batch)), plain_s))
    return found[1:]


def plain_step(workload: Workload, minibatch: int, microbatch: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A step of plain PyTorch, its gradients accumulated over microbatches."""
    optimizer = adam(workload.model.parameters())

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad()
        for first in range(0, minibatch, microbatch):
            part = slice(first, first + microbatch)
            logits = logits_of(call_model(workload.model, Inputs.of(inputs[part])))
            torch.autograd.backward(workload.loss_fn(logits, labels[part]) * (microbatch / minibatch))
        optimizer.step()

    return step


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def least_s(schedule: sim.Schedule, timeline: sim.Timeline, machine: sim.Machine) -> float:
    """What a period cannot go below: the longest of each GPU's calculations and each link's copies, alone."""
    calculations = [lanes.get("compute", 0.0) for lanes in timeline.summary()["busy_s"].values()]
    return max(*calculations, *link_seconds(schedule.tasks, Fabric(machine)))


def link_seconds(tasks: Iterable[Task], fabric: Fabric) -> list[float]:
    """What the copies of a step take of each link, at its full rate."""
    seconds = [0.0] * len(fabric.resources)
    for task in tasks:
        for resource, share in way(task, fabric):
            if fabric.capacities[resource] < math.inf:
                seconds[resource] += share * task.bytes / fabric.capacities[resource]
    return seconds


def way(task: Task, fabric: Fabric) -> tuple[tuple[int, float], ...]:
    """The links that a copy loads; collectives are left out, as none of the plans here has any worth counting."""
    match task.kind, task.gpu, task.peer:
        case TaskKind.SWAP_IN, int(gpu), _:
            return fabric.swap_in(gpu).loads
        case TaskKind.SWAP_OUT, int(gpu), _:
            return fabric.swap_out(gpu).loads
        case TaskKind.P2P, int(gpu), int(peer):
            return fabric.p2p(gpu, peer).loads
        case _:
            return ()


def measure_machine() -> tuple[sim.Machine, sim.Trace]:
    """Two emulated GPUs, and the model's trace."""
    machine = calibrate(sim.load_machine("emulated"), DeviceKind.EMULATED)
    return machine, profile(load_workload(MODEL), microbatches=(1, 2, 4), budget_s=20)


def harmony_plans(trace: sim.Trace, machine: sim.Machine) -> list[sim.Schedule]:
    """For each Harmony policy the best schedule with overlapping steps."""
    found = []
    for policy in (sim.Policy.HARMONY_DP, sim.Policy.HARMONY_PP):
        choice = PlanChoice(overlap_steps=True, prefetch=True)
        found.append(sim.search(trace, machine, 8, policies=(policy,), choice=choice, max_simulated=60).best.schedule)
    return found


def print_fits() -> None:
    """The table of a step where everything fits."""
    rows = []
    for minibatch, microbatch in ((8, 2), (16, 4)):
        found = fits(MODEL, minibatch, microbatch, PAIRS)
        rows.append(
            (
                f"{minibatch} in {minibatch // microbatch} microbatches",
                format_seconds(median(fit.plain_s for fit in found)),
                format_seconds(median(fit.ours_s for fit in found)),
                f"{median(fit.ours_s / fit.plain_s for fit in found):.3f}",
            )
        )
    columns = ("minibatch", "plain PyTorch", "executor", "ratio (aim 1.05)")
    Console(width=130).print(Table(f"everything fits: {MODEL}, one GPU, one thread", columns, tuple(rows)))


def print_swapping(schedules: Iterable[sim.Schedule], trace: sim.Trace, machine: sim.Machine) -> None:
    """The table of steady periods."""
    rows = []
    for schedule in schedules:
        predicted = sim.simulate(schedule, trace, machine, steps=STEPS)
        expected = predicted.summary()["period_s"] / least_s(schedule, predicted, machine)
        if expected > WITHIN:
            rows.append((schedule.plan.policy.value, "", f"{expected:.3f}", "", "", f"not within {WITHIN}"))
            continue
        measured = run(schedule, load_workload(MODEL), machine, steps=STEPS).timeline
        least, period = least_s(schedule, measured, machine), measured.summary()["period_s"]
        rows.append(
            (
                schedule.plan.policy.value,
                format_seconds(predicted.summary()["period_s"]),
                f"{expected:.3f}",
                format_seconds(least),
                format_seconds(period),
                f"{period / least:.3f}",
            )
        )
    columns = ("plan", "predicted period", "over least", "least, measured", "measured period", "ratio (aim 1.10)")
    Console(width=130).print(Table(f"swapping: {MODEL}, 2 GPUs, {STEPS} steps", columns, tuple(rows)))


def print_policies(trace: sim.Trace, machine: sim.Machine) -> None:
    """The table of the best Harmony plan beside the baselines."""
    harmony = (sim.Policy.HARMONY_DP, sim.Policy.HARMONY_PP)
    choice = PlanChoice(overlap_steps=False)
    best = sim.search(trace, machine, 8, policies=harmony, choice=choice, max_simulated=60).best.schedule
    baselines = [
        sim.search(trace, machine, 8, policies=(policy,), max_simulated=60).best.schedule
        for policy in (sim.Policy.DP_SWAP, sim.Policy.GPIPE_SWAP, sim.Policy.ONE_F_ONE_B_SWAP)
    ]
    figures = [both(schedule, trace, machine) for schedule in (best, *baselines)]
    rows = []
    for schedule, (predicted, measured) in zip((best, *baselines), figures, strict=True):
        rows.append(
            (
                schedule.plan.policy.value,
                format_seconds(predicted.step_s),
                format_seconds(measured.step_s),
                f"{predicted.step_s / figures[0][0].step_s:.2f}x",
                f"{measured.step_s / figures[0][1].step_s:.2f}x",
                format_bytes(measured.swapped_bytes),
                f"{predicted.swapped_bytes / figures[0][0].swapped_bytes:.2f}x",
                f"{measured.swapped_bytes / figures[0][1].swapped_bytes:.2f}x",
            )
        )
    columns = ("plan", "predicted", "measured", "of Harmony's", "measured", "swapped", "of Harmony's", "measured")
    Console(width=130).print(Table(f"policies: {MODEL}, 2 GPUs, minibatch 8", columns, tuple(rows)))


class Figures(NamedTuple):
    """Of a timeline."""

    step_s: float
    swapped_bytes: int


def both(schedule: sim.Schedule, trace: sim.Trace, machine: sim.Machine) -> tuple[Figures, Figures]:
    """A schedule as predicted, and as run."""
    ran = run(schedule, load_workload(MODEL), machine, steps=3).timeline
    return figures_of(sim.simulate(schedule, trace, machine)), figures_of(ran)


def figures_of(timeline: sim.Timeline) -> Figures:
    """Its step and its swapped bytes, both ways."""
    found = timeline.summary()
    swapped = sum(sum(found[way].values()) for way in ("swap_in_bytes", "swap_out_bytes"))
    return Figures(found["step_time_s"], swapped)


def main() -> None:
    """Print the tables that are named on the command line, or all."""
    wanted = sys.argv[1:] or ["fits", "swapping", "policies"]
    if "fits" in wanted:
        print_fits()
    if {"swapping", "policies"} & set(wanted):
        machine, trace = measure_machine()
        if "swapping" in wanted:
            print_swapping(harmony_plans(trace, machine), trace, machine)
        if "policies" in wanted:
            print_policies(trace, machine)


if __name__ == "__main__":
    main()
