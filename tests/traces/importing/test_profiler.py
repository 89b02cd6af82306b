"""Annotated files of PyTorch's profiler: medians of what was annotated, and what is wrong is named."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from traces.errors import TraceError
from traces.importing import import_trace
from traces.schema import Phase, Provenance
from traces.synthetic import uniform_trace

Raw = dict[str, Any]
KNOWN = uniform_trace(3, microbatches=(1, 2))


def event(name: str, dur: Any, cat: str = "user_annotation") -> Raw:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": 10.5, "dur": dur}


def raw() -> Raw:
    """A file about a known trace: every time annotated three times, 1 us apart, beside other events."""
    events: list[Raw] = [{"ph": "M", "name": "process_name"}, event("aten::mm", 5, "cpu_op")]
    for row in KNOWN.times:
        size = "" if row.phase.is_update else f" microbatch={row.microbatch}"
        name = f"harmony {row.phase.value} layer={row.layer}{size}"
        events += [event(name, row.duration_ns / 1000 + more) for more in (0, 1, -1)]
    header = msgspec.to_builtins(KNOWN)
    del header["times"]
    return {"schemaVersion": 1, "deviceProperties": [], "harmony": header, "traceEvents": events}


def written(path: Path, content: Raw) -> Path:
    data = json.dumps(content).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_times_are_medians_of_the_annotations(tmp_path: Path, name: str) -> None:
    trace = import_trace(written(tmp_path / name, raw())).trace
    assert trace.layers == KNOWN.layers
    assert trace.sizes == KNOWN.sizes
    durations = {(row.phase, row.layer, row.microbatch): row.duration_ns for row in trace.times}
    assert durations == {(row.phase, row.layer, row.microbatch): row.duration_ns for row in KNOWN.times}
    assert {row.spread_ns for row in trace.times} == {1000}
    assert {row.provenance for row in trace.times} == {Provenance.IMPORTED}


def test_events_in_any_order_say_the_same(tmp_path: Path) -> None:
    shuffled = raw()
    random.Random(1).shuffle(shuffled["traceEvents"])
    assert import_trace(written(tmp_path / "a.json", shuffled)) == import_trace(written(tmp_path / "b.json", raw()))


def test_the_gpus_time_counts_where_there_is_one(tmp_path: Path) -> None:
    changed = raw()
    changed["traceEvents"].insert(0, event("harmony forward layer=1 microbatch=2", 7.25, "gpu_user_annotation"))
    trace = import_trace(written(tmp_path / "t.json", changed)).trace
    row = next(row for row in trace.times if (row.phase, row.layer, row.microbatch) == (Phase.FORWARD, 1, 2))
    assert (row.duration_ns, row.spread_ns) == (7250, 0)


def _event_is(name: str, dur: Any = 5) -> Any:
    return lambda file: file["traceEvents"].append(event(name, dur))


GOOD = "harmony forward layer=1 microbatch=2"
WRONG: dict[str, tuple[Any, str]] = {
    "another version": (lambda file: file.update(schemaVersion=2), "schemaVersion: is 2"),
    "no sizes": (lambda file: file.pop("harmony"), "harmony: is missing: call profiler.add_metadata_json"),
    "no annotations": (lambda file: file.update(traceEvents=[{"ph": "M"}]), "has no annotation that begins with"),
    "a missing layer": (
        lambda file: file.update(traceEvents=[each for each in file["traceEvents"] if each["name"] != GOOD]),
        "times, phase forward: layer 1 (layer1) has no row for microbatch 2",
    ),
    "a layer too many": (_event_is("harmony forward layer=9 microbatch=1"), "there is no layer 9; layers are 0-2"),
    "not a number": (_event_is(GOOD, "nan"), "(phase forward, microbatch 2, layer 1), dur: found 'nan'"),
    "infinite": (_event_is(GOOD, "inf"), "(phase forward, microbatch 2, layer 1), dur: found 'inf'"),
    "negative": (_event_is(GOOD, -3), "(phase forward, microbatch 2, layer 1), dur: found '-3'"),
    "words": (_event_is(GOOD, "long"), "(phase forward, microbatch 2, layer 1), dur: found 'long'"),
    "absent": (_event_is(GOOD, None), "(phase forward, microbatch 2, layer 1), dur: found ''"),
    "huge": (_event_is(GOOD, 10**40), "(phase forward, microbatch 2, layer 1), dur: found '1000"),
    "a layer in words": (_event_is("harmony forward layer=x microbatch=1"), "layer: found 'x'; write a whole number"),
    "an unknown phase": (_event_is("harmony sideways layer=1 microbatch=1"), "phase: found 'sideways'; write one of"),
    "no microbatch": (_event_is("harmony forward layer=1"), "microbatch is 0, but forward needs at least 1 sample"),
    "another name": (_event_is("harmony layer 3"), "name: found 'harmony layer 3'; write for example"),
    "negative bytes": (
        lambda file: file["harmony"]["sizes"][0].update(saved_bytes=-1), "sizes, row 0 (layer 0), saved_bytes: found -1"
    ),
    "a misspelt key": (lambda file: file["harmony"].update(dtypes="x"), "has an unknown key 'dtypes'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    change, expected = WRONG[name]
    changed = raw()
    change(changed)
    with pytest.raises(TraceError) as caught:
        import_trace(written(tmp_path / "t.json.gz", changed))
    assert str(tmp_path / "t.json.gz") in str(caught.value)
    assert expected in str(caught.value)


def test_a_file_of_the_profiler_itself(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function

    header = msgspec.to_builtins(KNOWN)
    del header["times"]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for row in KNOWN.times:
            size = "" if row.phase.is_update else f" microbatch={row.microbatch}"
            with record_function(f"harmony {row.phase.value} layer={row.layer}{size}"):
                torch.ones(10).sum()
        profiler.add_metadata_json("harmony", json.dumps(header))
    profiler.export_chrome_trace(str(tmp_path / "t.json.gz"))
    trace = import_trace(tmp_path / "t.json.gz").trace
    assert len(trace.times) == len(KNOWN.times)
    assert all(row.duration_ns > 0 for row in trace.times)
