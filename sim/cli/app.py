"""The command ``harmony``. Commands turn words into values, call one function, and print what it returns.

Here are the commands that plan and predict; those that run models are in ``runs``, those about traces in ``traces``,
those that look at timelines in ``timelines``. Whatever is slow to import is imported by the command that uses it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..plan import Policy
from . import runs, timelines, traces
from .options import (
    Extrapolate,
    Json,
    MachineName,
    MachineOverrides,
    Minibatch,
    PlanOptions,
    TimelineOutput,
    TraceName,
    spread,
)
from .output import Commands, Output

if TYPE_CHECKING:
    from traces.schema import Trace

    from ..schedule import Schedule


class _HarmonyCommands(Commands):
    """The commands in the order in which one comes to use them."""

    order = (
        "demo",
        "layers",
        "profile",
        "estimate",
        "import",
        "calibrate",
        "machines",
        "trace",
        "search",
        "simulate",
        "run",
        "why",
        "compare",
        "plot",
        "export",
    )

    def list_commands(self, ctx: Any) -> list[str]:
        """Names for ``--help``."""
        return sorted(super().list_commands(ctx), key=self.order.index)


app = typer.Typer(
    cls=_HarmonyCommands,
    name="harmony",
    help="Train networks larger than the memory of all your GPUs, and know beforehand how fast it will go.",
    epilog="Start with: harmony demo -o demo-output",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(traces.commands)
app.add_typer(runs.commands)
app.add_typer(timelines.commands)


def main() -> None:
    """Entry point of the command ``harmony``."""
    app()


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"harmony {version('harmony')}")
        raise typer.Exit


@app.callback()
def _harmony(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that come before a command."""


@app.command(epilog="Example: harmony machines 4x1080ti")
def machines(
    name: Annotated[str | None, typer.Argument(help="A machine file, or the name of a shipped machine.")] = None,
    as_json: Json = False,
) -> None:
    """List the shipped machines, or describe one."""
    from ..hardware.files import load_machine, shipped_machines
    from ..hardware.report import describe, machine_to_dict
    from .tables import machine_table

    out = Output(as_json)
    if name is None:
        known = [load_machine(shipped) for shipped in shipped_machines()]
        out.result([machine_to_dict(machine) for machine in known], machine_table(known))
    else:
        machine = load_machine(name)
        out.result(machine_to_dict(machine), describe(machine))


@app.command(epilog="Example: harmony search gpt2-xl@gtx-1080-ti --machine 4x1080ti --minibatch 32 -o best.json")
@spread
def search(
    trace: TraceName,
    machine: MachineName,
    minibatch: Minibatch,
    overrides: MachineOverrides,
    plan: PlanOptions,
    policy: Annotated[
        list[Policy] | None, typer.Option("--policy", help="Look only at this policy; may be repeated.")
    ] = None,
    top: Annotated[int, typer.Option("--top", min=1, help="How many of the best to report.")] = 10,
    max_simulated: Annotated[
        int, typer.Option("--max-simulated", min=1, help="Simulate at most so many plans of each policy.")
    ] = 100,
    max_variations: Annotated[
        int | None,
        typer.Option(
            "--max-variations",
            min=0,
            help="Then vary options of the best, at most so often; default a seventh of that.",
        ),
    ] = None,
    processes: Annotated[
        int | None, typer.Option("--processes", min=1, help="Search in so many processes (default: all processors).")
    ] = None,
    extrapolate: Extrapolate = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="S.json", help="Write the best schedule here.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the plan with the shortest step. Plan options restrict the search."""
    from traces.files import load_trace

    from ..hardware.files import load_machine
    from ..planner.processes import local_processes, processors
    from ..planner.search import search as find
    from ..schedule_files import save_schedule

    out = Output(as_json, output)
    with out.progress() as progress, local_processes(processes or processors()) as executor:
        found = find(
            load_trace(trace),
            overrides.applied_to(load_machine(machine)),
            minibatch,
            policies=tuple(policy or Policy),
            choice=plan.choice(),
            top=top,
            max_simulated=max_simulated,
            max_variations=max_variations,
            extrapolate=extrapolate,
            progress=progress,
            executor=executor,
        )
    out.write(output, ".json", lambda path: save_schedule(found.best.schedule, path))
    out.result(found.to_dict(), found)


@app.command(
    epilog="Examples: harmony simulate gpt2-xl@gtx-1080-ti -m 4x1080ti --schedule best.json -o predicted.parquet; "
    "with a plan of your own: --policy harmony-pp --minibatch 32 --u-fwd 4 --u-bwd 2 --packs-bwd 8"
)
@spread
def simulate(
    trace: TraceName,
    machine: MachineName,
    overrides: MachineOverrides,
    plan: PlanOptions,
    schedule: Annotated[
        Path | None, typer.Option("--schedule", metavar="S.json", help="Simulate this schedule; no plan options then.")
    ] = None,
    policy: Annotated[Policy | None, typer.Option("--policy", help="Build a schedule of this policy.")] = None,
    minibatch: Annotated[
        int | None, typer.Option("--minibatch", metavar="D", min=1, help="Samples in a step, in all.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps",
            min=1,
            help="How many steps to record; default 1, or 3 that overlap (after one alone) with --overlap-steps",
        ),
    ] = None,
    extrapolate: Extrapolate = False,
    show_grid: Annotated[bool, typer.Option("--grid", help="Print what every lane does, in order.")] = False,
    show_why: Annotated[bool, typer.Option("--why", help="Print the tasks that decide how long the step is.")] = False,
    save: Annotated[
        Path | None, typer.Option("--save-schedule", metavar="S.json", help="Write the schedule here.")
    ] = None,
    output: TimelineOutput = None,
    as_json: Json = False,
) -> None:
    """Predict a step: of a schedule file, or of a plan given by its policy and options."""
    from traces.costs import Costs
    from traces.files import load_trace

    from ..engine.simulate import simulate as predict
    from ..hardware.files import load_machine
    from ..schedule_files import save_schedule
    from ..timelines.timeline import save_timeline
    from ..views.grid import grid
    from ..views.why import why_table
    from .tables import summary_tables

    out = Output(as_json, save, output)
    costs_of, on = load_trace(trace), overrides.applied_to(load_machine(machine))
    if schedule is not None:
        given = [flag for flag, value in (("--policy", policy), ("--minibatch", minibatch)) if value is not None]
        given += plan.given()
        if given:
            raise typer.BadParameter(f"{', '.join(given)} cannot be combined with --schedule, which holds its plan")
        planned = _checked(schedule, costs_of)
    elif policy is None or minibatch is None:
        raise typer.BadParameter("say what to simulate: --schedule S.json, or --policy P and --minibatch D")
    else:
        from ..planner.completion import build_choice

        planned = build_choice(plan.choice(), policy, minibatch, Costs(costs_of, extrapolate=extrapolate), on)
    timeline = predict(planned, costs_of, on, steps=steps, extrapolate=extrapolate)
    out.write(save, ".json", lambda path: save_schedule(planned, path))
    out.write(output, ".csv", lambda path: save_timeline(timeline, path))
    summary = timeline.summary()
    before, after = [grid(planned)] if show_grid else [], [why_table(timeline)] if show_why else []
    out.result(summary, *before, *summary_tables(summary), *after)


def _checked(path: Path, trace: Trace) -> Schedule:
    from ..schedule_files import load_schedule
    from ..validation.validate import validate

    schedule = load_schedule(path)
    validate(schedule, trace)
    return schedule
