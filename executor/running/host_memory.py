"""What a run takes of this computer's memory, told before it starts: it is refused then, instead of killed later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from sim.schedule import Schedule, TensorKind

from ..devices.facade import DeviceKind
from ..errors import NotEnoughHostMemory

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """Bytes that a run takes of the host, by what they are for. ``there_bytes`` of them (the model's own weights, which
    move into the host store) are taken already."""

    rows: Mapping[str, int]
    there_bytes: int

    @classmethod
    def of(cls, schedule: Schedule, kind: DeviceKind) -> HostMemory:
        """Of a run of this schedule. Emulated GPUs have their memory in the host, too."""
        memory = schedule.memory
        rows = {kind.value: size for kind, size in memory.host_store.items() if size}
        rows["stash and boundaries"] = memory.host_peak_bytes - memory.host_store_bytes
        if kind is DeviceKind.EMULATED:
            rows["emulated GPUs"] = sum(memory.gpu_peak_bytes)
        homes = schedule.plan.gpus if schedule.plan.policy.has_private_stores else 1
        there = sum(memory.host_store.get(each, 0) for each in (TensorKind.WEIGHT, TensorKind.BUFFER)) // homes
        return cls(rows, there)

    @property
    def needed_bytes(self) -> int:
        """What the run takes besides what is taken already."""
        return sum(self.rows.values()) - self.there_bytes

    def check(self) -> None:
        """Raises NotEnoughHostMemory if so much is not available."""
        available = available_bytes()
        if self.needed_bytes > available:
            raise NotEnoughHostMemory(self.rows, self.needed_bytes, available)


def available_bytes() -> int:
    """Memory that this process can still take: of the computer, or of its control group if that has less left."""
    available = int(psutil.virtual_memory().available)
    limit, used = (_read(_CGROUP / name) for name in ("memory.max", "memory.current"))
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _read(path: Path) -> int | None:
    """A number of bytes; None if there is no such limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max", or another system
        return None
