"""What a comparison found: pairs of figures, predicted and measured, and how they are told to people.

Errors are relative to what was measured, and signed: +5 % says that the prediction was 5 % too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..tables import Table, device_name, signed_percent
from ..units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Pair:
    """One figure, predicted and measured."""

    predicted: float
    measured: float

    @property
    def difference(self) -> float:
        """Predicted less measured."""
        return self.predicted - self.measured

    @property
    def error(self) -> float | None:
        """Signed error relative to the measured value; None where 0 was measured but not predicted."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.measured if self.measured else None

    def to_dict(self, unit: str) -> dict[str, float | None]:
        """``{"predicted_<unit>": …, "measured_<unit>": …, "error": …}``."""
        return {f"predicted_{unit}": self.predicted, f"measured_{unit}": self.measured, "error": self.error}


@dataclass(frozen=True, repr=False)
class Comparison:
    """What ``compare`` found.

    ``period_s`` is there where steps overlap.
    ``lanes``: busy seconds by (gpu, lane). ``swap_in`` and ``swap_out``: bytes by tensor kind, all GPUs together.
    ``causes``: seconds of the step's critical path by cause, if both timelines know theirs. ``tasks``: a row per task,
    with its durations, their difference, and when it started after the step did.
    """

    model: str
    policy: str
    plan: dict[str, Any]
    step_time_s: Pair
    period_s: Pair | None
    throughput_samples_per_s: Pair
    lanes: dict[tuple[str, str], Pair]
    swap_in: dict[str, Pair]
    swap_out: dict[str, Pair]
    p2p_bytes: Pair
    allreduce_bytes: Pair
    peak_memory_bytes: tuple[Pair, ...]
    host_peak_bytes: Pair
    causes: dict[str, Pair]
    tasks: pd.DataFrame

    @property
    def step_time_error(self) -> float:
        """Signed, relative to the measured step."""
        return self.step_time_s.difference / self.step_time_s.measured

    def differing_bytes(self) -> list[str]:
        """What moved another number of bytes than predicted, a sentence each."""
        named = [
            *((f"{kind} in", pair) for kind, pair in self.swap_in.items()),
            *((f"{kind} out", pair) for kind, pair in self.swap_out.items()),
            ("p2p", self.p2p_bytes),
            ("collective", self.allreduce_bytes),
        ]
        return [
            f"{name}: {p.predicted:.0f} B predicted, {p.measured:.0f} B measured" for name, p in named if p.difference
        ]

    def explanation(self) -> list[str]:
        """Where the difference comes from, in sentences."""
        late = -self.step_time_s.difference
        if late == 0:
            sentences = ["The step took exactly as long as predicted."]
        else:
            sentences = [
                f"The step took {format_seconds(abs(late))} {'longer' if late > 0 else 'less'} than predicted "
                f"(error {signed_percent(self.step_time_error)})."
            ]
            (gpu, lane), pair = max(self.lanes.items(), key=lambda item: -item[1].difference * (1 if late > 0 else -1))
            share = -pair.difference / late
            if share >= 0.5:
                sentences.append(
                    f"{_device(gpu)} {lane} explains most of it: it was busy for {format_seconds(pair.measured)}, not "
                    f"{format_seconds(pair.predicted)}."
                )
            else:
                sentences.append(
                    f"No lane's own work explains it: the largest part, {max(share, 0):.0%}, is {_device(gpu)} {lane}; "
                    "the rest is waiting."
                )
        if self.causes:
            cause, pair = max(self.causes.items(), key=lambda item: abs(item[1].difference))
            if pair.difference:
                sentences.append(
                    f"On the critical path, {cause} differs most: {format_seconds(pair.predicted)} predicted, "
                    f"{format_seconds(pair.measured)} measured."
                )
        differing = self.differing_bytes()
        sentences.append(
            f"Bytes moved differ: {'; '.join(differing)}."
            if differing
            else "Every tensor kind moved the bytes predicted."
        )
        return sentences

    def to_dict(self) -> dict[str, Any]:
        """Everything but ``tasks``, as plain JSON types."""
        lanes: dict[str, dict[str, Any]] = {}
        for (gpu, lane), pair in self.lanes.items():
            lanes.setdefault(gpu, {})[lane] = pair.to_dict("s")
        return {
            "model": self.model,
            "policy": self.policy,
            "plan": self.plan,
            "step_time_s": {"predicted": self.step_time_s.predicted, "measured": self.step_time_s.measured},
            "step_time_error": self.step_time_error,
            "period": None if self.period_s is None else self.period_s.to_dict("s"),
            "throughput": self.throughput_samples_per_s.to_dict("samples_per_s"),
            "lanes": lanes,
            "tensor_kinds": {
                kind: {
                    direction: pairs[kind].to_dict("bytes")
                    for direction, pairs in (("swap_in", self.swap_in), ("swap_out", self.swap_out))
                    if kind in pairs
                }
                for kind in {**self.swap_in, **self.swap_out}
            },
            "p2p": self.p2p_bytes.to_dict("bytes"),
            "allreduce": self.allreduce_bytes.to_dict("bytes"),
            "peak_memory": [pair.to_dict("bytes") for pair in self.peak_memory_bytes],
            "host_peak": self.host_peak_bytes.to_dict("bytes"),
            "causes": {cause: pair.to_dict("s") for cause, pair in self.causes.items()},
            "explanation": self.explanation(),
        }

    def tables(self) -> Iterator[Table]:
        """The comparison as tables for people."""
        columns = ("", "predicted", "measured", "error")
        yield Table(
            f"{self.model}, {self.policy}",
            columns,
            (
                _row("step time", self.step_time_s, format_seconds),
                *(_row("period", pair, format_seconds) for pair in [self.period_s] if pair),
                _row("throughput (samples/s)", self.throughput_samples_per_s, "{:.3f}".format),
                *(_row(f"peak memory GPU {i}", p, format_bytes) for i, p in enumerate(self.peak_memory_bytes)),
                _row("peak memory host", self.host_peak_bytes, format_bytes),
            ),
        )
        yield Table(
            "Busy time by lane",
            columns,
            tuple(_row(f"{_device(gpu)} {lane}", pair, format_seconds) for (gpu, lane), pair in self.lanes.items()),
        )
        moved = [(f"{kind} in", self.swap_in[kind]) for kind in self.swap_in]
        moved += [(f"{kind} out", self.swap_out[kind]) for kind in self.swap_out]
        moved += [("p2p", self.p2p_bytes), ("collective", self.allreduce_bytes)]
        yield Table(
            "Bytes moved by tensor kind",
            columns,
            tuple(_row(name, pair, format_bytes) for name, pair in moved if pair.predicted or pair.measured),
        )
        if self.causes:
            rows = tuple(
                _row(cause, pair, format_seconds)
                for cause, pair in self.causes.items()
                if pair.predicted or pair.measured
            )
            yield Table("Critical path by cause", columns, rows)

    def __rich__(self) -> RenderableType:
        """Tables, then the explanation."""
        from rich.console import Group

        return Group(*self.tables(), "\n".join(self.explanation()))

    def _repr_html_(self) -> str:
        """Tables, then the explanation, for a notebook."""
        return "".join(table._repr_html_() for table in self.tables()) + f"<p>{' '.join(self.explanation())}</p>"

    def __repr__(self) -> str:
        predicted, measured = format_seconds(self.step_time_s.predicted), format_seconds(self.step_time_s.measured)
        error = signed_percent(self.step_time_error)
        return f"<Comparison {self.policy}: step {predicted} predicted, {measured} measured, {error}>"


def _device(gpu: str) -> str:
    """A key of ``busy_s`` as people read it."""
    return device_name(int(gpu) if gpu.isdecimal() else None)


def _row(name: str, pair: Pair, show: Callable[[float], str]) -> tuple[str, ...]:
    return name, show(pair.predicted), show(pair.measured), signed_percent(pair.error)
