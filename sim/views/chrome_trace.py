"""Timelines as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (JSON object form). A process per GPU and one for the host, for each timeline; a thread
per lane, on which spans never overlap; a counter of held bytes by tensor kind per GPU; a process for the critical path.
Times are microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traces.files import write_atomically

from ..errors import TimelineError
from ..schedule import Lane
from ..tables import device_name
from ..timelines.spans import Span, held_bytes, spans
from ..timelines.timeline import Timeline

_LANE_THREADS = {lane: thread for thread, lane in enumerate(Lane, start=1)}
_ARGUMENTS = ("step", "task", "layer_first", "layer_last", "microbatch", "tensor_kind", "bytes", "peer")

Event = dict[str, Any]


def export_chrome(timelines: Mapping[str, Timeline], path: str | Path) -> None:
    """Write timelines, each under its label (``predicted``, ``measured``), to ``path``; ``.json.gz`` is gzipped.

    Raises TimelineError for a name that ends in neither ``.json`` nor ``.json.gz``, FileError if it cannot be written.
    """
    compressed = chrome_suffix(path) == ".json.gz"
    data = json.dumps(chrome_trace(timelines), allow_nan=False, separators=(",", ":")).encode()
    write_atomically(path, gzip.compress(data, mtime=0) if compressed else data)


def chrome_suffix(path: str | Path) -> str:
    """How the name of a Chrome trace ends. Raises TimelineError for another name, as viewers go by it."""
    for suffix in (".json", ".json.gz"):
        if Path(path).name.endswith(suffix):
            return suffix
    raise TimelineError(f"{path}: a Chrome trace's name ends in .json or .json.gz")


def chrome_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """The same as a value: ``{"traceEvents": […], "displayTimeUnit": "ms", "otherData": {…}}``."""
    events: list[Event] = []
    first_process = 0
    for label, timeline in timelines.items():
        devices: list[int | None] = [*range(timeline.info.plan.gpus), None]
        processes = {gpu: first_process + place for place, gpu in enumerate(devices, start=1)}
        first_process += len(devices) + 1
        events += _names(label, timeline, processes)
        events += (_span(span, processes[span.gpu]) for span in spans(timeline))
        for gpu, process in processes.items():
            events += _memory(timeline, gpu, process)
        events += _critical_path(label, timeline, first_process)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {label: _about(timeline) for label, timeline in timelines.items()},
    }


def _about(timeline: Timeline) -> dict[str, str]:
    info = timeline.info
    return {"model": info.model, "machine": info.machine, "policy": info.plan.policy.value, "source": info.source}


def _names(label: str, timeline: Timeline, processes: Mapping[int | None, int]) -> Iterator[Event]:
    """Metadata: what processes and threads are called, and their order."""
    for gpu, process in processes.items():
        yield _metadata("process_name", process, 0, name=f"{label}: {device_name(gpu)}")
        yield _metadata("process_sort_index", process, 0, sort_index=process)
    used = {(span.gpu, span.lane) for span in spans(timeline)}
    for gpu, lane in sorted(used, key=lambda key: (processes[key[0]], _LANE_THREADS[key[1]])):
        thread = _LANE_THREADS[lane]
        yield _metadata("thread_name", processes[gpu], thread, name=lane.value)
        yield _metadata("thread_sort_index", processes[gpu], thread, sort_index=thread)


def _metadata(what: str, process: int, thread: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": args}


def _span(span: Span, process: int) -> Event:
    row = span.row
    first, last = row["layer_first"], row["layer_last"]
    run = f"{first}" if first == last else f"{first}-{last}"
    name = " ".join(str(part) for part in (span.kind.value, row["tensor_kind"], run) if part is not None)
    if row["microbatch"] is not None:
        name += f" m{row['microbatch']}"
    return {
        "ph": "X",
        "name": name,
        "cat": span.kind.value,
        "pid": process,
        "tid": _LANE_THREADS[span.lane],
        "ts": span.start_ns / 1000,
        "dur": (span.end_ns - span.start_ns) / 1000,
        "args": {key: row[key] for key in _ARGUMENTS if row[key] is not None},
    }


def _critical_path(label: str, timeline: Timeline, process: int) -> Iterator[Event]:
    """The pieces of the critical path, on a track of their own, named by their cause."""
    path = timeline.info.critical_path
    if path is None:
        return
    yield _metadata("process_name", process, 0, name=f"{label}: critical path")
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    begin = int(timeline.frame.loc[timeline.frame["step"] == path.step, "start_ns"].min())
    for piece in path.pieces:
        yield {
            "ph": "X",
            "name": piece.cause,
            "cat": "critical path",
            "pid": process,
            "tid": 1,
            "ts": (begin + piece.start_ns) / 1000,
            "dur": (piece.end_ns - piece.start_ns) / 1000,
            "args": {"step": path.step} | ({} if piece.task is None else {"task": piece.task}),
        }


def _memory(timeline: Timeline, gpu: int | None, process: int) -> Iterator[Event]:
    """Counter events: bytes held from each time on, one series per tensor kind."""
    held = held_bytes(timeline, gpu)
    for time_ns, row in zip(held.index, held.to_dict("records"), strict=True):
        args = {kind: int(size) for kind, size in row.items()}
        yield {"ph": "C", "name": "memory (bytes)", "pid": process, "tid": 0, "ts": int(time_ns) / 1000, "args": args}
