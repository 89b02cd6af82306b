"""Commands about traces: import, show, diff, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .options import Json, TraceName
from .output import Output

commands = typer.Typer()
trace_commands = typer.Typer(help="Look into traces.", no_args_is_help=True)
commands.add_typer(trace_commands, name="trace")


@commands.command("import", epilog="Example: harmony import gtx1080ti/gpt2_xl -o gpt2-xl.json")
def import_(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A folder of tables, or a file of PyTorch's profiler.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="T.json", help="Trace to write.")],
    model: Annotated[str | None, typer.Option("--model", help="The model's name; default as the source says")] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="What it was measured on; default as the source says")
    ] = None,
    label_bytes: Annotated[
        int | None, typer.Option("--label-bytes", min=0, help="Labels of one sample; default as the source says, or 0")
    ] = None,
    as_json: Json = False,
) -> None:
    """Make a trace of what others measured."""
    from traces.files import save_trace
    from traces.importing import import_trace
    from traces.summary import summarize

    from .tables import trace_tables

    out = Output(as_json, output)
    imported = import_trace(source, model=model, device=device, label_bytes_per_sample=label_bytes)
    out.write(output, ".json", lambda path: save_trace(imported.trace, path))
    for note in imported.notes:
        out.say(f"note: {note}")
    summary = summarize(imported.trace)
    out.result(summary | {"notes": list(imported.notes)}, *trace_tables(summary))


@trace_commands.command("show", epilog="Example: harmony trace show gpt2-xl@gtx-1080-ti")
def trace_show(
    trace: Annotated[
        str | None, typer.Argument(metavar="[TRACE]", help="A trace file, or the name of a shipped trace.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the shipped traces, or show what one says: what the model weighs, and how long its passes take."""
    from traces.files import load_trace, shipped_traces
    from traces.summary import outline, summarize

    from .tables import shipped_table, trace_tables

    out = Output(as_json)
    if trace is None:
        outlines = {name: outline(load_trace(name)) for name in shipped_traces()}
        out.result([{"name": name, **each} for name, each in outlines.items()], shipped_table(outlines))
    else:
        summary = summarize(load_trace(trace))
        out.result(summary, *trace_tables(summary))


@trace_commands.command("diff", epilog="Example: harmony trace diff before.json after.json")
def trace_diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A trace file, or the name of a shipped trace.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """What differs between two traces: in which column, in how many rows, and where most."""
    from dataclasses import asdict

    from traces.diff import diff
    from traces.files import load_trace

    from .tables import difference_table

    found = diff(load_trace(first), load_trace(second))
    Output(as_json).result([asdict(each) for each in found], difference_table(found) if found else "no difference")


@trace_commands.command("export", epilog="Example: harmony trace export gpt2-xl@gtx-1080-ti -o gpt2-xl")
def trace_export(
    trace: TraceName,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="New folder for the tables.")],
    kind: Annotated[Literal["csv", "parquet"], typer.Option("--format", help="Of the tables.")] = "csv",
    as_json: Json = False,
) -> None:
    """Write a trace as tables, which harmony import reads."""
    from traces.files import load_trace
    from traces.importing.trace_tables import write_trace

    out = Output(as_json)
    write_trace(load_trace(trace), output, kind)
    out.say(f"wrote {output}")
    out.result({"output": str(output), "files": sorted(path.name for path in output.iterdir())})
