"""Whoever looks at any instant finds one whole folder, the old one or the new one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from executor.training import folders
from executor.training.folders import readable, remove, replaced


class Killed(BaseException):
    pass


def write(target: Path, text: str) -> None:
    with replaced(target) as new:
        for name in "abc":
            (new / name).write_text(text)


def text_in(target: Path) -> str:
    """What a whole one says."""
    (text,) = {(readable(target) / name).read_text() for name in "abc"}
    return text


def killed_at(number: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Do the work until this many things were done to the disk; whether it was broken off."""
    done = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if done >= number:
                raise Killed
            done += 1
            return act(*arguments, **options)

        return counting

    with monkeypatch.context() as patched:
        patched.setattr(folders, "_to_disk", counted(folders._to_disk))
        for owner, name in ((shutil, "rmtree"), (Path, "rename"), (Path, "mkdir"), (Path, "write_text")):
            patched.setattr(owner, name, counted(getattr(owner, name)))
        try:
            work()
        except Killed:
            return True
    return False


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk."""
    monkeypatch.setattr("os.fsync", lambda number: None)


@pytest.mark.parametrize("second", [None, *range(0, 20, 3)])
def test_a_whole_one_is_there_wherever_writing_is_broken_off(
    second: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the attempt after that is broken off as well."""
    number, broken_off = 0, True
    while broken_off:
        target = tmp_path / str(number) / "it"
        write(target, "old")
        broken_off = killed_at(number, monkeypatch, partial(write, target, "new"))
        assert text_in(target) in ("old", "new")
        if second is not None:
            killed_at(second, monkeypatch, partial(write, target, "newer"))
            assert text_in(target) in ("old", "new", "newer")
        write(target, "last")
        assert text_in(target) == "last"
        assert [path.name for path in target.parent.iterdir()] == ["it"]
        number += 1
    assert number > 10


def test_an_error_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "above" / "it"
    write(target, "old")

    def fails() -> None:
        with replaced(target) as new:
            (new / "a").write_text("new")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fails()
    assert text_in(target) == "old"
    assert [path.name for path in target.parent.iterdir()] == ["it"]


def test_where_the_new_one_cannot_take_the_place_the_old_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "it"
    write(target, "old")
    rename = Path.rename

    def refuses_new(path: Path, to: Path) -> Path:
        if path.name == ".it.tmp":
            raise PermissionError
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuses_new)
    with pytest.raises(PermissionError):
        write(target, "new")
    assert [path.name for path in tmp_path.iterdir()] == ["it"]
    assert text_in(target) == "old"


def test_what_is_removed_is_gone_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number, broken_off = 0, True
    while broken_off:
        target = tmp_path / f"it-{number}"
        write(target, "old")
        broken_off = killed_at(number, monkeypatch, partial(remove, target))
        assert not readable(target).exists() or text_in(target) == "old"
        number += 1
    assert not list(tmp_path.glob(f"*it-{number - 1}*"))
