"""What the demo found: one table for people, one summary for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.tables import Table, signed_percent
from sim.timelines.comparison import Comparison, Pair
from sim.timelines.metrics import swap_in_bytes, swap_out_bytes
from sim.timelines.timeline import Timeline
from sim.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Outcome:
    """One schedule, predicted and measured. ``loss_max_abs_diff`` is against plain PyTorch, over all steps."""

    predicted: Timeline
    measured: Timeline
    comparison: Comparison
    loss_max_abs_diff: float

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return {
            "predicted": self.predicted.summary(),
            "measured": self.measured.summary(),
            "step_time_error": self.comparison.step_time_error,
            "loss_max_abs_diff": self.loss_max_abs_diff,
        }


@dataclass(frozen=True)
class DemoReport:
    """The demo's result. Speed-ups are of Harmony over ``dp-swap``; ``seconds`` is the whole demo."""

    harmony: Outcome
    dp_swap: Outcome
    state_bytes: int
    gpu_memory_bytes_total: int
    seconds: float
    output: Path

    @property
    def speedup_predicted(self) -> float:
        """Ratio of the predicted step times."""
        return self.dp_swap.predicted.step_time_ns / self.harmony.predicted.step_time_ns

    @property
    def speedup_measured(self) -> float:
        """Ratio of the measured step times."""
        return self.dp_swap.measured.step_time_ns / self.harmony.measured.step_time_ns

    def to_dict(self) -> dict[str, Any]:
        """As in ``summary.json``."""
        return {
            "harmony": self.harmony.to_dict(),
            "dp_swap": self.dp_swap.to_dict(),
            "state_bytes": self.state_bytes,
            "gpu_memory_bytes_total": self.gpu_memory_bytes_total,
            "speedup_predicted": self.speedup_predicted,
            "speedup_measured": self.speedup_measured,
            "seconds": self.seconds,
        }

    def __rich__(self) -> RenderableType:
        """The table, and what to make of it."""
        from rich.console import Group

        outcomes = (self.harmony, self.dp_swap)
        names = [outcome.predicted.info.plan.policy.value for outcome in outcomes]
        rows = tuple(row for name, outcome in zip(names, outcomes, strict=True) for row in _rows(name, outcome))
        columns = ("schedule", "of one step", "predicted", "measured", "error")
        table = Table(f"Training {self.harmony.predicted.info.model}", columns, rows, words=2)
        speedup_error = self.speedup_predicted / self.speedup_measured - 1
        gpus = len(self.harmony.predicted.info.gpu_cap_bytes)
        differences = [f"{name} {o.loss_max_abs_diff:.1e}" for name, o in zip(names, outcomes, strict=True)]
        return Group(
            table,
            f"{names[0]} over {names[1]}: {self.speedup_predicted:.2f}x faster predicted, "
            f"{self.speedup_measured:.2f}x measured ({signed_percent(speedup_error)}).",
            f"Weights, gradients and Adam state take {format_bytes(self.state_bytes)}; the {gpus} emulated GPUs hold "
            f"{format_bytes(self.gpu_memory_bytes_total)} together.",
            f"Losses differ from plain PyTorch's by at most: {', '.join(differences)}.",
            f"Took {format_seconds(self.seconds)}. Schedules, timelines, pictures and traces are in {self.output}.",
        )


def _rows(name: str, outcome: Outcome) -> Iterator[tuple[str, ...]]:
    """Figures of one schedule: predicted, measured, and the prediction's error."""
    for label, value, show in _FIGURES:
        pair = Pair(value(outcome.predicted), value(outcome.measured))
        yield name, label, show(pair.predicted), show(pair.measured), signed_percent(pair.error)


def _swapped(timeline: Timeline) -> float:
    return sum(swap_in_bytes(timeline).values()) + sum(swap_out_bytes(timeline).values())


def _throughput(timeline: Timeline) -> float:
    return float(timeline.summary()["throughput_samples_per_s"])


def _peak(timeline: Timeline) -> float:
    return float(max(timeline.summary()["observed_peak_memory_bytes"]))


_FIGURES: tuple[tuple[str, Callable[[Timeline], float], Callable[[float], str]], ...] = (
    ("time", lambda timeline: timeline.step_time_ns / 1e9, format_seconds),
    ("throughput, samples/s", _throughput, lambda value: f"{value:.2f}"),
    ("swapped", _swapped, format_bytes),
    ("peak memory of a GPU", _peak, format_bytes),
)
