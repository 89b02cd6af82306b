"""Commands that run models. The only part of ``sim`` that knows the executor, and only while one of them is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from traces.schema import Trace

from . import words
from .options import Device, Json, MachineName, Model, SampleTokens, TimelineOutput
from .output import Output

commands = typer.Typer()


@commands.command(epilog="Example: harmony demo -o demo-output")
def demo(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Folder for everything it makes.")
    ] = Path("demo-output"),
    as_json: Json = False,
) -> None:
    """The whole path on this machine: profile, search, predict, train on emulated GPUs, compare. Takes minutes."""
    from executor.demo import run_demo

    out = Output(as_json)
    with out.progress() as progress:
        report = run_demo(output, progress=progress)
    out.result(report.to_dict(), report)


@commands.command(epilog="Example: harmony profile gpt2-demo --microbatch 1,2,4,8 -o trace.json")
def profile(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="T.json", help="Trace to write.")],
    device: Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="cpu is for emulated GPUs.")] = "cpu",
    microbatch: Annotated[
        Any,
        typer.Option(
            "--microbatch",
            metavar="1,2,…",
            parser=words.counts,
            help="Microbatch sizes to measure. Default: 1, 2, 4, … up to the largest that fits, as the budget allows.",
        ),
    ] = None,
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE",
            parser=words.size,
            help='What a microbatch has to fit into, such as "9 GB"; default what the device has left.',
        ),
    ] = None,
    sequence: SampleTokens = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="At most so many measurements of each time.")] = 9,
    warmups: Annotated[int, typer.Option("--warmups", min=0, help="Measurements before those that count.")] = 1,
    budget: Annotated[float, typer.Option("--budget", metavar="S", help="Seconds to spend, roughly.")] = 60.0,
    split: Annotated[
        bool, typer.Option("--split", help="Also measure backwards in two parts, for plans with --split-backward.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure a trace of a model: what every layer costs at several microbatch sizes."""
    from executor.commands import measure_trace

    out = Output(as_json, output)
    with out.progress() as progress:
        trace = measure_trace(
            model,
            device=device,
            microbatches=microbatch,
            memory_bytes=gpu_memory,
            sequence=sequence,
            repeats=repeats,
            warmups=warmups,
            budget_s=budget,
            in_parts=split,
            progress=progress,
        )
    _write_trace(out, trace, output)


@commands.command(epilog="Example: harmony estimate gpt2-xl --gpu rtx-4090 --dtype bfloat16 -o trace.json")
def estimate(
    model: Model,
    gpu: Annotated[str, typer.Option("--gpu", metavar="NAME", help='A GPU such as "rtx-4090"; it need not be here.')],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="T.json", help="Trace to write.")],
    microbatch: Annotated[
        Any, typer.Option("--microbatch", metavar="1,2,…", parser=words.counts, help="Microbatch sizes to estimate.")
    ] = "1,2,4,8",
    sequence: SampleTokens = None,
    dtype: Annotated[
        Literal["float32", "tf32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Of all tensors; tf32 are float32 that are multiplied in TF32."),
    ] = "float32",
    host_bandwidth: Annotated[
        float | None,
        typer.Option(
            "--host-bandwidth",
            metavar="RATE",
            parser=words.rate,
            help='What updates on the CPU read and write, such as "40 GB/s"; default 20.7 GB/s.',
        ),
    ] = None,
    masters: Annotated[
        bool,
        typer.Option(
            "--masters/--no-masters",
            help="With half precision, Adam keeps its state and a copy of the weights in float32.",
        ),
    ] = False,
    split: Annotated[
        bool, typer.Option("--split", help="Also estimate backwards in two parts, for plans with --split-backward.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a trace for a GPU that is not at hand: operators are counted, and their times modelled."""
    from executor.commands import estimate_trace

    out = Output(as_json, output)
    with out.progress() as progress:
        trace = estimate_trace(
            model,
            gpu=gpu,
            dtype=dtype,
            microbatches=microbatch,
            sequence=sequence,
            host_bandwidth=host_bandwidth,
            masters=masters,
            in_parts=split,
            progress=progress,
        )
    _write_trace(out, trace, output)


def _write_trace(out: Output, trace: Trace, output: Path) -> None:
    """Write a trace, and show what it says."""
    from traces.files import save_trace
    from traces.summary import summarize

    from .tables import trace_tables

    out.write(output, ".json", lambda path: save_trace(trace, path))
    summary = summarize(trace)
    out.result(summary, *trace_tables(summary))


@commands.command(epilog="Example: harmony layers gpt2-100b")
def layers(model: Model, sequence: SampleTokens = None, as_json: Json = False) -> None:
    """How a model is cut into layers. Built-in models and configurations need no memory for their parameters."""
    from dataclasses import asdict

    from executor.commands import layers_of

    from .tables import layer_table

    rows = [asdict(row) for row in layers_of(model, sequence=sequence)]
    Output(as_json).result(rows, layer_table(model, rows))


@commands.command(epilog="Example: harmony calibrate --device emulated -o machine.toml")
def calibrate(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="M.toml", help="Machine file to write.")],
    device: Device = "emulated",
    machine: Annotated[
        str | None,
        typer.Option("--machine", "-m", metavar="M", help="Its GPUs and links; default by --device"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure a machine: the rates of its links, and what a copy costs before its first byte."""
    from executor.commands import measure_machine

    from ..hardware.files import save_machine
    from ..hardware.report import describe, machine_to_dict

    out = Output(as_json, output)
    with out.progress() as progress:
        measured = measure_machine(machine, device=device, progress=progress)
    out.write(output, ".toml", lambda path: save_machine(measured, path))
    out.result(machine_to_dict(measured), describe(measured))


@commands.command(
    epilog="Example: harmony run best.json --model gpt2-demo --machine emulated --steps 3 -o measured.parquet"
)
def run(
    schedule: Annotated[Path, typer.Argument(metavar="S.json", help="The schedule to run.")],
    model: Annotated[str, typer.Option("--model", metavar="MODEL", help="The model it was made for.")],
    machine: MachineName,
    device: Device = "emulated",
    steps: Annotated[
        int,
        typer.Option("--steps", min=1, help="Steps to measure, after one to warm up (if they overlap, and one alone)."),
    ] = 3,
    seed: Annotated[int, typer.Option("--seed", help="Fixes weights, data and chance.")] = 0,
    sequence: SampleTokens = None,
    output: TimelineOutput = None,
    as_json: Json = False,
) -> None:
    """Train for some steps as a schedule says, and measure when everything happened."""
    from executor.commands import run_schedule

    from ..timelines.timeline import save_timeline
    from .tables import loss_table, summary_tables

    out = Output(as_json, output)
    with out.progress() as progress:
        ran = run_schedule(
            schedule, model, machine, device=device, steps=steps, seed=seed, sequence=sequence, progress=progress
        )
    out.write(output, ".csv", lambda path: save_timeline(ran.timeline, path))
    summary = ran.timeline.summary()
    out.result(summary | {"losses": list(ran.losses)}, *summary_tables(summary), loss_table(ran.losses))
