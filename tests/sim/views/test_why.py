"""The critical path as people read it: every piece, and runs of pieces as rows of a table."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sim.engine.simulate import simulate
from sim.errors import TimelineError
from sim.timelines.critical_path import CriticalPath, Piece
from sim.timelines.timeline import Timeline
from sim.views.chrome_trace import chrome_trace
from sim.views.why import why, why_table
from tests.sim.handmade import machine, one_gpu_schedule, tiny_trace
from tests.sim.made_timelines import pipeline, timeline


def simulated(steps: int = 1) -> Timeline:
    return simulate(one_gpu_schedule(), tiny_trace(), machine(), steps=steps)


def with_pieces(shown: Timeline, *pieces: Piece) -> Timeline:
    return Timeline(replace(shown.info, critical_path=CriticalPath(pieces)), shown.frame, shown.memory)


def test_a_row_for_each_piece_with_its_task() -> None:
    shown = simulated()
    rows = why(shown)
    path = shown.info.critical_path
    assert path is not None
    assert rows["cause"].tolist() == [piece.cause for piece in path.pieces]
    assert rows["end_ns"].tolist()[-1] == 744
    tasks = shown.frame.set_index("task")
    for row in rows.itertuples():
        assert (row.kind, row.lane) == (tasks["kind"][row.task], tasks["lane"][row.task])


def test_time_without_a_task_has_a_row_too() -> None:
    rows = why(with_pieces(simulated(), Piece(0, 5, "idle", None), Piece(5, 9, "link:gpu0 down", 0)))
    assert rows["task"].isna().tolist() == [True, False]
    assert rows["kind"].isna().tolist() == [True, False]


def test_a_timeline_without_a_critical_path_says_so() -> None:
    with pytest.raises(TimelineError, match="does not say what decided its step"):
        why(timeline(pipeline()))


def test_what_follows_in_a_lane_for_one_cause_is_one_row() -> None:
    """Tasks 0 and 1 are copies in, 2 the first forward, 5 the second one."""
    shown = with_pieces(
        simulated(),
        Piece(0, 100, "link:gpu0 down", 0),
        Piece(100, 110, "link:gpu0 down", 1),
        Piece(110, 500, "compute", 2),
        Piece(500, 501, "idle", None),
        Piece(501, 700, "recompute", 5),
        Piece(700, 1000, "compute", 5),
    )
    table = why_table(shown)
    assert table.title == "What decided the step of 1.0 µs; 1 short rows, 0.0 µs, are left out"
    assert [row[:3] + row[-1:] for row in table.rows] == [
        ("link:gpu0 down", "GPU 0 swap in", "swap_in weight 0 … swap_in data 0 m0 (2 tasks)", "11.0%"),
        ("compute", "GPU 0 compute", "forward 0 m0", "39.0%"),
        ("compute, recompute", "GPU 0 compute", "forward 0 m1", "49.9%"),
    ]


def test_the_chrome_trace_has_a_track_of_it_where_its_step_is() -> None:
    shown = simulated(steps=2)
    path = shown.info.critical_path
    assert path is not None
    later = Timeline(replace(shown.info, critical_path=replace(path, step=1)), shown.frame, shown.memory)
    events = chrome_trace({"a": later, "b": shown})["traceEvents"]
    on_path = [event for event in events if event.get("cat") == "critical path"]
    by_process = {event["pid"]: [e for e in on_path if e["pid"] == event["pid"]] for event in on_path}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert [names[process] for process in by_process] == ["a: critical path", "b: critical path"]
    for found, begin in zip(by_process.values(), (744, 0), strict=True):
        assert [event["name"] for event in found] == [piece.cause for piece in path.pieces]
        assert round(found[0]["ts"] * 1000) == begin
        assert round((found[-1]["ts"] + found[-1]["dur"]) * 1000) == begin + 744
    assert len(set(names)) == len(names) == len(set(names.values()))
