"""Tables, every cell checked. Errors name the file, the row, the layer, the column and what was found.

Rows of files are numbered as a spreadsheet does: the header is row 1. Their order does not matter.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ..errors import TraceError
from .cells import Column, without_unit

_SHOWN = 40


@dataclass(frozen=True)
class Row:
    """Values by the names of their columns; optional ones that the table lacks, or leaves empty, are missing.

    ``number`` is None where rows have none.
    """

    number: int | None
    values: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


@dataclass(frozen=True)
class Table:
    """The rows of a file. ``key`` names the columns that tell rows apart, ``layer`` among them."""

    source: str
    key: tuple[str, ...]
    rows: tuple[Row, ...]

    def where(self, row: Row, column: str = "") -> str:
        """``row 17 (phase FWD, microbatch 4, layer 3), gpu_seconds``."""
        return _where(row.number, {name: row[name] for name in self.key}, column)

    def by_key(self) -> dict[tuple[Any, ...], Row]:
        """Rows by the values of their keys. Raises TraceError if two have the same."""
        found: dict[tuple[Any, ...], Row] = {}
        for row in self.rows:
            earlier = found.setdefault(tuple(row[name] for name in self.key), row)
            if earlier is not row:
                as_row = "" if earlier.number is None else f", as row {earlier.number}"
                raise TraceError(self.source, self.where(row), f"is there already{as_row}; keep one of them")
        return found

    def of_layers(self, layers: int) -> list[Row]:
        """All rows, by their keys. Raises TraceError for one that is there twice, or of a layer that there is not."""
        by_key = self.by_key()
        for row in by_key.values():
            if row["layer"] >= layers:
                raise TraceError(
                    self.source, self.where(row), f"there is no layer {row['layer']}; layers are 0-{layers - 1}"
                )
        return [by_key[key] for key in sorted(by_key)]

    def by_layer(self, layers: int) -> dict[tuple[Any, ...], list[Row]]:
        """For the other keys' values, ascending, the row of each layer. Raises TraceError where one is missing."""
        others = tuple(name for name in self.key if name != "layer")
        groups: dict[tuple[Any, ...], dict[int, Row]] = {}
        for row in self.of_layers(layers):
            groups.setdefault(tuple(row[name] for name in others), {})[row["layer"]] = row
        for values, found in groups.items():
            for layer in range(layers):
                if layer not in found:
                    where = _pairs(dict(zip(others, values, strict=True)))
                    raise TraceError(self.source, where, f"has no row for layer {layer}; write one for every layer")
        return {values: [groups[values][layer] for layer in range(layers)] for values in sorted(groups)}


def read_table(path: Path, columns: Sequence[Column], key: tuple[str, ...]) -> Table:
    """Read and check a CSV or Parquet file. Raises TraceError for whatever is wrong with it."""
    rows: Iterator[tuple[int, list[str]]] = _parquet_rows(path) if path.suffix == ".parquet" else _csv_rows(path)
    _, header = next(rows, (1, []))
    return checked(str(path), [heading.strip() for heading in header], rows, columns, key)


def checked(
    source: str,
    header: Sequence[str],
    rows: Iterable[tuple[int | None, Sequence[str]]],
    columns: Sequence[Column],
    key: tuple[str, ...],
) -> Table:
    """A table of rows of text, with their numbers. Raises TraceError for the first row or cell that is wrong."""
    headings = _headings(source, header, columns)
    read = []
    for number, cells in rows:
        if len(cells) != len(header):
            raise TraceError(
                source, f"row {number}", f"has {len(cells)} cells, but there are {len(header)} columns; fill in the row"
            )
        read.append(_row(source, number, dict(zip(header, cells, strict=True)), headings, key))
    if not read:
        raise TraceError(source, "", "has no rows; write one for each layer")
    return Table(source, key, tuple(read))


def text_of(value: object) -> str:
    """A value as a cell of a CSV file has it; None is an empty one."""
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case int():
            return str(value) if abs(value) < 10**100 else f"{value:#x}"
        case _:
            return str(value)


def read_bytes(path: Path) -> bytes:
    """A file's bytes. Raises TraceError if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise TraceError(str(path), "", "no such file") from None
    except OSError as error:
        raise TraceError(str(path), "", f"cannot be read: {error.strerror or error}") from None


def _parquet_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The header and rows, with their numbers."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(read_bytes(path)))
    except (pa.ArrowException, OSError) as error:
        raise TraceError(str(path), "", f"is not a Parquet file: {str(error).splitlines()[0]}") from None
    yield 1, table.column_names
    for number, record in enumerate(zip(*(column.to_pylist() for column in table.columns), strict=True), start=2):
        yield number, [text_of(value) for value in record]


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The header and rows, with their numbers; empty lines are none."""
    data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TraceError(str(path), f"row {line}", "is not UTF-8 text; write the table as plain CSV") from None
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in lines:
            if cells:
                yield lines.line_num, cells
    except csv.Error as error:
        raise TraceError(str(path), f"row {lines.line_num}", f"is not CSV: {error}") from None


def _headings(source: str, header: Sequence[str], columns: Sequence[Column]) -> dict[str, Column]:
    """The column that each heading stands for, keys first. Every heading must be known, every needed column there."""
    known = {heading: column for column in columns for heading in column.headings}
    found: dict[str, Column] = {}
    for heading in header:
        if heading not in known:
            raise TraceError(source, "header", _unknown(heading, columns))
        if known[heading] in found.values():
            raise TraceError(source, "header", f"column {known[heading].name} is there twice; keep one")
        found[heading] = known[heading]
    for column in columns:
        if column.required and column not in found.values():
            raise TraceError(
                source, "header", f"column {column.headings[0]} is missing; there are {', '.join(header) or 'none'}"
            )
    return dict(sorted(found.items(), key=lambda item: columns.index(item[1])))


def _unknown(heading: str, columns: Sequence[Column]) -> str:
    meant = without_unit(heading, columns)
    if meant is not None:
        return f"column {heading!r} has no unit; name it {' or '.join(meant.headings)}"
    names = [name for column in columns for name in column.headings]
    near = get_close_matches(heading, names, n=1)
    usual = ", ".join(column.headings[0] for column in columns)
    return f"column {heading!r} is unknown; {f'did you mean {near[0]}?' if near else f'columns are {usual}'}"


def _row(
    source: str, number: int | None, cells: dict[str, str], headings: dict[str, Column], key: tuple[str, ...]
) -> Row:
    values: dict[str, Any] = {}
    for heading, column in headings.items():
        text = cells[heading]
        if not text and not column.required:
            continue
        try:
            values[column.name] = column.value(text, heading)
        except ValueError as error:
            known = {name: values[name] for name in key if name in values}
            shown = repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}… ({len(text)} characters)"
            raise TraceError(source, _where(number, known, heading), f"found {shown}; {error}") from None
    return Row(number, values)


def _where(number: int | None, known: dict[str, Any], column: str) -> str:
    place = _pairs(known)
    if number is not None:
        place = f"row {number} ({place})" if place else f"row {number}"
    return ", ".join(part for part in (place, column) if part)


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
