"""Timeline files: equal after a round trip, and a clear error for everything else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from sim.engine.simulate import simulate
from sim.errors import TimelineError
from sim.schedule import TaskKind
from sim.timelines.table import TASK_COLUMNS
from sim.timelines.timeline import Timeline, load_timeline, save_timeline
from tests.sim.handmade import Hand, machine, one_gpu_schedule, tiny_trace
from traces.errors import FileError


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    made = simulate(one_gpu_schedule(), tiny_trace(), machine(), steps=2)
    notes = {"overruns": 3, "threads": [1, 2], "links": {"root": 0.5}}
    return Timeline(replace(made.info, warmup_steps=1, notes=notes), made.frame, made.memory)


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_round_trip(timeline: Timeline, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"timeline{suffix}"
    save_timeline(timeline, path)
    loaded = load_timeline(path)
    assert loaded == timeline
    assert loaded.frame.dtypes.astype(str).to_dict() == dict(TASK_COLUMNS)
    assert loaded.summary() == timeline.summary()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_other_tools_can_read_both(timeline: Timeline, tmp_path: Path) -> None:
    save_timeline(timeline, tmp_path / "t.csv")
    save_timeline(timeline, tmp_path / "t.parquet")
    csv = pd.read_csv(tmp_path / "t.csv", comment="#")
    parquet = pd.read_parquet(tmp_path / "t.parquet")
    assert list(csv.columns) == list(parquet.columns) == list(TASK_COLUMNS)
    assert csv["end_ns"].tolist() == parquet["end_ns"].tolist() == timeline.frame["end_ns"].tolist()
    header = json.loads(
        (tmp_path / "t.csv").read_text(encoding="utf-8").splitlines()[0].removeprefix("# harmony-timeline ")
    )
    assert (header["format"], header["version"]) == ("harmony-timeline", 2)
    assert json.loads(pq.read_schema(tmp_path / "t.parquet").metadata[b"harmony-timeline"]) == header


def test_a_name_must_say_the_kind_of_file(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(TimelineError, match=r"t\.txt: a timeline's name ends in \.parquet or \.csv"):
        save_timeline(timeline, tmp_path / "t.txt")
    with pytest.raises(TimelineError, match=r"ends in \.parquet or \.csv"):
        load_timeline(tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there(timeline: Timeline, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="make that folder first"):
        save_timeline(timeline, tmp_path / "none" / "t.csv")


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_no_file_empty_file_folder_and_noise(tmp_path: Path, suffix: str) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(TimelineError) as caught:
            load_timeline(tmp_path / f"{name}{suffix}")
        return str(caught.value)

    (tmp_path / f"empty{suffix}").write_bytes(b"")
    (tmp_path / f"folder{suffix}").mkdir()
    (tmp_path / f"noise{suffix}").write_bytes(b"PAR1 \xff\xfe\x00 nothing of the kind\n1,2\n")
    assert refusal("none").endswith(f"none{suffix}: no such file")
    assert "is empty" in refusal("empty")
    assert "cannot be read" in refusal("folder")
    assert re.search("is no timeline|is not a Parquet file", refusal("noise"))


def test_parquet_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    pd.DataFrame({"a": [1]}).to_parquet(path)
    with pytest.raises(TimelineError, match="is a Parquet file, but no timeline"):
        load_timeline(path)


def edited(timeline: Timeline, path: Path, edit: Callable[[str], str]) -> str:
    """What loading says of a CSV file whose text was changed."""
    save_timeline(timeline, path)
    text = path.read_text(encoding="utf-8")
    changed = edit(text)
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    with pytest.raises(TimelineError) as caught:
        load_timeline(path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"version":2', '"version":1', "is harmony-timeline version 1; this Harmony reads harmony-timeline version 2"),
        ('"format":"harmony-timeline"', '"format":"chess"', "is chess version 2"),
        ('"format":', '"fromat":', "the header is wrong: Object missing required field `format`"),
        ('"source":"simulated"', '"source":"dreamt"', "the header's info is wrong: Invalid enum value 'dreamt'"),
        ('"layers":2', '"layers":2,"colour":3', "the header's info is wrong: Object contains unknown field `colour`"),
        ('"warmup_steps":1', '"warmup_steps":2', "leave none to measure"),
        ('"delta_bytes":[', '"delta_bytes":[1,', "the memory table's columns have different lengths"),
        ("step,task,", "step,", "task table lacks task; its columns are step, task, kind"),
        ("step,task,", "task,step,", "task table has its columns in the order task, step"),
        ("\n0,0,swap_in", "\n0,x,swap_in", "column task must hold whole numbers"),
        ("\n0,0,swap_in", "\n0,,swap_in", "column task must hold whole numbers"),
        ("\n0,0,swap_in", "\n0,0.5,swap_in", "column task must hold whole numbers"),
        ("\n0,0,swap_in", "\n0,0,swop_in", "column kind: holds 'swop_in'"),
        ("\n1,", "\n7,", "has steps [0, 7], but its header says 2"),
        ("\n0,0,swap_in,0,", "\n0,0,swap_in,0,0,", "the task table is no CSV"),
    ],
)
def test_damaged_csv(timeline: Timeline, tmp_path: Path, old: str, new: str, said: str) -> None:
    message = edited(timeline, tmp_path / "t.csv", lambda text: text.replace(old, new))
    assert said in message
    assert str(tmp_path / "t.csv") in message


def test_csv_without_a_table(timeline: Timeline, tmp_path: Path) -> None:
    message = edited(timeline, tmp_path / "t.csv", lambda text: text.splitlines()[0] + "\n")
    assert "the task table is no CSV" in message


def test_damaged_parquet(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    save_timeline(timeline, path)
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["peer"]), path)
    with pytest.raises(TimelineError, match="lacks peer"):
        load_timeline(path)
    start = table.schema.get_field_index("start_ns")
    pq.write_table(table.set_column(start, "start_ns", [[0.5] * table.num_rows]), path)
    with pytest.raises(TimelineError, match="column start_ns must hold whole numbers"):
        load_timeline(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TimelineError, match="is not a Parquet file"):
        load_timeline(path)


def test_a_timeline_without_memory_changes(tmp_path: Path) -> None:
    hand = Hand()
    hand.task(TaskKind.FORWARD, samples=(0, 1))
    made = simulate(hand.schedule(gpu_peak=0, host_peak=0), tiny_trace(), machine())
    for name in ("t.csv", "t.parquet"):
        save_timeline(made, tmp_path / name)
        assert load_timeline(tmp_path / name) == made
