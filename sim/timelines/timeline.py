"""The Timeline: when everything happened, predicted or measured, in the same tables with the same task ids.

The task table has a row per step and task, the memory table one per step and allocation or free; their columns are in
``table.py``. A P2P copy has one row, on its sender's ``p2p_out`` lane; ``peer`` names the receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any, Literal

import msgspec
import pandas as pd

from traces.errors import HarmonyError

from ..errors import TimelineError
from ..plan import Plan
from ..schedule import Schedule, TensorKind
from ..units import format_seconds
from . import metrics
from .critical_path import CriticalPath
from .files import Tables, read_tables, write_tables
from .held import Peaks, held_at_peaks
from .replay import StepTimes, memory_changes
from .table import check_memory_table, check_task_table, memory_table, task_table

Source = Literal["simulated", "measured"]


class TimelineInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a timeline is of, and what the plan promised.

    ``steps`` counts all recorded steps, the first ``warmup_steps`` of which no figure uses. The last ``overlapping`` of
    them ran on without a barrier, those before them each alone. ``critical_path`` is of the typical step; when
    measured, recompute counts as compute. ``provenance`` says how many
    durations of the trace came from where; it and ``lower_bound_ns`` are there only when simulated. ``held_at_peak`` is
    by GPU (``"0"``, ``"1"``, …) and ``"host"``. ``notes`` holds whatever else the maker has to say, as plain JSON.
    """

    source: Source
    model: str
    machine: str
    plan: Plan
    layers: int
    steps: int
    warmup_steps: int
    gpu_planned_peak_bytes: tuple[int, ...]
    gpu_cap_bytes: tuple[int, ...]
    host_planned_peak_bytes: int
    host_store: dict[TensorKind, int]
    held_at_peak: dict[str, Peaks] = {}
    lower_bound_ns: int | None = None
    critical_path: CriticalPath | None = None
    provenance: dict[str, int] | None = None
    overlapping: int = 0
    notes: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Check that a step is left to measure."""
        if not 0 <= self.warmup_steps < self.steps - self.overlapping:
            overlap = f" and {self.overlapping} overlap" if self.overlapping else ""
            raise TimelineError(
                f"{self.steps} step(s) of which {self.warmup_steps} warm up{overlap} leave none to measure; record "
                "more steps"
            )

    @property
    def alone(self) -> range:
        """The steps that ran alone, warmed up."""
        return range(self.warmup_steps, self.steps - self.overlapping)

    @classmethod
    def of(cls, schedule: Schedule, machine: str, source: Source, *, steps: int, warmup_steps: int = 0) -> TimelineInfo:
        """The part that a schedule and the machine's name say; add the rest with ``msgspec.structs.replace``."""
        return cls(
            source=source,
            model=schedule.model,
            machine=machine,
            plan=schedule.plan,
            layers=schedule.layers,
            steps=steps,
            warmup_steps=warmup_steps,
            gpu_planned_peak_bytes=schedule.memory.gpu_peak_bytes,
            gpu_cap_bytes=schedule.memory.gpu_cap_bytes,
            host_planned_peak_bytes=schedule.memory.host_peak_bytes,
            host_store=schedule.memory.host_store,
        )

    @property
    def host_store_bytes(self) -> int:
        """What the host holds throughout."""
        return sum(self.host_store.values())


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """What happened when. ``frame`` and ``memory`` are shared, not copied: change neither.

    ``memory_source`` is the memory table, or makes it when it is first asked for.
    """

    info: TimelineInfo
    frame: pd.DataFrame
    memory_source: pd.DataFrame | Callable[[], pd.DataFrame]

    def __post_init__(self) -> None:
        """Raises TimelineError if the tables lack columns, steps, or order."""
        source = f"timeline of {self.info.model}"
        check_task_table(self.frame, self.info.steps, source)
        if isinstance(self.memory_source, pd.DataFrame):
            check_memory_table(self.memory_source, source)

    @cached_property
    def memory(self) -> pd.DataFrame:
        """The memory table."""
        return self.memory_source if isinstance(self.memory_source, pd.DataFrame) else self.memory_source()

    @classmethod
    def from_times(cls, schedule: Schedule, info: TimelineInfo, steps: Sequence[StepTimes]) -> Timeline:
        """The timeline of a schedule that ran at these times, warm-up steps first."""
        changes = [memory_changes(schedule, times) for times in steps]
        alone, together = changes[: info.alone.stop], changes[info.alone.stop :]
        runs = [*alone, sorted(chain.from_iterable(together), key=attrgetter("time_ns"))] if together else alone
        known = msgspec.structs.replace(info, held_at_peak=held_at_peaks(schedule, runs))
        return cls(known, task_table(schedule, steps), partial(memory_table, changes))

    @property
    def step_times_ns(self) -> list[int]:
        """From first start to last end of each step, warm-up steps included."""
        return metrics.step_times_ns(self)

    @property
    def step_time_ns(self) -> int:
        """Of a step alone: median of those after the warm-up."""
        return round(median(self.step_times_ns[step] for step in self.info.alone))

    @property
    def period_ns(self) -> int | None:
        """Time from the end of one step to the end of the next, in the long run (None: not recorded).

        Without overlap that is the step's time; of steps that overlap see ``mean_period_ns`` in ``replay.py``.
        """
        return metrics.period_ns(self)

    def to_frame(self) -> pd.DataFrame:
        """The task table, as a copy of one's own."""
        return self.frame.copy()

    def summary(self) -> dict[str, Any]:
        """Everything that ``--json`` prints, as plain JSON values. Figures are of one step.

        Raises TimelineError if the steps did not all move the same bytes.
        """
        return metrics.summary(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return self.info == other.info and self.frame.equals(other.frame) and self.memory.equals(other.memory)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        info = self.info
        what = f"{info.plan.policy.value} of {info.model} on {info.machine}"
        return f"<Timeline {info.source}: {what}, {format_seconds(self.step_time_ns / 1e9)} a step>"


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Write a timeline as ``.parquet`` or ``.csv``. Raises TimelineError for another name, FileError if it cannot."""
    write_tables(path, Tables(msgspec.json.encode(timeline.info), timeline.frame, timeline.memory))


def load_timeline(path: str | Path) -> Timeline:
    """Read a timeline file. Raises TimelineError that says what is wrong with it and where."""
    tables = read_tables(path)
    try:
        return Timeline(msgspec.json.decode(tables.info, type=TimelineInfo), tables.tasks, tables.memory)
    except msgspec.DecodeError as error:
        raise TimelineError(f"{path}: the header's info is wrong: {error}") from None
    except HarmonyError as error:  # of the plan, the info, or the tables
        raise TimelineError(f"{path}: {error}") from None
