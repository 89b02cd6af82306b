"""Predicted beside measured: the same schedule's two timelines, joined task by task.

The step's own times are medians over its steps, warm-up excluded, and so are a task's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, TypeVar

import msgspec
import pandas as pd

from ..errors import DifferentSchedules
from ..schedule import TaskKind
from ..units import NS_PER_S
from .comparison import Comparison, Pair
from .critical_path import LINK, Cause
from .timeline import Timeline

Key = TypeVar("Key", bound=Hashable)

IDENTITY = ["kind", "gpu", "lane", "layer_first", "layer_last", "microbatch", "tensor_kind"]
"""Columns that say what a task is; they must agree before its times can be compared."""


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
