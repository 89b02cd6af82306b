"""Pictures show what the timeline holds: every bar and level is checked against the tables."""

from __future__ import annotations

from collections.abc import Iterator

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb

from sim.schedule import TaskKind, TensorKind
from sim.timelines.spans import held_bytes, spans
from sim.units import format_bytes
from sim.views.colours import TASK_COLOURS, TENSOR_COLOURS
from sim.views.plots import plot_lanes, plot_memory, plot_swap_bytes
from tests.sim.made_timelines import MILLISECOND, data_parallel, durations, overlapping, pipeline, swapping, timeline

MIB = 2**20


@pytest.fixture(autouse=True)
def _figures() -> Iterator[None]:
    mpl.use("Agg")
    yield
    plt.close("all")


def legend(ax: Axes) -> dict[str, str]:
    found = ax.get_legend()
    assert found is not None
    handles = found.legend_handles
    texts = [text.get_text() for text in found.get_texts()]
    return {text: to_hex(h.get_facecolor()).upper() for text, h in zip(texts, handles, strict=True)}  # type: ignore[union-attr]


def test_every_kind_has_a_colour_of_its_own() -> None:
    for colours, kinds in ((TASK_COLOURS, TaskKind), (TENSOR_COLOURS, TensorKind)):
        assert set(colours) == set(kinds)
        assert len({to_rgb(colour) for colour in colours.values()}) == len(kinds)


def test_lanes_hold_a_bar_for_every_task() -> None:
    shown = timeline(pipeline())
    ax = plot_lanes(shown)
    drawn = []
    for bars in ax.collections:
        for path in bars.get_paths():
            box = path.get_extents()
            drawn.append((round(box.x0, 6), round(box.x1, 6), round((box.y0 + box.y1) / 2)))
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows[-1] == "GPU 0 compute"
    assert rows[0] == "host update"
    expected = [(span.start_ns / MILLISECOND, span.end_ns / MILLISECOND) for span in spans(shown)]
    assert sorted((start, end) for start, end, _ in drawn) == sorted(expected)
    assert {rows[place] for _, _, place in drawn} == set(rows)
    assert set(legend(ax)) == {"forward", "backward", "update", "swap in", "swap out", "p2p"}
    assert legend(ax)["backward"] == TASK_COLOURS[TaskKind.BACKWARD].upper()
    assert ax.get_xlabel() == "time since the step began (ms)"


def test_the_median_step_is_drawn_from_its_own_beginning() -> None:
    schedule = data_parallel()
    usual = durations(schedule)
    shown = timeline(
        schedule, [9 * d for d in usual], usual, [2 * d for d in usual], [3 * d for d in usual], warmup_steps=1
    )
    ax = plot_lanes(shown)
    assert ax.get_xlim() == (0, shown.step_times_ns[2] / MILLISECOND)
    assert min(path.get_extents().x0 for bars in ax.collections for path in bars.get_paths()) == 0


def test_swap_bars_add_up() -> None:
    timelines = {"dp": timeline(data_parallel()), "swap": timeline(swapping())}
    ax = plot_swap_bytes(timelines)
    for place, shown in enumerate(timelines.values()):
        summary = shown.summary()
        for side, key in ((-0.21, "swap_in_bytes"), (0.21, "swap_out_bytes")):
            bars = [p for p in ax.patches if p.get_x() + p.get_width() / 2 == pytest.approx(place + side)]  # type: ignore[attr-defined]
            heights = {to_hex(p.get_facecolor()): p.get_height() * MIB for p in bars}  # type: ignore[attr-defined]
            wanted = {TENSOR_COLOURS[TensorKind(k)].lower(): size for k, size in summary[key].items() if size}
            assert heights == pytest.approx(wanted)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["dp", "swap"]
    assert "MiB" in ax.get_ylabel()
    assert legend(ax)["optimizer state"] == TENSOR_COLOURS[TensorKind.OPTIMIZER_STATE].upper()


@pytest.mark.parametrize("gpu", [0, 1, None])
def test_memory_is_stacked_to_what_is_held(gpu: int | None) -> None:
    shown = timeline(data_parallel())
    ax = plot_memory(shown, gpu)
    held = held_bytes(shown, gpu)
    top = max(path.get_extents().y1 for area in ax.collections for path in area.get_paths())
    assert top * MIB == pytest.approx(held.sum(axis=1).max())
    assert set(legend(ax)) == {kind.replace("_", " ") for kind in held.columns}
    assert ax.get_ylabel() == f"held by {'host' if gpu is None else f'GPU {gpu}'} (MiB)"


def test_the_cap_is_drawn_where_it_is_near() -> None:
    near, far = plot_memory(timeline(swapping())), plot_memory(timeline(data_parallel()))
    assert [text.get_text() for text in near.texts[:-1]] == ["planned peak", "cap"]
    assert [text.get_text() for text in far.texts[:-1]] == ["planned peak"]
    assert "of 38.15 MiB" in near.get_title(loc="left")


@pytest.mark.parametrize("gpu", [1, None])
def test_the_moment_of_most_is_marked_with_what_is_held_then(gpu: int | None) -> None:
    shown = timeline(data_parallel())
    ax = plot_memory(shown, gpu)
    held = held_bytes(shown, gpu)
    most = held.sum(axis=1)
    (mark,) = [line for line in ax.lines if line.get_marker() == "v"]
    assert (mark.get_xdata()[0] * MILLISECOND, mark.get_ydata()[0] * MIB) == pytest.approx((most.idxmax(), most.max()))
    largest = held.loc[most.idxmax()].idxmax()
    assert ax.texts[-1].get_text().startswith(f"most held {format_bytes(most.max())}: {largest.replace('_', ' ')} ")


def test_axes_that_are_handed_in_are_drawn_into() -> None:
    _, places = plt.subplots(3)
    shown = timeline(pipeline())
    assert plot_lanes(shown, ax=places[0]) is places[0]
    assert plot_swap_bytes({"a": shown}, ax=places[1]) is places[1]
    assert plot_memory(shown, ax=places[2]) is places[2]
    assert len(plt.get_fignums()) == 1


def test_of_steps_that_overlap_the_one_alone_is_drawn() -> None:
    shown, alone = overlapping(pipeline()), timeline(pipeline())
    for plot in (plot_lanes, plot_memory):
        drawn, expected = plot(shown), plot(alone)
        assert drawn.get_xlim() == expected.get_xlim()
        paths = [[path.vertices.tolist() for path in bars.get_paths()] for bars in drawn.collections]
        assert paths == [[path.vertices.tolist() for path in bars.get_paths()] for bars in expected.collections]
