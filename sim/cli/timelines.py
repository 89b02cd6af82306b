"""Commands that look at what happened: why, compare, export, plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .options import ChromeTrace, Json, Picture, TimelineFile, TimelineFiles
from .output import Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.figure import Figure

    from ..timelines.timeline import Timeline

commands = typer.Typer()
plot_commands = typer.Typer(help="Draw timelines.", no_args_is_help=True)
commands.add_typer(plot_commands, name="plot")


@commands.command(epilog="Example: harmony why predicted.parquet")
def why(timeline: TimelineFile, as_json: Json = False) -> None:
    """Which tasks decided how long the step is, one after the other, and what the time went to."""
    from ..timelines.timeline import load_timeline
    from ..views.why import why as pieces
    from ..views.why import why_table

    loaded = load_timeline(timeline)
    rows = pieces(loaded)
    shares = loaded.summary()["critical_path"]
    found = rows.astype(object).where(rows.notna(), None).to_dict("records")
    Output(as_json).result({"critical_path": shares, "pieces": found}, why_table(loaded))


@commands.command(epilog="Example: harmony compare predicted.parquet measured.parquet")
def compare(predicted: TimelineFile, measured: TimelineFile, as_json: Json = False) -> None:
    """Predicted beside measured: step, lanes, bytes, and where the difference comes from."""
    from ..timelines.compare import compare as put_side_by_side
    from ..timelines.timeline import load_timeline

    found = put_side_by_side(load_timeline(predicted), load_timeline(measured))
    Output(as_json).result(found.to_dict(), found)


@commands.command(epilog="Example: harmony export predicted.parquet measured.parquet -o both.json.gz")
def export(
    timelines: TimelineFiles,
    output: ChromeTrace,
    as_json: Json = False,
) -> None:
    """Write timelines as a Chrome trace, to open at https://ui.perfetto.dev."""
    from ..views.chrome_trace import export_chrome

    out = Output(as_json, output)
    loaded = _labelled(timelines)
    out.write(output, ".json", lambda path: export_chrome(loaded, path))
    out.result({"output": str(output), "timelines": list(loaded)})


@plot_commands.command("lanes", epilog="Example: harmony plot lanes predicted.parquet measured.parquet -o lanes.png")
def plot_lanes(timelines: TimelineFiles, output: Picture, as_json: Json = False) -> None:
    """What every lane does over time; several timelines one below the other, on one scale."""
    from ..views.pictures import lanes_picture

    _draw(lanes_picture, timelines, output, as_json)


@plot_commands.command("swap", epilog="Example: harmony plot swap harmony.parquet dp-swap.parquet -o swap.png")
def plot_swap(timelines: TimelineFiles, output: Picture, as_json: Json = False) -> None:
    """Bytes swapped in a step, by tensor kind; a pair of bars for each timeline."""
    from ..views.pictures import swap_picture

    _draw(swap_picture, timelines, output, as_json)


@plot_commands.command("memory", epilog="Example: harmony plot memory predicted.parquet -o memory.png")
def plot_memory(timelines: TimelineFiles, output: Picture, as_json: Json = False) -> None:
    """What every GPU and the host hold over time, by tensor kind."""
    from ..views.pictures import memory_picture

    _draw(memory_picture, timelines, output, as_json)


def _draw(draw: Callable[[dict[str, Timeline]], Figure], timelines: list[Path], output: Path, as_json: bool) -> None:
    from ..views.pictures import save_picture

    out = Output(as_json, output)
    figure = draw(_labelled(timelines))
    out.write(output, ".png", lambda path: save_picture(figure, path))
    out.result({"output": str(output)})


def _labelled(paths: list[Path]) -> dict[str, Timeline]:
    """Timelines under short labels: what they are if that tells them apart, else their files' names."""
    from ..timelines.timeline import load_timeline

    timelines = [load_timeline(path) for path in paths]
    sources = ["predicted" if timeline.info.source == "simulated" else "measured" for timeline in timelines]
    for labels in (sources, [path.stem for path in paths]):
        if len(set(labels)) == len(paths):
            return dict(zip(labels, timelines, strict=True))
    return {str(path): timeline for path, timeline in zip(paths, timelines, strict=True)}
