"""Two traces side by side: which figures differ, in which rows, and by how much."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from .schema import Trace

_TABLES = ("layers", "times", "sizes")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One column of a table (or one entry of the header) that differs.

    ``rows`` differ in it, most in ``where``: ``ours`` there, and ``theirs``. ``change`` is by which part of ours; None
    if these are no numbers, or ours is 0. Rows that only one has count as a column of their own.
    """

    table: str
    column: str
    rows: int
    where: str
    ours: Any
    theirs: Any
    change: float | None


def diff(ours: Trace, theirs: Trace) -> tuple[Difference, ...]:
    """All differences; none if the traces say the same. The order of rows does not matter."""
    found = list(_compared("header", {"": _header(ours)}, {"": _header(theirs)}))
    for table in _TABLES:
        found += _compared(table, _rows(ours, table), _rows(theirs, table))
    return tuple(found)


def _header(trace: Trace) -> dict[str, Any]:
    return {name: value for name, value in msgspec.structs.asdict(trace).items() if name not in _TABLES}


def _rows(trace: Trace, table: str) -> dict[str, dict[str, Any]]:
    """Rows by what they are about, in words."""
    rows = getattr(trace, table)
    if table == "layers":
        return {f"layer {number}": msgspec.structs.asdict(row) for number, row in enumerate(rows)}
    return {_name(row): msgspec.structs.asdict(row) for row in rows}


def _name(row: Any) -> str:
    phase = f", phase {row.phase.value}" if hasattr(row, "phase") else ""
    return f"layer {row.layer}{phase}, microbatch {row.microbatch}"


def _compared(
    table: str, ours: Mapping[str, dict[str, Any]], theirs: Mapping[str, dict[str, Any]]
) -> Iterator[Difference]:
    for which, one, other in (("only the first has", ours, theirs), ("only the second has", theirs, ours)):
        alone = [name for name in one if name not in other]
        if alone:
            counts = (len(alone), 0) if one is ours else (0, len(alone))
            yield Difference(
                table=table,
                column=f"rows that {which}",
                rows=len(alone),
                where=alone[0],
                ours=counts[0],
                theirs=counts[1],
                change=None,
            )
    both = [name for name in ours if name in theirs]
    for column in ours[both[0]] if both else ():
        differing = [name for name in both if ours[name][column] != theirs[name][column]]
        if differing:
            most = max(differing, key=lambda name: abs(_change(ours[name][column], theirs[name][column]) or 0.0))
            a, b = ours[most][column], theirs[most][column]
            yield Difference(
                table=table,
                column=column,
                rows=len(differing),
                where=most,
                ours=_plain(a),
                theirs=_plain(b),
                change=_change(a, b),
            )


def _change(ours: Hashable, theirs: Hashable) -> float | None:
    numbers = all(isinstance(value, int) and not isinstance(value, bool) for value in (ours, theirs))
    return (theirs - ours) / ours if numbers and ours else None  # type: ignore[operator]


def _plain(value: object) -> Any:
    return value.value if isinstance(value, Enum) else msgspec.to_builtins(value)
