"""Trace files: JSON with a header and one row a line in each table, so that two of them can be compared line by line.
They may be packed by gzip (``.json.gz``), as the shipped ones are.

    {"format": "harmony-trace", "version": 1, "model": …,
     "layers": [a row a line], "times": [a row a line], "sizes": [a row a line]}

Also the one way in which Harmony writes any file: complete, or not at all.
"""

from __future__ import annotations

import errno
import gzip
import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import resources
from pathlib import Path

import msgspec

from .checks import check_relations, check_trace
from .decode import decode_trace
from .errors import FileError, TraceError
from .schema import FORMAT, VERSION, Trace

__all__ = [
    "check_trace",
    "check_writable",
    "load_trace",
    "make_folder",
    "refusals_of",
    "save_trace",
    "shipped_traces",
    "write_atomically",
]

_SHIPPED_SUFFIX = ".json.gz"
_PACKED_SUFFIX, _PACKED_START = ".gz", b"\x1f\x8b"


def load_trace(path_or_name: str | Path) -> Trace:
    """Read and check a trace: a file, packed or not, or the name of a shipped one such as ``gpt2-xl@gtx-1080-ti``.

    Raises TraceError that says in which file, table, row and column what was found and what to write instead.
    """
    path = Path(path_or_name)
    if not path.exists() and str(path_or_name) in shipped_traces():
        data = resources.files(__package__).joinpath("data", f"{path_or_name}{_SHIPPED_SUFFIX}").read_bytes()
    else:
        data = _read(path)
    source = str(path_or_name)
    trace = decode_trace(_unpacked(data, source), source)
    check_relations(trace, source)
    return trace


def save_trace(trace: Trace, path: str | Path) -> None:
    """Check a trace and write it, packed if the file is called ``.gz``.

    Raises TraceError if it does not hold, FileError if it cannot be written.
    """
    check_trace(trace, str(path))
    data = encode_trace(trace)
    write_atomically(path, gzip.compress(data, mtime=0) if Path(path).suffix == _PACKED_SUFFIX else data)


def encode_trace(trace: Trace) -> bytes:
    """The bytes of a trace file."""
    header = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(trace)}
    tables = {name: header.pop(name) for name in ("layers", "times", "sizes")}
    entries = [_entry(name, msgspec.json.encode(value)) for name, value in header.items()]
    for name, rows in tables.items():
        lines = b",\n".join(msgspec.json.encode(row) for row in rows)
        entries.append(_entry(name, b"[\n" + lines + b"\n]"))
    return b"{\n" + b",\n".join(entries) + b"\n}\n"


def shipped_traces() -> tuple[str, ...]:
    """Names of the traces that come with Harmony, sorted."""
    folder = resources.files(__package__).joinpath("data")
    names = (entry.name for entry in folder.iterdir()) if folder.is_dir() else ()
    return tuple(sorted(name.removesuffix(_SHIPPED_SUFFIX) for name in names if name.endswith(_SHIPPED_SUFFIX)))


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a whole file or nothing: to a temporary file beside it, which then takes its name.

    An interruption leaves what was there before, and no temporary file. What exists and is no regular file (a pipe, a
    terminal) is written to directly. Raises FileError if the system refuses.
    """
    path = Path(path)
    with _place_for(path) as place:
        place.write_bytes(data)
        if place != path:
            place.replace(path)


def check_writable(path: str | Path) -> None:
    """Raise the FileError now that :func:`write_atomically` would raise later. Changes nothing."""
    path = Path(path)
    with _place_for(path) as place:
        if place != path:
            place.touch()


def make_folder(path: str | Path) -> None:
    """Make a folder and those above it, if they are not there. Raises FileError if the system refuses."""
    with refusals_of(Path(path)):
        Path(path).mkdir(parents=True, exist_ok=True)


@contextmanager
def _place_for(path: Path) -> Iterator[Path]:
    """Where to write what shall become ``path``: a file beside it, gone afterwards; or what is there and is none."""
    with refusals_of(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            yield path
            return
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def refusals_of(path: Path) -> Iterator[None]:
    """Turn what the system refuses while ``path`` is written into a FileError."""
    try:
        yield
    except OSError as error:
        advice = "make that folder first" if isinstance(error, FileNotFoundError) else "choose another place"
        raise FileError(str(path), f"cannot be written: {error.strerror or error}; {advice}") from error


def _entry(name: str, value: bytes) -> bytes:
    return msgspec.json.encode(name) + b": " + value


def _unpacked(data: bytes, source: str) -> bytes:
    if not data.startswith(_PACKED_START):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(source, "", f"cannot be unpacked: {error} (gzip, {len(data)} bytes); copy it anew") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        shipped = shipped_traces()
        near = get_close_matches(str(path), shipped, n=1)
        advice = f"did you mean the shipped trace {near[0]}?" if near else f"shipped traces: {', '.join(shipped)}"
        raise TraceError(str(path), "", f"no such file, nor a shipped trace of that name; {advice}") from None
    except OSError as error:
        raise TraceError(str(path), "", f"cannot be read: {error.strerror or error}") from None
