from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import nn

from executor.errors import CheckpointError
from executor.training.checkpoint import Position, load, save
from executor.training.series import latest, save_step


def saved(series: Path, step: int, keep: int | None = None) -> Path:
    """A model full of its step."""
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
    return save_step(series, step, lambda folder: save(folder, model, position=Position(step)), keep=keep)


def names_in(series: Path) -> list[str]:
    return sorted(path.name for path in series.iterdir())


def test_the_newest_whole_one_is_found(tmp_path: Path) -> None:
    series = tmp_path / "series"
    assert latest(series) is None
    for step in (9, 1_000_000, 10):
        assert saved(series, step).name == f"step-{step:06}"
    (series / "step-7x").mkdir()
    (series / "notes.txt").touch()
    assert latest(series) == series / "step-1000000"
    (series / "step-1000000" / "model.safetensors").write_bytes(b"")
    assert latest(series) == series / "step-000010"
    (series / "step-000010").rename(series / ".step-000010.previous")  # a replacement was broken off
    found = latest(series)
    assert found == series / "step-000010"
    model = nn.Linear(2, 2)
    assert load(found, model).step == model.bias[0].item() == 10


def test_training_does_not_begin_again_beside_checkpoints_that_cannot_be_read(tmp_path: Path) -> None:
    for step in (1, 2):
        saved(tmp_path, step)
        (tmp_path / f"step-{step:06}" / "training.json").write_text("")
    with pytest.raises(CheckpointError, match=r"step-000002/training\.json: is damaged"):
        latest(tmp_path)


def test_older_ones_are_removed(tmp_path: Path) -> None:
    for step in range(5):
        saved(tmp_path, step, keep=2)
    assert names_in(tmp_path) == ["step-000003", "step-000004"]
    saved(tmp_path, 5)
    assert len(names_in(tmp_path)) == 3


def test_damaged_ones_do_not_count_and_later_ones_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3, 8):
        saved(tmp_path, step)
    (tmp_path / "step-000003" / "training.json").unlink()
    (tmp_path / ".step-000007.tmp").mkdir()
    saved(tmp_path, 4, keep=2)
    assert names_in(tmp_path) == ["step-000002", "step-000004", "step-000008"]
    with pytest.raises(CheckpointError, match="keep is 0; keep at least 1"):
        saved(tmp_path, 5, keep=0)


def write_twice(series: Path, step: int) -> None:
    """Write checkpoints whose tensors are full of their step: one of the series, and one in place of the one before."""
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    for parameter in model.parameters():
        nn.init.constant_(parameter, step)
        optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, step)}
    write = partial(save, model=model, optimizer=optimizer, position=Position(step), shard_bytes=1000)
    save_step(series, step, write, keep=2)
    write(series / "current")


def step_of(folder: Path) -> int:
    """A whole checkpoint's step, with which all its tensors are full."""
    model = nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    step = load(folder, model, optimizer).step
    tensors = [
        *model.parameters(),
        *(optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()),
    ]
    assert {value for tensor in tensors for value in tensor.unique().tolist()} == {step}
    return step


def kill_often(series: Path, seed: int) -> None:
    """Kill processes that write for ever at random moments; each goes on where the one before it was last whole."""
    random.seed(seed)
    reached = current = 1
    write_twice(series, reached)
    start = time.monotonic()
    write_twice(series, reached)
    takes = time.monotonic() - start
    for _ in range(20):
        child = os.fork()
        if child == 0:
            for step in count(reached + 1):
                write_twice(series, step)
        time.sleep(random.uniform(0, 3 * takes))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        newest = latest(series)
        assert newest is not None
        before, (reached, current) = (reached, current), (step_of(newest), step_of(series / "current"))
        assert before[0] <= reached
        assert before[1] <= current <= reached
    print(reached)


def test_a_process_that_is_killed_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """At whatever moment."""
    code = (
        "import sys, torch; from pathlib import Path; torch.set_num_threads(1)\n"
        "from tests.executor.training.test_series import kill_often; kill_often(Path(sys.argv[1]), 0)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "series"], check=True, timeout=100, capture_output=True, text=True
    )
    assert int(ended.stdout) > 1
