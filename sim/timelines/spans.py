"""A timeline seen lane by lane, for pictures and viewers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import pandas as pd

from ..schedule import Lane, TaskKind, TensorKind
from ..tables import device_name
from .table import HOST
from .timeline import Timeline

_LANES = list(Lane)


class Span(NamedTuple):
    """A task in one lane: ``gpu`` None is the host, or all GPUs together. ``row`` is its row of the timeline."""

    gpu: int | None
    lane: Lane
    kind: TaskKind
    start_ns: int
    end_ns: int
    row: dict[Hashable, Any]

    @property
    def lane_order(self) -> tuple[bool, int, int]:
        """Sorts GPUs first, in order, then the host; the lanes of each as they are declared."""
        return (self.gpu is None, self.gpu or 0, _LANES.index(self.lane))


def spans(timeline: Timeline) -> Iterator[Span]:
    """Every task of every step; a P2P copy twice, in the sender's lane and in the receiver's."""
    frame = timeline.frame
    for row in frame.astype(object).where(frame.notna(), None).to_dict("records"):
        kind = TaskKind(row["kind"])
        span = Span(row["gpu"], Lane(row["lane"]), kind, int(row["start_ns"]), int(row["end_ns"]), row)
        yield span
        if row["peer"] is not None:
            yield span._replace(gpu=row["peer"], lane=Lane.P2P_IN)


def median_step(timeline: Timeline) -> int:
    """Of the steps that ran alone, the one whose length is the median (the lower one of two)."""
    steps = timeline.frame[timeline.frame["step"].isin(timeline.info.alone)].groupby("step")
    lengths = (steps["end_ns"].max() - steps["start_ns"].min()).sort_values(kind="stable")
    return int(lengths.index[(len(lengths) - 1) // 2])


def lane_name(gpu: int | None, lane: Lane) -> str:
    """A lane as people read it: ``GPU 0 swap in``, ``host update``, ``all GPUs collective``."""
    where = "all GPUs" if lane is Lane.COLLECTIVE else device_name(gpu)
    return f"{where} {lane.value.replace('_', ' ')}"


def held_bytes(timeline: Timeline, gpu: int | None, step: int | None = None) -> pd.DataFrame:
    """What one memory holds from each time on: a row per time at which it changes (index ``time_ns``), a column per
    tensor kind that it ever holds, in bytes. ``gpu`` None: the host's buffers; ``step`` None: all steps."""
    memory = timeline.memory[timeline.memory["gpu"] == (HOST if gpu is None else gpu)]
    if step is not None:
        memory = memory[memory["step"] == step]
    changes = memory.groupby(["time_ns", "tensor_kind"], observed=True)["delta_bytes"].sum().unstack(fill_value=0)
    held = changes.sort_index().cumsum()
    return held[[kind.value for kind in TensorKind if kind.value in held.columns]]
