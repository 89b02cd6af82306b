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

from pathlib import Path

import msgspec

from ..errors import TraceError
from .assembly import ARTIFACT_DEVICE, About, ProfileTables, assemble
from .profile import LayerProfile
from .tables import read_bytes, read_table

FILES = {
    "times": "layer_time.csv",
    "memory": "layer_memory.csv",
    "inputs": "activation.csv",
    "sizes": "layer_size.csv",
    "updates": "update_time.csv",
}


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
    about = About(
        model=info.model or folder.resolve().name,
        device=info.device or (ARTIFACT_DEVICE if info.artifact_folder else "unknown"),
        dtype=info.dtype,
        optimizer=info.optimizer,
        label_bytes_per_sample=info.label_bytes_per_sample,
    )
    tables = ProfileTables.read(lambda name, spec: read_table(folder / FILES[name], spec.columns, spec.key))
    return assemble(str(folder), about, tables)


def _info(path: Path) -> _Info:
    if not path.exists():
        return _Info()
    try:
        return msgspec.json.decode(read_bytes(path), type=_Info)
    except msgspec.DecodeError as error:
        raise TraceError(str(path), "", f"is not what is expected: {error}") from None
