"""Folders that are written whole: under a hidden name first, then renamed.

While ``NAME`` is written it is ``.NAME.tmp``. Then the old one, if there is any, becomes ``.NAME.previous``, the new
one ``NAME``, and the old one goes. So at every instant a whole one is there, and :func:`readable` finds it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(target: Path) -> Iterator[Path]:
    """An empty folder to write into; after the block it is ``target``, on the disk. If the block raises, nothing of it
    is left and the old one stays."""
    new, previous = _new(target), _previous(target)
    shutil.rmtree(new, ignore_errors=True)  # of a process that was killed
    try:
        new.mkdir(parents=True)
        yield new
        for path in (*new.iterdir(), new):
            _to_disk(path)
        _exchange(target, new, previous)
        _to_disk(target.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(previous, ignore_errors=True)


def _exchange(target: Path, new: Path, previous: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    shutil.rmtree(previous, ignore_errors=True)
    target.rename(previous)
    try:
        new.rename(target)
    except BaseException:
        previous.rename(target)
        raise


def readable(target: Path) -> Path:
    """Where the newest whole version of a folder is: itself, or the old one if a replacement was broken off."""
    return _previous(target) if not target.exists() and _previous(target).exists() else target


def remove(target: Path) -> None:
    """Remove a folder, which is gone as a whole for whoever looks for it."""
    gone = _new(target)
    shutil.rmtree(gone, ignore_errors=True)
    for path in (_previous(target), target):
        if path.exists():
            path.rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _new(target: Path) -> Path:
    return target.with_name(f".{target.name}.tmp")


def _previous(target: Path) -> Path:
    return target.with_name(f".{target.name}.previous")


def _to_disk(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
