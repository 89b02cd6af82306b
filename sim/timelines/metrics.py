"""Figures of a Timeline: pure functions, each answering one question. Bytes and times are of one step.

Dictionaries by GPU are keyed as in JSON: ``"0"``, ``"1"``, …, and ``"host"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from ..errors import TimelineError
from ..schedule import Lane, TaskKind, TensorKind
from ..units import NS_PER_S
from .replay import mean_period_ns
from .table import HOST

if TYPE_CHECKING:
    from .timeline import Timeline

_COPY = ["kind", "gpu", "tensor_kind"]


def step_times_ns(timeline: Timeline) -> list[int]:
    """From first start to last end of each step, warm-up steps included."""
    steps = timeline.frame.groupby("step")
    return [int(end - start) for start, end in zip(steps["start_ns"].min(), steps["end_ns"].max(), strict=True)]


def period_ns(timeline: Timeline) -> int | None:
    """See :attr:`Timeline.period_ns`."""
    overlapping = timeline.info.overlapping
    if overlapping < 2:
        return None if timeline.info.plan.overlap_steps else timeline.step_time_ns
    ends = timeline.frame.groupby("step")["end_ns"].max().sort_index()
    return mean_period_ns([int(end) for end in ends.to_list()[-overlapping:]])


def swap_in_bytes(timeline: Timeline) -> dict[str, int]:
    """Bytes copied from the host to the GPUs, by tensor kind; every kind is there."""
    return _by_tensor_kind(_copied(timeline), TaskKind.SWAP_IN)


def swap_out_bytes(timeline: Timeline) -> dict[str, int]:
    """Bytes copied from the GPUs to the host, by tensor kind; every kind is there."""
    return _by_tensor_kind(_copied(timeline), TaskKind.SWAP_OUT)


def swap_bytes_by_gpu(timeline: Timeline) -> dict[str, dict[str, dict[str, int]]]:
    """For each GPU its ``swap_in_bytes`` and ``swap_out_bytes``."""
    copied = _copied(timeline)
    own = {gpu: copied[copied["gpu"] == gpu] for gpu in range(timeline.info.plan.gpus)}
    return {
        str(gpu): {
            "swap_in_bytes": _by_tensor_kind(rows, TaskKind.SWAP_IN),
            "swap_out_bytes": _by_tensor_kind(rows, TaskKind.SWAP_OUT),
        }
        for gpu, rows in own.items()
    }


def p2p_bytes(timeline: Timeline) -> int:
    """Bytes copied from GPU to GPU, those that went through the host included, each copy counted once."""
    return _total(_copied(timeline), TaskKind.P2P)


def allreduce_bytes(timeline: Timeline) -> int:
    """Bytes sent by all GPUs together in all-reduces and their halves, reduce-scatters and all-gathers."""
    return sum(collective_bytes(timeline).values())


def collective_bytes(timeline: Timeline) -> dict[str, int]:
    """The same by kind of collective; every kind is there."""
    copied = _copied(timeline)
    return {kind.value: _total(copied, kind) for kind in TaskKind if kind.is_collective}


def busy_s(timeline: Timeline) -> dict[str, dict[str, float]]:
    """Seconds for which each lane of each GPU and of the host is busy: the median over the steps that ran alone.

    A P2P copy keeps a lane of its sender and one of its receiver busy, an all-reduce the collective lane of every GPU.
    """
    rows = timeline.frame[timeline.frame["step"].isin(timeline.info.alone)]
    rows = rows.assign(busy_ns=rows["end_ns"] - rows["start_ns"])
    received = rows[rows["peer"].notna()]
    collective = rows[rows["lane"] == Lane.COLLECTIVE.value]
    parts = [
        rows[rows["lane"] != Lane.COLLECTIVE.value],
        received.assign(gpu=received["peer"], lane=Lane.P2P_IN.value),
        *(collective.assign(gpu=gpu) for gpu in range(timeline.info.plan.gpus)),
    ]
    placed = pd.concat([part[["step", "gpu", "lane", "busy_ns"]].astype({"gpu": "Int64"}) for part in parts])
    placed["gpu"] = placed["gpu"].fillna(HOST).astype("int64")
    by_step = placed.groupby(["gpu", "lane", "step"])["busy_ns"].sum()
    typical = by_step.groupby(["gpu", "lane"]).median()
    lanes = [lane.value for lane in Lane]
    gpus = [*range(timeline.info.plan.gpus), HOST]
    rows = typical.reset_index()
    found = {
        (int(gpu), str(lane)): float(busy) / NS_PER_S
        for gpu, lane, busy in zip(rows["gpu"], rows["lane"], rows["busy_ns"], strict=True)
    }
    return {
        "host" if gpu == HOST else str(gpu): {lane: found[gpu, lane] for lane in lanes if (gpu, lane) in found}
        for gpu in gpus
    }


def observed_peak_bytes(timeline: Timeline) -> list[int]:
    """The most bytes of buffers that each GPU really held at once, over all steps."""
    peaks = _observed_peaks(timeline)
    return [peaks.get(gpu, 0) for gpu in range(timeline.info.plan.gpus)]


def observed_host_peak_bytes(timeline: Timeline) -> int:
    """The most bytes that the host really held at once, its store included, over all steps."""
    return timeline.info.host_store_bytes + _observed_peaks(timeline).get(HOST, 0)


def fragmentation(timeline: Timeline) -> list[float]:
    """For each GPU the share of its planned peak that gaps between buffers take: 1 - held / peak.

    The planned peak is the highest address that the plan needs, held is the most that buffers take at once in the
    schedule's total order. Plans that count buffers instead of placing them have no gaps. Where memory is scarce there
    are hardly any; where there is room, a hole that was freed just now is left alone, so that nothing waits for it.
    """
    info = timeline.info
    return [
        1 - info.held_at_peak[str(gpu)].planned.bytes / peak if peak else 0.0
        for gpu, peak in enumerate(info.gpu_planned_peak_bytes)
    ]


def summary(timeline: Timeline) -> dict[str, Any]:
    """See :meth:`Timeline.summary`."""
    info = timeline.info
    plan = msgspec.json.decode(msgspec.json.encode(info.plan))
    del plan["family"]  # how the file tells plan types apart; the policy says as much
    step_time_s = timeline.step_time_ns / NS_PER_S
    period = timeline.period_ns
    period_s = None if period is None else period / NS_PER_S
    figures: dict[str, Any] = {
        "source": info.source,
        "model": info.model,
        "machine": info.machine,
        "policy": info.plan.policy.value,
        "plan": plan,
        "steps": info.steps,
        "warmup_steps": info.warmup_steps,
        "overlapping_steps": info.overlapping,
        "step_time_s": step_time_s,
        "period_s": period_s,
        "step_times_s": [time / NS_PER_S for time in timeline.step_times_ns],
        "throughput_samples_per_s": info.plan.minibatch / rate_s if (rate_s := period_s or step_time_s) else None,
        "peak_memory_bytes": list(info.gpu_planned_peak_bytes),
        "observed_peak_memory_bytes": observed_peak_bytes(timeline),
        "memory_cap_bytes": list(info.gpu_cap_bytes),
        "host_peak_bytes": info.host_planned_peak_bytes,
        "observed_host_peak_bytes": observed_host_peak_bytes(timeline),
        "swap_in_bytes": swap_in_bytes(timeline),
        "swap_out_bytes": swap_out_bytes(timeline),
        "swap_bytes_by_gpu": swap_bytes_by_gpu(timeline),
        "p2p_bytes": p2p_bytes(timeline),
        "allreduce_bytes": allreduce_bytes(timeline),
        "collective_bytes": collective_bytes(timeline),
        "busy_s": busy_s(timeline),
        "notes": info.notes,
    }
    if info.held_at_peak:
        figures["held_at_peak"] = {device: peaks.to_dict() for device, peaks in info.held_at_peak.items()}
        figures["fragmentation"] = fragmentation(timeline)
    if info.lower_bound_ns is not None:
        figures["lower_bound_s"] = info.lower_bound_ns / NS_PER_S
    if info.critical_path is not None:
        figures["critical_path"] = info.critical_path.shares()
    if info.provenance is not None:
        figures["provenance"] = info.provenance
    return figures


def _copied(timeline: Timeline) -> pd.DataFrame:
    """Bytes of one step by kind, GPU and tensor kind. Raises TimelineError if another step's differ."""
    copies = timeline.frame[timeline.frame["kind"].isin([kind.value for kind in TaskKind if kind.is_copy])]
    totals = copies.groupby(["step", *_COPY], dropna=False)["bytes"].sum().reset_index()
    steps = [rows.drop(columns="step").reset_index(drop=True) for _, rows in totals.groupby("step")]
    for number, step in enumerate(steps):
        if not step.equals(steps[0]):
            raise TimelineError(
                f"steps 0 and {number} of the timeline of {timeline.info.model} moved different bytes: "
                f"{_difference(steps[0], step)}; a schedule moves the same in every step"
            )
    return steps[0] if steps else totals


