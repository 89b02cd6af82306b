"""Schedule files: JSON with a header, one buffer a line and one task a line, so that two of them compare line by line.

{"format": "harmony-schedule", "version": 1, "model": …, "plan": …, "layers": …, "memory": …,
 "buffers": [one a line], "tasks": [one a line]}
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from traces.files import write_atomically

from .errors import PlanError, ScheduleError
from .plan import Plan
from .schedule import FORMAT, VERSION, Buffer, MemoryPlan, Schedule, Task


class _Kind(msgspec.Struct, frozen=True):
    """What is read of a file first."""

    format: str
    version: int


class _File(_Kind, frozen=True, forbid_unknown_fields=True):
    model: str
    plan: Plan
    layers: int
    memory: MemoryPlan
    buffers: tuple[Buffer, ...]
    tasks: tuple[Task, ...]


def save_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule. Raises FileError if it cannot be written."""
    write_atomically(path, encode_schedule(schedule))


def load_schedule(path: str | Path) -> Schedule:
    """Read a schedule. Raises ScheduleError that says what is wrong with the file and where.

    Whether the schedule holds together is for :func:`sim.validate.validate` to say.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise ScheduleError((f"{path}: no such file; make one with harmony search -o",)) from None
    except OSError as error:
        raise ScheduleError((f"{path}: cannot be read: {error.strerror or error}",)) from None
    return decode_schedule(data, str(path))


def encode_schedule(schedule: Schedule) -> bytes:
    """The bytes of a schedule file."""
    header = {
        "format": FORMAT,
        "version": VERSION,
        "model": schedule.model,
        "plan": schedule.plan,
        "layers": schedule.layers,
        "memory": schedule.memory,
    }
    entries = [_entry(name, msgspec.json.encode(value)) for name, value in header.items()]
    for name, rows in (("buffers", schedule.buffers), ("tasks", schedule.tasks)):
        lines = b",\n".join(msgspec.json.encode(row) for row in rows)
        entries.append(_entry(name, b"[\n" + lines + b"\n]"))
    return b"{\n" + b",\n".join(entries) + b"\n}\n"


def decode_schedule(data: bytes, source: str) -> Schedule:
    """The schedule in these bytes; ``source`` names them in errors."""
    try:
        kind = msgspec.json.decode(data, type=_Kind)
        if kind.format != FORMAT or kind.version != VERSION:
            raise ScheduleError(
                (f"{source}: is {kind.format} version {kind.version}; this Harmony reads {FORMAT} version {VERSION}",)
            )
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, PlanError, UnicodeDecodeError) as error:
        raise ScheduleError((f"{source}: {error}",)) from None
    return Schedule(
        model=file.model,
        plan=file.plan,
        layers=file.layers,
        memory=file.memory,
        buffers=file.buffers,
        tasks=file.tasks,
    )


def _entry(name: str, value: bytes) -> bytes:
    return msgspec.json.encode(name) + b": " + value
