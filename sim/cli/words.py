"""How words of the command line become values; what they cannot become is one error, with what to write instead."""

from __future__ import annotations

import math
from pathlib import Path

import typer

from ..plan import Pack, StashPlace
from ..units import parse_bytes, parse_rate
from .output import STDOUT

UNLIMITED = math.inf

_MOST_PACKS = 100_000
"""More than the layers of any model."""


def size(text: str) -> int:
    """``"9 GB"`` as bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def size_or_unlimited(text: str) -> float:
    """``"300 GB"`` as bytes; ``"unlimited"``."""
    return UNLIMITED if text.strip().lower() == "unlimited" else size(text)


def rate(text: str) -> float:
    """``"12.35 GB/s"`` as bytes per second, more than none."""
    try:
        bytes_per_s = parse_rate(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not bytes_per_s:
        raise typer.BadParameter(f"{text!r} is no rate at which anything moves; write for example 40 GB/s")
    return bytes_per_s


def counts(text: str) -> tuple[int, ...]:
    """``"1,2,4"`` as numbers, each at least 1."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of microbatch sizes; write for example 1,2,4")
    return tuple(int(part) for part in parts)


def gpu_order(text: str) -> tuple[int, ...]:
    """``"0,4,1,5"`` as numbers of GPUs."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise typer.BadParameter(f"{text!r} is not an order of GPUs; write for example 0,2,1,3")
    return tuple(map(int, parts))


def packs(text: str) -> int | tuple[Pack, ...]:
    """``"3"`` as a count of packs; ``"0-4,5-9"`` as packs."""
    if text.isdecimal():
        return int(text)
    return _runs(text, "packs; write a count such as 3, or first-last layers such as 0-4,5-9")


def _runs(text: str, what: str) -> tuple[tuple[int, int], ...]:
    """``"0-4,5"`` as first and last numbers. ``what``: what else to write, and how."""
    found = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise typer.BadParameter(f"{text!r} are not {what}")
        found.append((int(first), int(last or first)))
    return tuple(found)


def stash(text: str) -> StashPlace | tuple[StashPlace, ...]:
    """``"keep"`` as the place of all stashes; ``"swap,keep"`` as one for each."""
    try:
        places = tuple(StashPlace(word.strip()) for word in text.split(","))
    except ValueError as error:
        words = ", ".join(place.value for place in StashPlace)
        raise typer.BadParameter(f"{error}; write one of {words}, or a list such as swap,keep") from None
    return places if "," in text else places[0]


def indices(text: str) -> tuple[int, ...]:
    """``"0,3-5"`` as numbers: 0, 3, 4, 5."""
    runs = _runs(text, "packs; write their numbers, such as 0,3-5")
    for first, last in runs:
        if not first <= last < first + _MOST_PACKS:
            raise typer.BadParameter(
                f"{first}-{last} in {text!r} must name 1 to {_MOST_PACKS} packs, in ascending order"
            )
    return tuple(index for first, last in runs for index in range(first, last + 1))


def timeline(path: Path | None) -> Path | None:
    """A timeline file that can be written, by its suffix."""
    if path is not None and str(path) != STDOUT:
        from ..timelines.files import timeline_suffix

        timeline_suffix(path)
    return path


def picture(path: Path) -> Path:
    """A picture that can be drawn, by its suffix."""
    if str(path) != STDOUT:
        from ..views.pictures import picture_suffix

        picture_suffix(path)
    return path


def chrome_trace(path: Path) -> Path:
    """A Chrome trace that can be written, by its suffix."""
    if str(path) != STDOUT:
        from ..views.chrome_trace import chrome_suffix

        chrome_suffix(path)
    return path