def _difference(expected: pd.DataFrame, found: pd.DataFrame) -> str:
    both = expected.merge(found, how="outer", on=_COPY, suffixes=("_expected", "_found")).fillna(
        {"bytes_expected": 0, "bytes_found": 0}
    )
    row = both[both["bytes_expected"] != both["bytes_found"]].iloc[0]
    what = f"{row['kind']} {row['tensor_kind']}" + ("" if pd.isna(row["gpu"]) else f" of GPU {row['gpu']}")
    return f"{what}, {int(row['bytes_expected'])} and {int(row['bytes_found'])} bytes"


def _by_tensor_kind(copied: pd.DataFrame, kind: TaskKind) -> dict[str, int]:
    totals = copied[copied["kind"] == kind.value].groupby("tensor_kind")["bytes"].sum().to_dict()
    return {tensor.value: int(totals.get(tensor.value, 0)) for tensor in TensorKind}


def _total(copied: pd.DataFrame, kind: TaskKind) -> int:
    return int(copied.loc[copied["kind"] == kind.value, "bytes"].sum())


def _observed_peaks(timeline: Timeline) -> dict[int, int]:
    """The most bytes held at once, by GPU (:data:`HOST`: the host's buffers), as :func:`sim.replay.peak_bytes` does."""
    moments = timeline.memory.groupby(["gpu", "time_ns"])["delta_bytes"].sum()
    held = moments.groupby("gpu").cumsum()
    peaks = held.groupby("gpu").max().reset_index()
    return dict(zip(peaks["gpu"].tolist(), peaks["delta_bytes"].tolist(), strict=True))
