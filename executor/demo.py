"""The whole path on this computer: calibrate, profile, search, predict, run, and compare with plain PyTorch.

A small GPT-2 with random weights learns the bytes of Python's standard library. Its weights, gradients and Adam
state are at least three times what both emulated GPUs hold together. Two schedules compete: the best of Harmony's, and
the best of ``dp-swap``, whose microbatch size is tuned as well.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sim.engine.simulate import simulate
from sim.hardware.files import load_machine, save_machine
from sim.hardware.machine import Machine
from sim.plan import Policy
from sim.planner.choice import PlanChoice
from sim.planner.search import search
from sim.schedule import Schedule
from sim.schedule_files import save_schedule
from sim.timelines.compare import compare
from sim.timelines.timeline import Timeline, save_timeline
from sim.validation.validate import validate
from sim.views.chrome_trace import export_chrome
from sim.views.pictures import lanes_picture, memory_picture, save_picture, swap_picture
from traces.costs import Costs
from traces.files import make_folder, save_trace, write_atomically
from traces.schema import Trace

from .demo_report import DemoReport, Outcome
from .devices.facade import DeviceKind
from .measuring.calibrate import calibrate
from .measuring.profile import default_microbatches, profile
from .models.workloads import load_workload
from .reference import plain_losses
from .reporting import Progress, silent
from .running.run import run

MODEL = "gpt2-demo"
MACHINE = "emulated"
MINIBATCH = 8
MAX_SIMULATED = 60
"""Plans simulated per policy; more would find next to nothing better here."""
STEPS = 3
WARMUP_STEPS = 1
PROFILE_S = 25.0


@dataclass
class _Stages:
    """Tells how far the demo is: each stage has its share of the whole, about as long as it takes."""

    progress: Progress
    done: float = field(default=0.0)

    @contextmanager
    def stage(self, share: float, name: str) -> Iterator[Progress]:
        """Report a stage that takes this share of the whole."""
        self.progress(self.done, name)
        yield lambda part, what: self.progress(self.done + share * part, f"{name}: {what}")
        self.done += share


def run_demo(output: Path, *, progress: Progress = silent) -> DemoReport:
    """Run the demo and write everything it makes into the folder ``output``, ``summary.json`` last.

    Raises FileError if the folder cannot be written; what the stages raise otherwise is a defect of this computer's
    set-up (too little memory, say) and says so.
    """
    started = time.monotonic()
    make_folder(output)
    stages = _Stages(progress)
    with stages.stage(0.05, "calibrating the emulated GPUs") as report:
        machine = calibrate(load_machine(MACHINE), DeviceKind.EMULATED, report)
        save_machine(machine, output / "machine.toml")
    with stages.stage(0.2, f"profiling {MODEL}") as report:
        sizes = default_microbatches(MINIBATCH)
        trace = profile(load_workload(MODEL), microbatches=sizes, budget_s=PROFILE_S, progress=report)
        save_trace(trace, output / "trace.json")
    with stages.stage(0.1, "searching schedules") as report:
        harmony = _best(trace, machine, (Policy.HARMONY_DP, Policy.HARMONY_PP), PlanChoice(overlap_steps=False), report)
        dp_swap = _best(trace, machine, (Policy.DP_SWAP,), PlanChoice(), report)
    with stages.stage(0.1, "training with plain PyTorch") as report:
        workload = load_workload(MODEL)
        losses = plain_losses(workload, MINIBATCH, WARMUP_STEPS + STEPS, progress=report)
    with stages.stage(0.2, "running the best Harmony schedule") as report:
        first = _outcome("harmony", harmony, trace, machine, losses, output, report)
    with stages.stage(0.3, "running the best dp-swap schedule") as report:
        second = _outcome("dp-swap", dp_swap, trace, machine, losses, output, report)
    with stages.stage(0.05, "drawing"):
        _draw({"harmony": first, "dp-swap": second}, output)
    demo = DemoReport(
        harmony=first,
        dp_swap=second,
        state_bytes=_state_bytes(trace),
        gpu_memory_bytes_total=sum(gpu.usable_bytes for gpu in machine.gpus),
        seconds=time.monotonic() - started,
        output=output,
    )
    write_atomically(output / "summary.json", json.dumps(demo.to_dict(), allow_nan=False, indent=2).encode() + b"\n")
    progress(1.0, "done")
    return demo


def _best(
    trace: Trace, machine: Machine, policies: tuple[Policy, ...], choice: PlanChoice, progress: Progress
) -> Schedule:
    found = search(
        trace, machine, MINIBATCH, policies=policies, choice=choice, max_simulated=MAX_SIMULATED, progress=progress
    )
    schedule = found.best.schedule
    validate(schedule, trace)
    return schedule


def _outcome(
    name: str,
    schedule: Schedule,
    trace: Trace,
    machine: Machine,
    plain: tuple[float, ...],
    output: Path,
    progress: Progress,
) -> Outcome:
    """Predict and run one schedule on a fresh model, and write both timelines."""
    predicted = simulate(schedule, trace, machine)
    ran = run(schedule, load_workload(MODEL), machine, steps=STEPS, warmup_steps=WARMUP_STEPS, progress=progress)
    save_schedule(schedule, output / f"{name}.schedule.json")
    for source, timeline in (("predicted", predicted), ("measured", ran.timeline)):
        save_timeline(timeline, output / f"{name}.{source}.parquet")
    return Outcome(
        predicted=predicted,
        measured=ran.timeline,
        comparison=compare(predicted, ran.timeline),
        loss_max_abs_diff=max(abs(ours - theirs) for ours, theirs in zip(ran.losses, plain, strict=True)),
    )


def _draw(outcomes: dict[str, Outcome], output: Path) -> None:
    for name, outcome in outcomes.items():
        both: dict[str, Timeline] = {"predicted": outcome.predicted, "measured": outcome.measured}
        save_picture(lanes_picture(both), output / f"{name}.lanes.png")
        save_picture(memory_picture(both), output / f"{name}.memory.png")
        export_chrome(both, output / f"{name}.chrome.json.gz")
    measured = {name: outcome.measured for name, outcome in outcomes.items()}
    save_picture(swap_picture(measured), output / "swap.png")


def _state_bytes(trace: Trace) -> int:
    """Weights, gradients and optimizer state of the model; what is tied counts once."""
    costs = Costs(trace)
    owned = sum(costs.owned_weight_bytes(layer) for layer in range(costs.layer_count))
    return 2 * owned + costs.optimizer_state_bytes(0, costs.layer_count - 1)
