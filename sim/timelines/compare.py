"""Predicted beside measured: the same schedule's two timelines, joined task by task.

Errors are relative to what was measured, and signed: +5 % says that the prediction was 5 % too long. The step's own
times are medians over its steps, warm-up excluded, and so are a task's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pandas as pd

from ..errors import DifferentSchedules
from ..schedule import TaskKind
from ..tables import Table, device_name, signed_percent
from ..units import NS_PER_S, format_bytes, format_seconds
from .critical_path import LINK, Cause
from .timeline import Timeline

if TYPE_CHECKING:
    from rich.console import RenderableType

Key = TypeVar("Key", bound=Hashable)

IDENTITY = ["kind", "gpu", "lane", "layer_first", "layer_last", "microbatch", "tensor_kind"]
"""Columns that say what a task is; they must agree before its times can be compared."""


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
    """What :func:`compare` found.

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


def compare(predicted: Timeline, measured: Timeline) -> Comparison:
    """Join two timelines of one schedule.

    Raises :class:`DifferentSchedules` if they are not of one schedule, or are handed over the wrong way round.
    """
    _check_same_schedule(predicted, measured)
    before, after = predicted.summary(), measured.summary()

    def scalar(key: str) -> Pair:
        return Pair(before[key], after[key])

    return Comparison(
        model=predicted.info.model,
        policy=before["policy"],
        plan=before["plan"],
        step_time_s=scalar("step_time_s"),
        period_s=scalar("period_s") if predicted.info.overlapping and measured.info.overlapping else None,
        throughput_samples_per_s=scalar("throughput_samples_per_s"),
        lanes=_pairs(_flat(before["busy_s"]), _flat(after["busy_s"])),
        swap_in=_pairs(before["swap_in_bytes"], after["swap_in_bytes"]),
        swap_out=_pairs(before["swap_out_bytes"], after["swap_out_bytes"]),
        p2p_bytes=scalar("p2p_bytes"),
        allreduce_bytes=scalar("allreduce_bytes"),
        peak_memory_bytes=tuple(map(Pair, before["observed_peak_memory_bytes"], after["observed_peak_memory_bytes"])),
        host_peak_bytes=scalar("observed_host_peak_bytes"),
        causes=_causes(predicted, measured),
        tasks=_join(predicted, measured),
    )


def _check_same_schedule(predicted: Timeline, measured: Timeline) -> None:
    if predicted.info.source == "measured" and measured.info.source == "simulated":
        raise DifferentSchedules("the predicted timeline was measured and the measured one simulated; swap the two")
    before, after = _planned(predicted), _planned(measured)
    unequal = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if unequal:
        faults = ", ".join(f"{name} {before.get(name)} and {after.get(name)}" for name in unequal)
        raise DifferentSchedules(
            f"the timelines are of different schedules, predicted and measured: {faults}; compare a simulation and a "
            "run of one schedule file"
        )
    left, right = _identities(predicted), _identities(measured)
    if not left.index.equals(right.index):
        raise DifferentSchedules(
            f"the timelines are of different schedules: {len(left)} tasks predicted, {len(right)} measured; compare a "
            "simulation and a run of one schedule file"
        )
    differing = left.index[(left != right).any(axis=1)]
    if len(differing):
        task = differing[0]
        raise DifferentSchedules(
            f"the timelines are of different schedules: task {task} is {left.loc[task].to_dict()} in the predicted "
            f"one, {right.loc[task].to_dict()} in the measured one; compare a simulation and a run of one schedule file"
        )


def _planned(timeline: Timeline) -> dict[str, Any]:
    """What a timeline is of, and its plan, field by field."""
    info = timeline.info
    return {"model": info.model, "layers": info.layers, **msgspec.to_builtins(info.plan)}


def _identities(timeline: Timeline) -> pd.DataFrame:
    """What each task is, by task id, as text so that a missing value equals a missing value."""
    one_step = timeline.frame[timeline.frame["step"] == 0]
    identities: pd.DataFrame = one_step.set_index("task")[IDENTITY].astype("string").fillna("").sort_index()
    return identities


def _join(predicted: Timeline, measured: Timeline) -> pd.DataFrame:
    identity = measured.frame.drop_duplicates("task").set_index("task").sort_index()[IDENTITY]
    joined = pd.concat(
        [identity, _medians(predicted).add_prefix("predicted_"), _medians(measured).add_prefix("measured_")], axis=1
    )
    return joined.assign(difference_ns=joined["predicted_duration_ns"] - joined["measured_duration_ns"])


def _medians(timeline: Timeline) -> pd.DataFrame:
    """Per task: bytes, start after its step's start, and duration; medians over the steps that ran alone."""
    frame = timeline.frame
    frame = frame[frame["step"].isin(timeline.info.alone)]
    step_start = frame.groupby("step")["start_ns"].transform("min")
    figures = pd.DataFrame(
        {
            "task": frame["task"],
            "bytes": frame["bytes"],
            "start_ns": frame["start_ns"] - step_start,
            "duration_ns": frame["end_ns"] - frame["start_ns"],
        }
    )
    by_task: pd.DataFrame = figures.groupby("task").median()
    return by_task


def _flat(busy_s: Mapping[str, Mapping[str, float]]) -> dict[tuple[str, str], float]:
    return {(gpu, lane): seconds for gpu, lanes in busy_s.items() for lane, seconds in lanes.items()}


def _pairs(before: Mapping[Key, float], after: Mapping[Key, float]) -> dict[Key, Pair]:
    """Both sides of every key that either has; what one side lacks is 0."""
    return {key: Pair(before.get(key, 0), after.get(key, 0)) for key in {**before, **after}}


def _causes(predicted: Timeline, measured: Timeline) -> dict[str, Pair]:
    """Seconds of the critical path by cause: each timeline's pieces, scaled to its step. Recompute counts as compute,
    since a run does not time it apart; copies count by lane where one of the two does not know the links."""
    by_link = all(_knows_links(timeline) for timeline in (predicted, measured))
    before, after = _path_s(predicted, by_link), _path_s(measured, by_link)
    return _pairs(before, after) if before and after else {}


def _knows_links(timeline: Timeline) -> bool:
    path = timeline.info.critical_path
    lanes = {kind.value for kind in TaskKind if kind.is_copy}
    return path is not None and not any(piece.cause in lanes for piece in path.pieces)


def _path_s(timeline: Timeline, by_link: bool) -> dict[str, float]:
    path = timeline.info.critical_path
    if path is None or not path.pieces:
        return {}
    kinds = dict(zip(timeline.frame["task"], timeline.frame["kind"], strict=True))
    spent = {cause.value: 0.0 for cause in Cause if cause is not Cause.RECOMPUTE}
    per_ns = timeline.step_time_ns / NS_PER_S / path.pieces[-1].end_ns
    for piece in path.pieces:
        cause = Cause.COMPUTE.value if piece.cause == Cause.RECOMPUTE.value else piece.cause
        if cause.startswith(LINK) and not by_link:
            cause = kinds[piece.task]
        spent[cause] = spent.get(cause, 0.0) + (piece.end_ns - piece.start_ns) * per_ns
    return spent


def _device(gpu: str) -> str:
    """A key of ``busy_s`` as people read it."""
    return device_name(int(gpu) if gpu.isdecimal() else None)


def _row(name: str, pair: Pair, show: Callable[[float], str]) -> tuple[str, ...]:
    return name, show(pair.predicted), show(pair.measured), signed_percent(pair.error)
