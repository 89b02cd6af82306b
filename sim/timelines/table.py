"""The two tables of a Timeline as pandas frames: their columns and types, and how times become rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import pandas as pd

from ..errors import TimelineError
from ..schedule import Lane, Schedule, TaskKind, TensorKind
from .replay import MemoryChange, StepTimes

HOST = -1
"""The host in the memory table's ``gpu`` column."""

NUMBER, MAYBE_NUMBER, TEXT = "int64", "Int64", "string"

TASK_COLUMNS: Mapping[str, str] = {
    "step": NUMBER,
    "task": NUMBER,
    "kind": TEXT,
    "gpu": MAYBE_NUMBER,
    "lane": TEXT,
    "layer_first": NUMBER,
    "layer_last": NUMBER,
    "microbatch": MAYBE_NUMBER,
    "tensor_kind": TEXT,
    "bytes": NUMBER,
    "start_ns": NUMBER,
    "end_ns": NUMBER,
    "peer": MAYBE_NUMBER,
}
"""Columns of the task table and their types, in order. ``gpu`` is missing for the host and for all GPUs together;
``microbatch``, ``tensor_kind`` and ``peer`` are missing where the task has none."""

MEMORY_COLUMNS: Mapping[str, str] = {
    "step": NUMBER,
    "time_ns": NUMBER,
    "gpu": NUMBER,
    "tensor_kind": TEXT,
    "delta_bytes": NUMBER,
}
"""Columns of the memory table: bytes that a GPU (:data:`HOST`: the host) begins or ceases to hold."""

_WORDS: Mapping[str, tuple[type[Enum], bool]] = {
    "kind": (TaskKind, False),
    "lane": (Lane, False),
    "tensor_kind": (TensorKind, True),
}
"""Text columns: whose values they hold, and whether one may be missing."""


def task_table(schedule: Schedule, steps: Sequence[StepTimes]) -> pd.DataFrame:
    """A row per step and task, in that order. Raises ValueError unless every step has a time for each task."""
    tasks, count = schedule.tasks, len(steps)
    words: dict[Enum | None, str | None] = {word: word.value for kind in (TaskKind, Lane, TensorKind) for word in kind}
    words[None] = None
    fixed: dict[str, list[Any]] = {
        "task": [task.id for task in tasks],
        "kind": [words[task.kind] for task in tasks],
        "gpu": [task.gpu for task in tasks],
        "lane": [words[task.lane] for task in tasks],
        "layer_first": [task.layer_first for task in tasks],
        "layer_last": [task.layer_last for task in tasks],
        "microbatch": [task.microbatch for task in tasks],
        "tensor_kind": [words[task.tensor_kind] for task in tasks],
        "peer": [task.peer for task in tasks],
    }
    said = [task.bytes for task in tasks]
    columns: dict[str, list[Any]] = {name: values * count for name, values in fixed.items()}
    columns["step"] = [step for step in range(count) for _ in tasks]
    columns["bytes"] = [size for s in steps for size in (said if s.copied_bytes is None else s.copied_bytes)]
    columns["start_ns"] = [time for s in steps for time in s.start_ns]
    columns["end_ns"] = [time for s in steps for time in s.end_ns]
    return frame(columns, TASK_COLUMNS)


def memory_table(steps: Sequence[Sequence[MemoryChange]]) -> pd.DataFrame:
    """A row per step and allocation or free, by time."""
    rows = [
        (step, change.time_ns, HOST if change.gpu is None else change.gpu, change.tensor_kind.value, change.delta_bytes)
        for step, changes in enumerate(steps)
        for change in changes
    ]
    names = list(MEMORY_COLUMNS)
    return frame({name: [row[at] for row in rows] for at, name in enumerate(names)}, MEMORY_COLUMNS)


def frame(columns: Mapping[str, Any], types: Mapping[str, str]) -> pd.DataFrame:
    """A frame with just these columns, in their order and types. Raises ValueError if their lengths differ."""
    lengths = {name: len(columns[name]) for name in types}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"columns of one table have different lengths: {lengths}")
    return pd.DataFrame({name: pd.Series(columns[name], dtype=dtype) for name, dtype in types.items()})


def check_memory_table(memory: pd.DataFrame, source: str) -> None:
    """Raise TimelineError unless it has its columns and known words."""
    _check_table(memory, MEMORY_COLUMNS, f"{source}: memory table")


def check_task_table(tasks: pd.DataFrame, steps: int, source: str) -> None:
    """Raise TimelineError unless it has its columns, known words and all steps, and no task ends early."""
    _check_table(tasks, TASK_COLUMNS, f"{source}: task table")
    found = sorted(int(step) for step in tasks["step"].unique())
    if found != list(range(steps)):
        raise TimelineError(f"{source}: has steps {found}, but its header says {steps}; they must be 0 … {steps - 1}")
    early = tasks.index[tasks["end_ns"] < tasks["start_ns"]]
    if len(early):
        step, task, start, end = tasks.loc[early[:1], ["step", "task", "start_ns", "end_ns"]].to_numpy().tolist()[0]
        raise TimelineError(
            f"{source}: step {step}, task {task} ends at {end} ns, before its start at {start} ns "
            f"({len(early)} such row(s))"
        )


def _check_table(table: pd.DataFrame, types: Mapping[str, str], source: str) -> None:
    check_columns(table.columns, types, source)
    for name in types.keys() & _WORDS.keys():
        _check_words(table[name], name, source)


def check_columns(found: Iterable[Any], types: Mapping[str, str], source: str) -> None:
    """Raise TimelineError unless the columns are these, in order."""
    names, expected = [str(name) for name in found], list(types)
    missing = [name for name in expected if name not in names]
    unknown = [name for name in names if name not in expected]
    if missing or unknown:
        faults = [f"lacks {', '.join(missing)}"] if missing else []
        faults += [f"has unknown column(s) {', '.join(unknown)}"] if unknown else []
        raise TimelineError(f"{source} {' and '.join(faults)}; its columns are {', '.join(expected)}")
    if names != expected:
        raise TimelineError(f"{source} has its columns in the order {', '.join(names)}; write {', '.join(expected)}")


def _check_words(column: pd.Series[Any], name: str, source: str) -> None:
    words, may_miss = _WORDS[name]
    known = {str(word.value) for word in words}
    for value in column.unique():
        if not (may_miss if pd.isna(value) else value in known):
            shown = "nothing" if pd.isna(value) else repr(value)
            raise TimelineError(f"{source}, column {name}: holds {shown}; it may hold {', '.join(sorted(known))}")
