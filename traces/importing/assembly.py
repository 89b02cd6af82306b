"""A LayerProfile from its five tables, wherever their rows come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgspec

from ..errors import TraceError
from .cells import Choice, Column, Duration, Whole
from .profile import BySize, LayerProfile, LayerSize, Pass, Sources
from .tables import Table

ARTIFACT_DEVICE = "gtx-1080-ti"
"""What the public artifact's profiles were measured on."""

_LAYER, _MICROBATCH = Whole("layer", most=2**31), Whole("microbatch", least=1, most=2**31)
_PHASE = Choice("phase", tuple(each.value for each in Pass))


class About(msgspec.Struct, frozen=True):
    """What a profile is of."""

    model: str
    device: str = "unknown"
    dtype: str = "float32"
    optimizer: str = "unknown"
    label_bytes_per_sample: int = 0


class Spec(msgspec.Struct, frozen=True):
    """The columns of a table, those of its key first."""

    columns: tuple[Column, ...]
    key: tuple[str, ...]


TIMES = Spec(
    (_PHASE, _MICROBATCH, _LAYER, Duration("gpu"), Duration("cpu", required=False)), ("phase", "microbatch", "layer")
)
MEMORY = Spec((_PHASE, _MICROBATCH, _LAYER, Whole("bytes")), ("phase", "microbatch", "layer"))
INPUTS = Spec((_MICROBATCH, _LAYER, Whole("input_bytes")), ("microbatch", "layer"))
SIZES = Spec((_LAYER, *map(Whole, LayerSize._fields)), ("layer",))
UPDATES = Spec((_LAYER, Duration("cpu"), Duration("gpu", required=False)), ("layer",))


@dataclass(frozen=True, kw_only=True)
class ProfileTables:
    """The five tables, each as its spec says."""

    times: Table
    memory: Table
    inputs: Table
    sizes: Table
    updates: Table

    @classmethod
    def read(cls, read: Callable[[str, Spec], Table]) -> ProfileTables:
        """Read each by its name here."""
        specs = {"times": TIMES, "memory": MEMORY, "inputs": INPUTS, "sizes": SIZES, "updates": UPDATES}
        return cls(**{name: read(name, spec) for name, spec in specs.items()})


def assemble(source: str, about: About, tables: ProfileTables) -> LayerProfile:
    """The profile. Raises TraceError where a layer or a microbatch size is missing in a table that others have."""
    layers = len(tables.sizes.rows)
    _refuse_cpu_passes(tables.times)
    profile = LayerProfile(
        source=source,
        sources=Sources(tables.times.source, tables.memory.source, tables.updates.source),
        **msgspec.structs.asdict(about),
        sizes=tuple(LayerSize(*(row[name] for name in LayerSize._fields)) for row in tables.sizes.by_layer(layers)[()]),
        times_ns=_by_phase(tables.times, layers, "gpu"),
        peak_bytes=_by_phase(tables.memory, layers, "bytes"),
        input_bytes=BySize({u: _values(rows, "input_bytes") for (u,), rows in tables.inputs.by_layer(layers).items()}),
        update_cpu_ns=_updates(tables.updates, layers, "cpu"),
        update_gpu_ns=_updates(tables.updates, layers, "gpu"),
    )
    _check_coverage(profile, tables.times, tables.memory, tables.inputs)
    return profile


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
