"""The critical path of a timeline for people: what decided the step's length, from its beginning to its end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..errors import TimelineError
from ..schedule import Lane
from ..tables import Table
from ..timelines.critical_path import Cause
from ..timelines.spans import lane_name
from ..timelines.timeline import Timeline
from ..units import NS_PER_S, format_seconds

if TYPE_CHECKING:
    import pandas as pd

_SHORT = 0.002
"""Share of the step below which a row of the table is left out."""

_COMPUTING = (Cause.COMPUTE.value, Cause.RECOMPUTE.value)


def why(timeline: Timeline) -> pd.DataFrame:
    """A row for each piece of the critical path, first to last: ``start_ns`` and ``end_ns`` since the step began,
    ``cause``, and the task with what it is (missing where no task ran).

    Raises TimelineError if the timeline does not know its critical path.
    """
    import pandas as pd

    path = timeline.info.critical_path
    if path is None:
        raise TimelineError(f"the timeline of {timeline.info.model} does not say what decided its step; record it anew")
    about = ["kind", "gpu", "lane", "layer_first", "layer_last", "microbatch", "tensor_kind", "bytes", "peer"]
    tasks = timeline.frame[timeline.frame["step"] == path.step].set_index("task")[about]
    pieces = [(piece.start_ns, piece.end_ns, piece.cause, piece.task) for piece in path.pieces]
    rows = pd.DataFrame(pieces, columns=["start_ns", "end_ns", "cause", "task"]).astype({"task": "Int64"})
    return rows.join(tasks.astype({"layer_first": "Int64", "layer_last": "Int64", "bytes": "Int64"}), on="task")


def why_table(timeline: Timeline) -> Table:
    """The same as a table, with what follows in one lane for one cause as one row. A backward counts with the forward
    that it repeats. Short rows are left out; the title says how many, and how long they are together."""
    rows = why(timeline)
    plain: list[dict[str, Any]] = rows.astype(object).where(rows.notna(), None).to_dict("records")  # type: ignore[assignment]
    total = plain[-1]["end_ns"] if plain else 0
    shown, short_ns, short = [], 0, 0
    for run in _runs(plain):
        lasting = run[-1]["end_ns"] - run[0]["start_ns"]
        if lasting < _SHORT * total:
            short, short_ns = short + 1, short_ns + lasting
        else:
            shown.append(_row(run, lasting, total))
    left_out = f"; {short} short rows, {format_seconds(short_ns / NS_PER_S)}, are left out" if short else ""
    return Table(
        f"What decided the step of {format_seconds(total / NS_PER_S)}{left_out}",
        ("cause", "where", "tasks", "from", "to", "lasts", "of the step"),
        tuple(shown),
        words=3,
    )


def _runs(rows: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    def together(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["gpu"], row["lane"], "" if row["cause"] in _COMPUTING else row["cause"]

    return (list(run) for _, run in groupby(rows, key=together))


def _row(run: list[dict[str, Any]], lasting: int, total: int) -> tuple[str, ...]:
    causes = sorted({row["cause"] for row in run})
    first, last = run[0], run[-1]
    where = lane_name(first["gpu"], Lane(first["lane"])) if first["task"] is not None else ""
    names = list(dict.fromkeys(_name(row) for row in run if row["task"] is not None))
    tasks = f"{names[0]} … {names[-1]} ({len(names)} tasks)" if len(names) > 1 else "".join(names)
    times = (format_seconds(ns / NS_PER_S) for ns in (first["start_ns"], last["end_ns"], lasting))
    return (", ".join(causes), where, tasks, *times, f"{lasting / total:.1%}")


def _name(row: dict[str, Any]) -> str:
    layers = f"{row['layer_first']}-{row['layer_last']}"
    run = layers if row["layer_first"] != row["layer_last"] else str(row["layer_first"])
    microbatch = None if row["microbatch"] is None else f"m{row['microbatch']}"
    return " ".join(str(part) for part in (row["kind"], row["tensor_kind"], run, microbatch) if part is not None)
