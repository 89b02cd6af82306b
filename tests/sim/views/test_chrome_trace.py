"""A Chrome trace is read back and must say what the timeline says, in a way that viewers draw."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sim.errors import TimelineError
from sim.schedule import Schedule, TaskKind
from sim.timelines.spans import held_bytes
from sim.views.chrome_trace import chrome_trace, export_chrome
from tests.sim.made_timelines import data_parallel, durations, pipeline, swapping, timeline

SCHEDULES = [pipeline, data_parallel, swapping]


def of_phase(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def tracks(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    found = defaultdict(list)
    for event in of_phase(trace, "X"):
        found[event["pid"], event["tid"]].append(event)
    return found


def names(trace: dict[str, Any], what: str) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in of_phase(trace, "M") if e["name"] == what}


def nanoseconds(event: dict[str, Any]) -> tuple[int, int]:
    """As a viewer reads it: rounded to nanoseconds."""
    start = round(event["ts"] * 1000)
    return start, start + round(event["dur"] * 1000)


@pytest.mark.parametrize("schedule", [make() for make in SCHEDULES], ids=[make.__name__ for make in SCHEDULES])
def test_events_on_a_track_are_disjoint(schedule: Schedule) -> None:
    odd = [3 * d // 7 for d in durations(schedule)]
    trace = chrome_trace({"predicted": timeline(schedule), "measured": timeline(schedule, odd, odd)})
    for events in tracks(trace).values():
        for before, after in pairwise(sorted(map(nanoseconds, events))):
            assert before[1] <= after[0]


def test_every_task_of_every_step_is_there_with_its_times() -> None:
    schedule = data_parallel()
    shown = timeline(schedule, durations(schedule), durations(schedule))
    found = {(e["args"]["step"], e["args"]["task"]): nanoseconds(e) for e in of_phase(chrome_trace({"a": shown}), "X")}
    rows = zip(*(shown.frame[c] for c in ("step", "task", "start_ns", "end_ns")), strict=True)
    assert found == {(step, task): (start, end) for step, task, start, end in rows}


def test_a_p2p_copy_is_in_both_lanes() -> None:
    schedule = pipeline()
    trace = chrome_trace({"predicted": timeline(schedule)})
    processes, threads = names(trace, "process_name"), names(trace, "thread_name")
    copy = next(schedule.copies(TaskKind.P2P))
    seen = {
        (processes[event["pid"], 0], threads[event["pid"], event["tid"]])
        for event in of_phase(trace, "X")
        if event["args"]["task"] == copy.id
    }
    assert seen == {(f"predicted: GPU {copy.gpu}", "p2p_out"), (f"predicted: GPU {copy.peer}", "p2p_in")}


def test_each_timeline_has_processes_of_its_own_named_for_what_they_are() -> None:
    schedule = pipeline()
    trace = chrome_trace({"predicted": timeline(schedule), "measured": timeline(schedule)})
    processes = names(trace, "process_name")
    assert sorted(processes.values()) == sorted(
        f"{label}: {device}" for label in ("predicted", "measured") for device in ("GPU 0", "GPU 1", "host")
    )
    assert len({pid for pid, _ in processes}) == 6
    unnamed = {track for track in tracks(trace) if track not in names(trace, "thread_name")}
    assert not unnamed


def test_counters_follow_the_memory_table() -> None:
    shown = timeline(pipeline())
    trace = chrome_trace({"predicted": shown})
    process = next(pid for (pid, _), name in names(trace, "process_name").items() if name == "predicted: GPU 1")
    counted = [(round(e["ts"] * 1000), e["args"]) for e in of_phase(trace, "C") if e["pid"] == process]
    held = held_bytes(shown, 1)
    assert counted == [(time, row) for time, row in zip(held.index, held.to_dict("records"), strict=True)]
    assert counted[-1][1] == dict.fromkeys(held.columns, 0)
    assert max(sum(row.values()) for _, row in counted) == shown.summary()["observed_peak_memory_bytes"][1]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_files_are_strict_json(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    shown = {"predicted": timeline(swapping())}
    export_chrome(shown, path)
    data = path.read_bytes()
    text = gzip.decompress(data) if name.endswith(".gz") else data

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads(text, parse_constant=refuse)
    assert read["displayTimeUnit"] == "ms"
    assert read["otherData"]["predicted"]["policy"] == "dp-swap"
    assert read == json.loads(json.dumps(chrome_trace(shown)))


def test_a_name_that_no_viewer_opens_is_refused(tmp_path: Path) -> None:
    for name in ("trace.gz", "trace", "trace.json.zip"):
        with pytest.raises(TimelineError, match=r"a Chrome trace's name ends in \.json or \.json\.gz"):
            export_chrome({"made": timeline(pipeline())}, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_same_timeline_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.json.gz", "b.json.gz"):
        export_chrome({"x": timeline(pipeline())}, tmp_path / name)
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()
