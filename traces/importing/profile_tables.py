"""A LayerProfile from a folder of CSV tables.

    layer_time.csv    phase (FWD, BWD), microbatch, layer, gpu_seconds [, cpu_seconds: 0]
    layer_memory.csv  phase, microbatch, layer, bytes
    activation.csv    microbatch, layer, input_bytes
    layer_size.csv    layer, weight_bytes, buffer_bytes, optimizer_state_bytes
    update_time.csv   layer, cpu_seconds [, gpu_seconds: 0 throughout if not measured]
    info.json         optional: model, device, dtype, optimizer, label_bytes_per_sample

Layers count from 0 in forward order, the last is the loss. Times may be in ``_seconds``, ``_ms``, ``_us`` or ``_ns``.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from ..errors import TraceError
from .cells import Choice, Column, Duration, Whole
from .profile import BySize, LayerProfile, LayerSize, Pass
from .tables import Table, read_bytes, read_table

SIZES = "layer_size.csv"
ARTIFACT_DEVICE = "gtx-1080-ti"
"""What the public artifact's profiles were measured on."""

_LAYER, _MICROBATCH = Whole("layer", most=2**31), Whole("microbatch", least=1, most=2**31)
_PHASE = Choice("phase", tuple(each.value for each in Pass))
_BY_PHASE = ("phase", "microbatch", "layer")


class _Info(msgspec.Struct, frozen=True):
    """What is read of ``info.json``. ``artifact_folder`` says that the tables come from the public artifact."""

    model: str | None = None
    device: str | None = None
    dtype: str = "float32"
    optimizer: str = "unknown"
    label_bytes_per_sample: int = 0
    artifact_folder: str | None = None


def read_profile(folder: Path) -> LayerProfile:
    """Read and check all tables of a folder. Raises TraceError that names file, row, column and value."""
    info = _info(folder / "info.json")
    sizes = _table(
        folder / SIZES, ("layer",), Whole("weight_bytes"), Whole("buffer_bytes"), Whole("optimizer_state_bytes")
    )
    layers = len(sizes.rows)
    times = _table(folder / "layer_time.csv", _BY_PHASE, Duration("gpu"), Duration("cpu", required=False))
    _refuse_cpu_passes(times)
    memory = _table(folder / "layer_memory.csv", _BY_PHASE, Whole("bytes"))
    inputs = _table(folder / "activation.csv", ("microbatch", "layer"), Whole("input_bytes"))
    updates = _table(folder / "update_time.csv", ("layer",), Duration("cpu"), Duration("gpu", required=False))
    profile = LayerProfile(
        source=str(folder),
        model=info.model or folder.resolve().name,
        device=info.device or (ARTIFACT_DEVICE if info.artifact_folder else "unknown"),
        dtype=info.dtype,
        optimizer=info.optimizer,
        label_bytes_per_sample=info.label_bytes_per_sample,
        sizes=tuple(LayerSize(*(row[name] for name in LayerSize._fields)) for row in sizes.by_layer(layers)[()]),
        times_ns=_by_phase(times, layers, "gpu"),
        peak_bytes=_by_phase(memory, layers, "bytes"),
        input_bytes=BySize({u: _values(rows, "input_bytes") for (u,), rows in inputs.by_layer(layers).items()}),
        update_cpu_ns=_updates(updates, layers, "cpu"),
        update_gpu_ns=_updates(updates, layers, "gpu"),
    )
    _check_coverage(profile, times, memory, inputs)
    return profile


def _info(path: Path) -> _Info:
    if not path.exists():
        return _Info()
    try:
        return msgspec.json.decode(read_bytes(path), type=_Info)
    except msgspec.DecodeError as error:
        raise TraceError(str(path), "", f"is not what is expected: {error}") from None


def _table(path: Path, key: tuple[str, ...], *columns: Column) -> Table:
    keys: dict[str, Column] = {"phase": _PHASE, "microbatch": _MICROBATCH, "layer": _LAYER}
    return read_table(path, [*(keys[name] for name in key), *columns], key)


def _values(rows: Sequence[Any], name: str) -> tuple[Any, ...]:
    return tuple(row[name] for row in rows)


def _by_phase(table: Table, layers: int, name: str) -> dict[Pass, BySize[Any]]:
    groups = table.by_layer(layers)
    found = {
        each: BySize({u: _values(rows, name) for (phase, u), rows in groups.items() if phase == each.value})
        for each in Pass
    }
    for each, by_size in found.items():
        if not by_size.rows:
            raise TraceError(table.source, "", f"has no rows of phase {each.value}; both passes are needed")
    return found


def _updates(table: Table, layers: int, name: str) -> tuple[Decimal, ...] | None:
    """None if they were not measured: the column is not there, or 0 throughout."""
    rows = table.by_layer(layers)[()]
    found = tuple(row.values.get(name, Decimal(0)) for row in rows)
    return found if any(found) else None


def _refuse_cpu_passes(times: Table) -> None:
    for row in times.rows:
        if row.values.get("cpu"):
            problem = "is not 0; passes run on the GPU, so add what the host takes to the GPU's time, or write 0"
            raise TraceError(times.source, times.where(row, "cpu time"), problem)


def _check_coverage(profile: LayerProfile, times: Table, memory: Table, inputs: Table) -> None:
    """Every size with a time has its memory and inputs, and every backward the forward that it contains."""
    for each in Pass:
        for u in profile.times_ns[each].microbatches:
            where = f"phase {each.value}, microbatch {u}"
            if u not in profile.peak_bytes[each].rows:
                raise TraceError(memory.source, where, f"has no rows, but {times.source} has; write them")
            if u not in profile.input_bytes.rows:
                raise TraceError(inputs.source, f"microbatch {u}", f"has no rows, but {times.source} has; write them")
    for u in profile.times_ns[Pass.BACKWARD].microbatches:
        if u not in profile.times_ns[Pass.FORWARD].rows:
            problem = "has no rows, but phase BWD has, which contains the forward pass; write them"
            raise TraceError(times.source, f"phase FWD, microbatch {u}", problem)
