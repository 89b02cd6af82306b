"""A folder of checkpoints by step, ``step-000123``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError
from .checkpoint import check, is_whole
from .folders import remove

_FOLDER = re.compile(r"\.?step-(\d+)(\.previous)?")
_LEFT_OVER = ".step-*.tmp"
"""What a killed process was writing or removing."""


def save_step(series: str | Path, step: int, write: Callable[[Path], object], *, keep: int | None = None) -> Path:
    """Write a checkpoint ``step-000123`` into the folder of a series, by ``write(folder)``; its folder.

    Then of all up to this step only the ``keep`` newest whole ones stay. Those of later steps, which training left
    behind when it went back, stay as they are.
    """
    if keep is not None and keep < 1:
        raise CheckpointError(str(series), f"keep is {keep}; keep at least 1 checkpoint, or None for all")
    place = Path(series).resolve()
    for path in place.glob(_LEFT_OVER):
        shutil.rmtree(path, ignore_errors=True)
    target = _folder(place, step)
    write(target)
    if keep is not None:
        earlier = [_folder(place, each) for each in _steps(place) if each < step]
        kept = [folder for folder in earlier if is_whole(folder)][: keep - 1]
        for folder in earlier:
            if folder not in kept:
                remove(folder)
    return target


def latest(series: str | Path) -> Path | None:
    """The checkpoint of the last step in a folder of them that is whole; None if there is none at all.

    Raises CheckpointError, what is wrong with the last, if none of them is whole.
    """
    folders = [_folder(Path(series), step) for step in _steps(Path(series))]
    whole = next((folder for folder in folders if is_whole(folder)), None)
    if whole is None and folders:
        check(folders[0])
    return whole


def _folder(series: Path, step: int) -> Path:
    return series / f"step-{step:06}"


def _steps(series: Path) -> list[int]:
    """The steps that have a folder, the newest first."""
    names = [path.name for path in series.iterdir()] if series.is_dir() else []
    return sorted({int(match[1]) for match in map(_FOLDER.fullmatch, names) if match}, reverse=True)
