"""Three pictures of timelines: lanes over time, bytes swapped by tensor kind, memory over time.

Each function draws into ``ax`` (a new figure's if None) and returns it; none shows or saves anything. Of a timeline of
several steps the one drawn is the step whose length is the median, warm-up excluded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ..schedule import TaskKind, TensorKind
from ..tables import device_name
from ..timelines.spans import held_bytes, lane_name, median_step, spans
from ..timelines.timeline import Timeline
from ..units import format_bytes
from .colours import TASK_COLOURS, TENSOR_COLOURS

_SHORT = 0.004
"""Share of the step below which a bar is too short for a visible edge."""

_HEADROOM = 1.15
"""Height of the axes over what they hold, to leave room for writing."""

_DIRECTIONS = {"swap_in_bytes": "in", "swap_out_bytes": "out"}


def plot_lanes(timeline: Timeline, ax: Axes | None = None) -> Axes:
    """A row per lane, a bar per task coloured by its kind; a P2P copy is in the sender's lane and in the receiver's."""
    step = median_step(timeline)
    shown = [span for span in spans(timeline) if span.row["step"] == step]
    begin = min(span.start_ns for span in shown)
    length = max(span.end_ns for span in shown) - begin
    lanes = sorted({(span.lane_order, span.gpu, span.lane) for span in shown}, reverse=True)
    places = {(gpu, lane): place for place, (_, gpu, lane) in enumerate(lanes)}
    ax = ax or _new_axes(width=12, height=1.2 + 0.3 * len(lanes))
    scale, unit = _time_unit(length)

    bars: dict[tuple[TaskKind, int], list[tuple[float, float]]] = {}
    for span in shown:
        bar = ((span.start_ns - begin) / scale, (span.end_ns - span.start_ns) / scale)
        bars.setdefault((span.kind, places[span.gpu, span.lane]), []).append(bar)
    for (kind, place), pieces in bars.items():
        colour = TASK_COLOURS[kind]
        # White edges tell neighbours apart; bars too short for them get their own colour, so that they are seen at all.
        edges = ["white" if width > _SHORT * length / scale else colour for _, width in pieces]
        ax.broken_barh(pieces, (place - 0.4, 0.8), facecolors=colour, edgecolors=edges, linewidths=0.3)

    ax.set_yticks(range(len(lanes)), [lane_name(gpu, lane) for _, gpu, lane in lanes])
    ax.set_ylim(-0.6, len(lanes) - 0.4)
    ax.set_xlim(0, length / scale)
    ax.set_xlabel(f"time since the step began ({unit})")
    ax.set_title(_title(timeline), loc="left")
    used = {span.kind for span in shown}
    _legend(ax, {kind.value: TASK_COLOURS[kind] for kind in TaskKind if kind in used})
    return ax


def plot_swap_bytes(timelines: Mapping[str, Timeline], ax: Axes | None = None) -> Axes:
    """Bytes copied between host and GPUs in a step: for each label one bar in and one out, stacked by tensor kind."""
    ax = ax or _new_axes(width=2.5 + 1.6 * len(timelines), height=4.5)
    summaries = {label: timeline.summary() for label, timeline in timelines.items()}
    largest = max(sum(summary[key].values()) for summary in summaries.values() for key in _DIRECTIONS)
    scale, unit = _memory_unit(largest)
    used: set[TensorKind] = set()
    for group, summary in enumerate(summaries.values()):
        for side, (key, direction) in zip((-0.21, 0.21), _DIRECTIONS.items(), strict=True):
            bottom = 0.0
            for kind in TensorKind:
                height = summary[key].get(kind.value, 0) / scale
                if height:
                    ax.bar(group + side, height, 0.38, bottom, color=TENSOR_COLOURS[kind], edgecolor="white", lw=0.5)
                    used.add(kind)
                    bottom += height
            ax.annotate(f"{direction}\n{bottom:.3g}", (group + side, bottom), ha="center", va="bottom")
    ax.set_xticks(range(len(summaries)), list(summaries))
    ax.set_ylim(0, _HEADROOM * largest / scale or 1)
    ax.set_ylabel(f"swapped in a step, all GPUs ({unit})")
    _legend(ax, {kind.value: TENSOR_COLOURS[kind] for kind in TensorKind if kind in used})
    return ax


def plot_memory(timeline: Timeline, gpu: int | None = 0, ax: Axes | None = None) -> Axes:
    """What one GPU holds over time, stacked by tensor kind, with its planned peak and its cap. ``gpu`` None: the
    buffers that come and go in host memory."""
    ax = ax or _new_axes(width=12, height=3.5)
    step = median_step(timeline)
    rows = timeline.frame[timeline.frame["step"] == step]
    begin, end = int(rows["start_ns"].min()), int(rows["end_ns"].max())
    held = held_bytes(timeline, gpu, step)
    time_scale, time_unit = _time_unit(end - begin)
    highest = float(held.sum(axis=1).max()) if len(held) else 0.0
    scale, unit = _memory_unit(highest)

    kinds = [TensorKind(name) for name in held.columns]
    if kinds:
        times = [*((held.index - begin) / time_scale), (end - begin) / time_scale]
        levels = [[*(held[kind.value] / scale), held[kind.value].iloc[-1] / scale] for kind in kinds]
        ax.stackplot(times, levels, colors=[TENSOR_COLOURS[kind] for kind in kinds], step="post", linewidth=0)
    ax.set_xlim(0, (end - begin) / time_scale)
    ax.set_xlabel(f"time since the step began ({time_unit})")
    ax.set_ylabel(f"held by {device_name(gpu)} ({unit})")
    title = _title(timeline)
    if gpu is not None:
        peak, cap = timeline.info.gpu_planned_peak_bytes[gpu], timeline.info.gpu_cap_bytes[gpu]
        _limit(ax, peak / scale, "planned peak", "--", 0.005, "left")
        highest = max(highest, peak)
        if cap <= 1.5 * peak:  # farther away it would leave no room for the rest
            _limit(ax, cap / scale, "cap", "-", 0.995, "right")
            highest = max(highest, cap)
        title += f"; planned peak {format_bytes(peak)} of {format_bytes(cap)}"
    ax.set_ylim(0, _HEADROOM * highest / scale or 1)
    if kinds:
        _mark_most(ax, held, begin, time_scale, scale)
    ax.set_title(title, loc="left")
    _legend(ax, {kind.value: TENSOR_COLOURS[kind] for kind in kinds})
    return ax


def _mark_most(ax: Axes, held: pd.DataFrame, begin: int, time_scale: int, scale: int) -> None:
    """A mark where most is held, with what that is, largest first."""
    row = int(held.sum(axis=1).to_numpy().argmax())
    sizes = sorted(((float(held[name].iloc[row]), str(name)) for name in held.columns), reverse=True)
    most = sum(size for size, _ in sizes)
    named = [f"{name.replace('_', ' ')} {format_bytes(size)}" for size, name in sizes if size >= 0.1 * most]
    place = ((int(held.index[row]) - begin) / time_scale, most / scale)
    ax.plot(*place, marker="v", color="black", markersize=5, clip_on=False)
    side = "left" if place[0] < ax.get_xlim()[1] / 2 else "right"
    text = f"most held {format_bytes(most)}: {', '.join(named)}"
    box = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1}
    ax.annotate(text, place, (0, -6), textcoords="offset points", ha=side, va="top", fontsize="small", bbox=box)


def _limit(ax: Axes, level: float, name: str, style: str, place: float, side: Literal["left", "right"]) -> None:
    """A level across the axes, with its name at one end."""
    ax.axhline(level, color="black", linestyle=style, linewidth=1)
    ax.annotate(name, (place, level), xycoords=("axes fraction", "data"), ha=side, va="bottom")


def _new_axes(width: float, height: float) -> Axes:
    """Axes of a new figure that makes room for what is written beside them."""
    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return ax


def _time_unit(length_ns: float) -> tuple[int, str]:
    return (10**9, "s") if length_ns >= 10**9 else (10**6, "ms")


def _memory_unit(size: float) -> tuple[int, str]:
    return (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")


def _title(timeline: Timeline) -> str:
    info = timeline.info
    return f"{info.model} on {info.machine}, {info.plan.policy.value}, {info.source}"


def _legend(ax: Axes, colours: Mapping[str, str]) -> None:
    """A legend to the right of the axes: it never hides data."""
    handles = [Patch(color=colour, label=name.replace("_", " ")) for name, colour in colours.items()]
    ax.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
