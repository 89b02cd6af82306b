"""Columns of imported tables: what a cell may hold, in which unit. Units are part of a column's name.

Each kind of column turns a cell's text into a value or raises ``ValueError`` that says what is expected instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Protocol

_MOST = 2**62
_WHOLE = re.compile(r"[0-9]{1,19}", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]{1,3})?", re.ASCII | re.IGNORECASE)

NS_PER_UNIT = {"seconds": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}


class Column(Protocol):
    """One column of a table."""

    @property
    def name(self) -> str:
        """What it is called, without its unit."""

    @property
    def required(self) -> bool:
        """Whether a table must have it, and each of its cells a value."""

    @property
    def headings(self) -> tuple[str, ...]:
        """Names that it may have in a table, the usual one first."""

    def value(self, text: str, heading: str) -> Any:
        """A cell's value. Raises ValueError: what is expected instead."""


@dataclass(frozen=True)
class Whole:
    """A whole number from ``least`` to ``most``: a count, an index, or bytes where the name says so."""

    name: str
    least: int = 0
    most: int = _MOST
    required: bool = True

    @property
    def headings(self) -> tuple[str, ...]:
        """Its name."""
        return (self.name,)

    def value(self, text: str, heading: str) -> int:
        """The number."""
        text = text.strip()
        if not _WHOLE.fullmatch(text) or not self.least <= int(text) <= self.most:
            raise ValueError(f"write a whole number from {self.least} to {self.most}")
        return int(text)


@dataclass(frozen=True)
class Duration:
    """A time that is not negative, in the unit that ends the column's name: ``gpu_seconds``, ``gpu_ms``, …"""

    name: str
    required: bool = True

    @property
    def headings(self) -> tuple[str, ...]:
        """Its name with each unit."""
        return tuple(f"{self.name}_{unit}" for unit in NS_PER_UNIT)

    def value(self, text: str, heading: str) -> Decimal:
        """Nanoseconds, exactly as written."""
        text, unit = text.strip(), heading.rpartition("_")[2]
        if not _NUMBER.fullmatch(text) or (duration_ns := Decimal(text) * NS_PER_UNIT[unit]) > _MOST:
            raise ValueError(f"write a time in {unit} that is finite, not negative, and at most {_MOST / 1e9:.2g} s")
        return duration_ns


@dataclass(frozen=True)
class Choice:
    """One of a few words."""

    name: str
    choices: tuple[str, ...]
    required: bool = True

    @property
    def headings(self) -> tuple[str, ...]:
        """Its name."""
        return (self.name,)

    def value(self, text: str, heading: str) -> str:
        """The word."""
        if text.strip() not in self.choices:
            raise ValueError(f"write one of {', '.join(self.choices)}")
        return text.strip()


def without_unit(heading: str, columns: Iterable[Column]) -> Duration | None:
    """The column that this heading means, if it only lacks a unit: ``gpu`` or ``gpu_time`` for ``gpu_seconds``; any
    ``time`` if there is but one such column."""
    durations = [column for column in columns if isinstance(column, Duration)]
    stems = {stem: column for column in durations for stem in (column.name, f"{column.name}_time")}
    if heading in ("time", "duration") and durations:
        return durations[0]
    return stems.get(heading)
