"""Pictures of several plots, and their files. They are drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from traces.files import write_atomically

from ..errors import TimelineError
from ..timelines.spans import spans
from ..timelines.timeline import Timeline
from .plots import plot_lanes, plot_memory, plot_swap_bytes

_SUFFIXES = (".png", ".svg", ".pdf")


def lanes_picture(timelines: Mapping[str, Timeline]) -> Figure:
    """Lanes over time, one timeline below the other, on one scale of time so that lengths can be compared."""
    lanes = [len({(span.gpu, span.lane) for span in spans(timeline)}) for timeline in timelines.values()]
    figure, axes = _column([1.2 + 0.3 * count for count in lanes])
    for ax, (label, timeline) in zip(axes, timelines.items(), strict=True):
        plot_lanes(timeline, ax)
        ax.set_title(f"{label}: {ax.get_title(loc='left')}", loc="left")
    longest = max(timeline.step_time_ns for timeline in timelines.values())
    for ax, timeline in zip(axes, timelines.values(), strict=True):
        ax.set_xlim(0, ax.get_xlim()[1] * longest / timeline.step_time_ns)
    return figure


def swap_picture(timelines: Mapping[str, Timeline]) -> Figure:
    """Swapped bytes, a pair of bars for each timeline."""
    figure = _figure(width=3.5 + 1.6 * len(timelines), height=4.5)
    plot_swap_bytes(timelines, figure.add_subplot())
    return figure


def memory_picture(timelines: Mapping[str, Timeline]) -> Figure:
    """Memory over time: a plot for each GPU, and one for the host, of each timeline."""
    plots = [(label, gpu) for label, t in timelines.items() for gpu in (*range(t.info.plan.gpus), None)]
    figure, axes = _column([2.5] * len(plots))
    for ax, (label, gpu) in zip(axes, plots, strict=True):
        plot_memory(timelines[label], gpu, ax)
        ax.set_title(f"{label}: {ax.get_title(loc='left')}", loc="left")
    return figure


def save_picture(figure: Figure, path: str | Path) -> None:
    """Write a figure in the format that its name says. Raises TimelineError for another, FileError if it cannot."""
    data = io.BytesIO()
    figure.savefig(data, format=picture_suffix(path).removeprefix("."), dpi=150)
    write_atomically(path, data.getvalue())


def picture_suffix(path: str | Path) -> str:
    """How the name of a picture ends, which says its format. Raises TimelineError for another name."""
    suffix = Path(path).suffix
    if suffix not in _SUFFIXES:
        raise TimelineError(f"{path}: a picture's name ends in {', '.join(_SUFFIXES)}")
    return suffix


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _column(heights: list[float]) -> tuple[Figure, list[Axes]]:
    figure = _figure(width=12, height=sum(heights))
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    return figure, [figure.add_subplot(grid[place]) for place in range(len(heights))]
