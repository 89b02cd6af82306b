"""A Trace from what PyTorch's profiler exports (a Chrome trace, gzip or not), if layers were annotated.

Run each layer some times for each microbatch size under ``torch.profiler.record_function`` with a name such as

    harmony forward layer=3 microbatch=4      (backward, backward_input, backward_weight likewise, without recompute)
    harmony update_cpu layer=3                (update_gpu likewise)

and say what times cannot before exporting; ``layers`` and ``sizes`` hold rows as in a trace file, without ``times``:

    profiler.add_metadata_json("harmony", json.dumps({"model": …, "device": …, "dtype": …, "optimizer": …,
                                                      "label_bytes_per_sample": …, "layers": […], "sizes": […]}))

An annotation's time is the GPU's where the profiler saw kernels in it (``gpu_user_annotation``), else the host's. Times
are medians over the repeats, spreads their interquartile ranges. The file is read piece by piece.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

import msgspec

from ..checks import check_trace
from ..decode import convert_trace
from ..errors import TraceError
from ..schema import Phase, Provenance, TimeRow, Trace
from .cells import Choice, Duration, Whole
from .json_stream import entries
from .tables import text_of

_EVENTS, _METADATA, _VERSION = "traceEvents", "harmony", "schemaVersion"
_KNOWN_VERSION = 1
_MARK = "harmony "
_NAME = re.compile(r"harmony (?P<phase>\S+) layer=(?P<layer>\S+)(?: microbatch=(?P<microbatch>\S+))?")
_ON_GPU, _ON_HOST = "gpu_user_annotation", "user_annotation"
_CELLS: dict[str, Choice | Whole] = {
    "phase": Choice("phase", tuple(phase.value for phase in Phase)),
    "layer": Whole("layer", most=2**31),
    "microbatch": Whole("microbatch", most=2**31),
}
_DURATION = Duration("dur")


class _Key(NamedTuple):
    layer: int
    phase: str
    microbatch: int


def read_trace(path: Path) -> Trace:
    """Read and check a profiler's trace. Raises TraceError that names the file, the event, its field and value."""
    source = str(path)
    durations: dict[str, dict[_Key, list[Decimal]]] = {_ON_GPU: defaultdict(list), _ON_HOST: defaultdict(list)}
    metadata: Any = None
    number = 0
    for name, value in entries(path, _EVENTS):
        if name == _EVENTS:
            number += 1
            if isinstance(value, dict) and str(value.get("name", "")).startswith(_MARK) and value.get("ph") == "X":
                by_key = durations.get(str(value.get("cat")))
                if by_key is not None:
                    key = _key(value, f"event {number}", source)
                    by_key[key].append(_checked(_DURATION, value.get("dur"), "dur_us", _where(number, key), source))
        elif name == _METADATA:
            metadata = value
        elif name == _VERSION and value != _KNOWN_VERSION:
            raise TraceError(source, _VERSION, f"is {value!r}; the profiler's version {_KNOWN_VERSION} is read")
    if not any(durations.values()):
        raise TraceError(source, _EVENTS, f'has no annotation that begins with "{_MARK}", of {number} events')
    return _trace(metadata, {**durations[_ON_HOST], **durations[_ON_GPU]}, source)


def _trace(metadata: Any, durations: Mapping[_Key, list[Decimal]], source: str) -> Trace:
    """The GPU's times have come after the host's, and so take their place."""
    raw = msgspec.json.decode(metadata) if isinstance(metadata, str) else metadata
    if not isinstance(raw, dict):
        raise TraceError(
            source, _METADATA, 'is missing: call profiler.add_metadata_json("harmony", …) before exporting the trace'
        )
    rows = [_row(key, own) for key, own in durations.items()]
    rows.sort(key=lambda row: (row.layer, list(Phase).index(row.phase), row.microbatch))
    trace = convert_trace({**raw, "times": msgspec.to_builtins(rows)}, source)
    check_trace(trace, source)
    return trace


def _row(key: _Key, durations: list[Decimal]) -> TimeRow:
    lower, _, upper = quantiles(durations, n=4, method="inclusive") if len(durations) > 1 else [Decimal(0)] * 3
    return TimeRow(
        layer=key.layer,
        phase=Phase(key.phase),
        microbatch=key.microbatch,
        duration_ns=round(median(durations)),
        spread_ns=round(upper - lower),
        provenance=Provenance.IMPORTED,
    )


def _key(event: Mapping[str, Any], where: str, source: str) -> _Key:
    name = str(event["name"])
    match = _NAME.fullmatch(name)
    if match is None:
        wanted = "write for example harmony forward layer=3 microbatch=4, or harmony update_cpu layer=3"
        raise TraceError(source, f"{where}, name", f"found {name!r}; {wanted}")
    found = {field: match[field] or "0" for field in _CELLS}
    return _Key(
        **{field: _checked(cell, found[field], field, f"{where} ({name})", source) for field, cell in _CELLS.items()}
    )


def _where(number: int, key: _Key) -> str:
    return f"event {number} (phase {key.phase}, microbatch {key.microbatch}, layer {key.layer})"


def _checked(cell: Choice | Whole | Duration, value: object, heading: str, where: str, source: str) -> Any:
    text = text_of(value)
    try:
        return cell.value(text, heading)
    except ValueError as error:
        shown = heading.removesuffix("_us")
        raise TraceError(source, f"{where}, {shown}", f"found {text[:60]!r}; {error}") from None
