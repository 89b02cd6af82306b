"""A Trace as a folder of tables, to write by hand, from a program, or with ``harmony trace export``; and back.

    trace.json   {"format": "harmony-trace-tables", "version": 1, "model": …, "device": …, "dtype": …, "optimizer": …,
                 "label_bytes_per_sample": …} and what else a trace's header may hold
    layers       a row for each layer: layer (from 0), and the fields of :class:`traces.schema.Layer`
    times        a row for each layer, phase and microbatch: the fields of :class:`traces.schema.TimeRow`
    sizes        a row for each layer and microbatch: the fields of :class:`traces.schema.SizeRow`

Each table is a ``.csv`` or a ``.parquet``. Columns are called as the fields; times may be in ``_seconds``, ``_ms``,
``_us`` or ``_ns``. Fields that have a default may be left out; a provenance that is left out is ``imported``. The
update phases have microbatch 0. ``tied`` is JSON, such as ``[{"group": "embedding", "weight_bytes": 400}]``.
"""

from __future__ import annotations

import csv
import io
import secrets
import shutil
from collections.abc import Sequence
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..checks import check_trace
from ..decode import convert_trace
from ..errors import FileError, TraceError
from ..files import refusals_of
from ..schema import Layer, Phase, Provenance, SizeRow, TimeRow, Trace
from .cells import Whole
from .schema_columns import columns_of
from .tables import Row, Table, read_bytes, read_table, text_of

FORMAT, VERSION = "harmony-trace-tables", 1
HEADER = "trace.json"

Kind = Literal["csv", "parquet"]
KINDS: tuple[Kind, ...] = ("csv", "parquet")

_NUMBER = Whole("layer", most=2**31)
_PHASES = [phase.value for phase in Phase]
_KEYS = {"layers": ("layer",), "times": ("phase", "microbatch", "layer"), "sizes": ("microbatch", "layer")}
_ROWS: dict[str, type[msgspec.Struct]] = {"layers": Layer, "times": TimeRow, "sizes": SizeRow}


def is_trace_folder(folder: Path) -> bool:
    """Whether a trace's tables are here."""
    return (folder / HEADER).exists() or any((folder / f"layers.{kind}").exists() for kind in KINDS)


def read_trace(folder: Path) -> Trace:
    """Read and check a folder's tables. Raises TraceError that names file, row, column and value."""
    tables = {name: _read(folder, name) for name in _KEYS}
    layers = tables["layers"].by_layer(len(tables["layers"].rows))[()]
    raw = _header(folder / HEADER)
    raw["layers"] = [_plain({name: value for name, value in row.values.items() if name != "layer"}) for row in layers]
    for name in ("times", "sizes"):
        rows = sorted(tables[name].of_layers(len(layers)), key=_place)
        raw[name] = [{"provenance": Provenance.IMPORTED.value, **_plain(row.values)} for row in rows]
    trace = convert_trace(raw, str(folder))
    check_trace(trace, str(folder))
    return trace


def write_trace(trace: Trace, folder: Path, kind: Kind = "csv") -> None:
    """Write a trace's tables into a new folder. Raises FileError if there is one that holds something."""
    check_trace(trace, str(folder))
    header = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(trace)}
    for name in _ROWS:
        del header[name]
    with refusals_of(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileError(str(folder), "is there already, and not an empty folder; choose another")
        unfinished = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.tmp")
        try:
            unfinished.mkdir()
            (unfinished / HEADER).write_bytes(msgspec.json.format(msgspec.json.encode(header), indent=1) + b"\n")
            for name, rows in _cells(trace).items():
                (unfinished / f"{name}.{kind}").write_bytes(_WRITERS[kind](rows))
            unfinished.replace(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _read(folder: Path, name: str) -> Table:
    there = [path for kind in KINDS if (path := folder / f"{name}.{kind}").exists()]
    if len(there) != 1:
        found = "both are there; keep one" if there else "neither is there"
        raise TraceError(str(folder), name, f"{' or '.join(f'{name}.{kind}' for kind in KINDS)}: {found}")
    columns = {column.name: column for column in columns_of(_ROWS[name])}
    key = {name: columns.pop(name, _NUMBER) for name in _KEYS[name]}
    return read_table(there[0], (*key.values(), *columns.values()), _KEYS[name])


def _header(path: Path) -> dict[str, Any]:
    source = str(path)
    try:
        raw = msgspec.json.decode(read_bytes(path))
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(source, "", f"is not JSON: {error}") from None
    found = raw if isinstance(raw, dict) else {}
    if (found.pop("format", None), version := found.pop("version", None)) != (FORMAT, VERSION) or version is True:
        raise TraceError(
            source, "version", f'should begin {{"format": "{FORMAT}", "version": {VERSION}, found version {version!r}'
        )
    for name in _ROWS:
        if name in found:
            raise TraceError(source, name, "is a table of its own, not part of the header")
    return found


def _place(row: Row) -> tuple[int, int, int]:
    """Where a row stands in a trace file: by layer, then as phases follow each other, then by microbatch."""
    phase = row.values.get("phase")
    return row["layer"], 0 if phase is None else _PHASES.index(phase), row["microbatch"]


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Values under the names of the fields; times in whole nanoseconds."""
    return {
        f"{name}_ns" if isinstance(value, Decimal) else name: round(value) if isinstance(value, Decimal) else value
        for name, value in values.items()
    }


def _cells(trace: Trace) -> dict[str, list[dict[str, Any]]]:
    """The tables' rows, as plain values under the names of their columns."""
    layers = [{"layer": number, **_fields(layer)} for number, layer in enumerate(trace.layers)]
    return {"layers": layers, "times": list(map(_fields, trace.times)), "sizes": list(map(_fields, trace.sizes))}


def _fields(row: msgspec.Struct) -> dict[str, Any]:
    return {name: _cell(value) for name, value in msgspec.structs.asdict(row).items()}


def _cell(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    return msgspec.json.encode(value).decode() if isinstance(value, tuple) else value


def _as_csv(rows: Sequence[dict[str, Any]]) -> bytes:
    """Words are quoted, whatever is in them."""
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n", quoting=csv.QUOTE_NONNUMERIC)
    writer.writeheader()
    writer.writerows(
        {name: value if type(value) is int else text_of(value) for name, value in row.items()} for row in rows
    )
    return out.getvalue().encode()


def _as_parquet(rows: Sequence[dict[str, Any]]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink)
    return sink.getvalue()


_WRITERS = {"csv": _as_csv, "parquet": _as_parquet}
