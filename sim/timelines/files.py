"""Timeline files: Parquet, or CSV. Both hold the same: a header (JSON), the task table, and the memory table.

    Parquet    the task table, with the header under the key ``harmony-timeline`` of the schema's metadata
    CSV        ``# harmony-timeline {header}``, then the task table

The header holds format, version, what the timeline is about, and the memory table column by column.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pandas as pd

from traces.files import write_atomically

from ..errors import TimelineError
from .table import MAYBE_NUMBER, MEMORY_COLUMNS, TASK_COLUMNS, check_columns, frame

FORMAT = "harmony-timeline"
VERSION = 2

_COMMENT = f"# {FORMAT} "


class _MemoryColumns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    step: list[int]
    time_ns: list[int]
    gpu: list[int]
    tensor_kind: list[str]
    delta_bytes: list[int]


class _Kind(msgspec.Struct, frozen=True):
    """What is read of a header first."""

    format: str
    version: int


class _Header(_Kind, frozen=True, forbid_unknown_fields=True):
    info: msgspec.Raw
    memory: _MemoryColumns


class Tables(NamedTuple):
    """What a file holds; ``info`` is still JSON."""

    info: bytes
    tasks: pd.DataFrame
    memory: pd.DataFrame


def write_tables(path: str | Path, tables: Tables) -> None:
    """Write a file of the kind that its name asks for. Raises TimelineError for another name."""
    columns = _MemoryColumns(**{name: tables.memory[name].tolist() for name in MEMORY_COLUMNS})
    header = msgspec.json.encode(_Header(FORMAT, VERSION, msgspec.Raw(tables.info), columns))
    write_atomically(path, _WRITERS[timeline_suffix(path)](tables.tasks, header))


def read_tables(path: str | Path) -> Tables:
    """Read a file. Raises TimelineError that says what is wrong with it and where."""
    path, suffix = Path(path), timeline_suffix(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise TimelineError(f"{path}: no such file") from None
    except OSError as error:
        raise TimelineError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not data:
        raise TimelineError(f"{path}: is empty; write it anew with -o")
    return _READERS[suffix](data, str(path))


def timeline_suffix(path: str | Path) -> str:
    """How the name of a timeline file ends, which says its kind. Raises TimelineError for another name."""
    suffix = Path(path).suffix
    if suffix not in _WRITERS:
        raise TimelineError(f"{path}: a timeline's name ends in {' or '.join(_WRITERS)}")
    return suffix


def _to_parquet(tasks: pd.DataFrame, header: bytes) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(tasks, preserve_index=False).replace_schema_metadata({FORMAT.encode(): header})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _from_parquet(data: bytes, source: str) -> Tables:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise TimelineError(f"{source}: is not a Parquet file: {str(error).splitlines()[0]}") from None
    header = (table.schema.metadata or {}).get(FORMAT.encode())
    if header is None:
        raise TimelineError(f"{source}: is a Parquet file, but no timeline: its metadata has no {FORMAT!r}")
    check_columns(table.column_names, TASK_COLUMNS, f"{source}: task table")
    return _tables(header, {name: table.column(name).to_pylist() for name in TASK_COLUMNS}, source)


def _to_csv(tasks: pd.DataFrame, header: bytes) -> bytes:
    return _COMMENT.encode() + header + b"\n" + tasks.to_csv(index=False, lineterminator="\n").encode()


def _from_csv(data: bytes, source: str) -> Tables:
    first, _, rest = data.partition(b"\n")
    if not first.startswith(_COMMENT.encode()):
        raise TimelineError(f"{source}: is no timeline: its first line must begin with {_COMMENT!r}")
    try:
        cells = pd.read_csv(io.BytesIO(rest), dtype="string", keep_default_na=False, na_values=[""])
    except (ValueError, UnicodeDecodeError) as error:  # pandas' parser and empty-data errors are ValueErrors
        raise TimelineError(f"{source}: the task table is no CSV: {error}") from None
    check_columns(cells.columns, TASK_COLUMNS, f"{source}: task table")
    if not isinstance(cells.index, pd.RangeIndex):  # what pandas makes of surplus cells in the first row
        raise TimelineError(f"{source}: the task table is no CSV: rows have more cells than there are columns")
    return _tables(first.removeprefix(_COMMENT.encode()), {name: cells[name] for name in TASK_COLUMNS}, source)


def _tables(encoded_header: bytes, columns: dict[str, Any], source: str) -> Tables:
    header = _decode_header(encoded_header, source)
    typed = {name: _typed(columns[name], name, dtype, source) for name, dtype in TASK_COLUMNS.items()}
    memory = {name: getattr(header.memory, name) for name in MEMORY_COLUMNS}
    if len({len(values) for values in memory.values()}) != 1:
        raise TimelineError(f"{source}: the memory table's columns have different lengths")
    return Tables(bytes(header.info), pd.DataFrame(typed), frame(memory, MEMORY_COLUMNS))


def _decode_header(encoded: bytes, source: str) -> _Header:
    try:
        kind = msgspec.json.decode(encoded, type=_Kind)
        if kind.format != FORMAT or kind.version != VERSION:
            raise TimelineError(
                f"{source}: is {kind.format} version {kind.version}; this Harmony reads {FORMAT} version {VERSION}"
            )
        return msgspec.json.decode(encoded, type=_Header)
    except msgspec.DecodeError as error:
        raise TimelineError(f"{source}: the header is wrong: {error}") from None


def _typed(values: Any, name: str, dtype: str, source: str) -> pd.Series[Any]:
    """A column in its type, whether it was read as text or as numbers."""
    try:
        return pd.Series(pd.Series(values, dtype=MAYBE_NUMBER if dtype != "string" else dtype), dtype=dtype)
    except (ValueError, TypeError) as error:
        raise TimelineError(f"{source}: column {name} must hold whole numbers: {error}") from None


_WRITERS = {".parquet": _to_parquet, ".csv": _to_csv}
_READERS = {".parquet": _from_parquet, ".csv": _from_csv}
