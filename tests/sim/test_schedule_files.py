"""Schedule files: one task a line, equal after a round trip, and a clear error for everything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sim.builders import build
from sim.errors import ScheduleError
from sim.schedule_files import decode_schedule, encode_schedule, load_schedule, save_schedule
from tests.random_plans import random_case
from tests.sim.handmade import one_gpu_schedule
from traces.errors import FileError


@pytest.mark.parametrize("seed", range(6))
def test_round_trip(seed: int, tmp_path: Path) -> None:
    case = random_case(seed)
    schedule = build(case.plan, case.trace, case.machine)
    save_schedule(schedule, tmp_path / "s.json")
    assert load_schedule(tmp_path / "s.json") == schedule
    assert [entry.name for entry in tmp_path.iterdir()] == ["s.json"]


def test_a_buffer_and_a_task_a_line() -> None:
    schedule = one_gpu_schedule()
    lines = encode_schedule(schedule).decode().splitlines()
    assert lines[:3] == ["{", '"format": "harmony-schedule",', '"version": 2,']
    assert '{"id":0,"gpu":0,"kind":"weight","layer_first":0,"layer_last":0,"bytes":100,"offset":0},' in lines
    assert (
        '{"id":17,"kind":"update","gpu":null,"lane":"update","layer_first":1,"layer_last":1,"waits_for":[16]},' in lines
    )
    tasks = lines[lines.index('"tasks": [') + 1 : -2]
    assert [json.loads(line.rstrip(","))["id"] for line in tasks] == list(range(len(schedule.tasks)))


def test_no_file_and_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"none\.json: no such file"):
        load_schedule(tmp_path / "none.json")
    with pytest.raises(ScheduleError, match="cannot be read"):
        load_schedule(tmp_path)
    with pytest.raises(FileError):
        save_schedule(one_gpu_schedule(), tmp_path / "none" / "s.json")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"version": 2', '"version": 1', "s.json: is harmony-schedule version 1; this Harmony reads"),
        ('"format": "harmony-schedule"', '"format": "harmony-trace"', "is harmony-trace version 2"),
        ('"layers": 2', '"layers": "two"', "s.json: Expected `int`, got `str` - at `$.layers`"),
        ('"layers": 2', '"layers": 2, "colour": 1', "unknown field `colour`"),
        ('"kind":"forward"', '"kind":"foreword"', "Invalid enum value 'foreword' - at `$.tasks[2].kind`"),
        ('"lane":"swap_in"', '"lain":"swap_in"', "unknown field `lain` - at `$.tasks[0]`"),
        ('"waits_for":[16]', '"waits_for":[-0.5]', "Expected `int`, got `float` - at `$.tasks[17].waits_for[0]`"),
        ('"offset":0}', '"offset":0,"colour":1}', "unknown field `colour` - at `$.buffers[0]`"),
        ('"u_fwd":1', '"u_fwd":0', "Expected `int` >= 1 - at `$.plan.u_fwd`"),
        ('"minibatch":2,"gpus":1', '"minibatch":2,"gpus":3', "2 samples are fewer than 3 GPUs"),
        ('"family":"harmony"', '"family":"chess"', "Invalid value 'chess' - at `$.plan.family`"),
        ("\n]\n}\n", "\n]\n", "Input data was truncated"),
        ("tiny", "\udcff", "s.json: "),
    ],
)
def test_damaged_files(old: str, new: str, said: str) -> None:
    text = encode_schedule(one_gpu_schedule()).decode()
    assert old in text
    with pytest.raises(ScheduleError) as caught:
        decode_schedule(text.replace(old, new).encode(errors="surrogateescape"), "s.json")
    assert said in str(caught.value)
