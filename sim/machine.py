"""The Machine: what a server offers. GPUs hang off a tree of links whose root is host memory.

    host memory (DRAM bandwidth)
      └── link "root"         each link: bandwidth per direction, optional cap on both directions together, latency
            ├── gpu 0         a GPU names the link it hangs off; its own link is ``gpu.bandwidth``
            └── gpu 1

The values are immutable descriptions; what happens on them lives in the engines. ``files.py`` reads the TOML form.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from .errors import MachineError
from .units import format_bytes

HOST = "host"

Rate = Annotated[float, msgspec.Meta(gt=0)]
Size = Annotated[int, msgspec.Meta(ge=0)]


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of the machine's parts: immutable, named fields only."""


class Link(_Value, frozen=True):
    """A full-duplex link towards the host.

    ``bandwidth`` (bytes/s) holds in each direction; ``both_directions`` (bytes/s), if given, caps their sum.
    ``parent`` is the next link towards the host, or ``"host"``.
    """

    name: str
    bandwidth: Rate
    parent: str = HOST
    both_directions: Rate | None = None
    latency_ns: Size = 0


class Gpu(_Value, frozen=True):
    """One GPU: usable memory is ``memory_bytes - reserved_bytes``.

    ``speed`` is relative to the device on which traces for this machine were made (0.5: half as fast).
    ``bandwidth`` (bytes/s, each direction) is its own link, hanging off link ``link`` (or the host).
    ``p2p_bandwidth`` caps a single copy to or from another GPU; ``p2p`` False sends such copies through the host.
    ``copy_overhead_ns`` is what a copy costs before its first byte.
    """

    name: str
    memory_bytes: Size
    bandwidth: Rate
    link: str = HOST
    reserved_bytes: Size = 0
    speed: Rate = 1.0
    p2p: bool = True
    p2p_bandwidth: Rate | None = None
    both_directions: Rate | None = None
    copy_overhead_ns: Size = 0

    @property
    def usable_bytes(self) -> int:
        """What a plan may use."""
        return self.memory_bytes - self.reserved_bytes


class NvLink(_Value, frozen=True):
    """A direct edge between two GPUs (indices), used instead of the tree for copies between them."""

    gpus: tuple[int, int]
    bandwidth: Rate


class Host(_Value, frozen=True):
    """Host memory and CPU. ``memory_bytes`` None is unlimited (what-if). ``speed`` scales CPU updates as a GPU's."""

    memory_bytes: Size | None
    dram_bandwidth: Rate
    cores: Annotated[int, msgspec.Meta(ge=1)]
    speed: Rate = 1.0


class Emulation(_Value, frozen=True):
    """How the emulator plays this machine on a CPU; nobody else reads it and calibration never changes it.

    ``pace``: a task lasts this multiple of the CPU time it really used. ``links`` and ``gpu_bandwidth`` are the
    nominal rates (bytes/s) that copies are throttled to; ``copy_overhead_ns`` is not emulated but measured.
    """

    pace: Annotated[float, msgspec.Meta(ge=1)]
    gpu_bandwidth: Rate
    p2p_bandwidth: Rate | None = None
    links: dict[str, Rate] = {}


class Machine(_Value, frozen=True):
    """A server. Build one with :func:`sim.machine_files.load_machine` or directly."""

    name: str
    host: Host
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...] = ()
    nvlinks: tuple[NvLink, ...] = ()
    emulation: Emulation | None = None
    description: str = ""

    def __post_init__(self) -> None:
        """Check that the links form a tree, and that every name resolves."""
        by_name = {link.name: link for link in self.links}
        if len(by_name) != len(self.links) or HOST in by_name:
            raise MachineError(f"machine {self.name}: link names must be unique and not {HOST!r}")
        if not self.gpus:
            raise MachineError(f"machine {self.name}: it has no GPU; add a [[gpus]] table")
        hangs_off = [(f"gpu {g.name}", g.link) for g in self.gpus] + [(f"link {k.name}", k.parent) for k in self.links]
        for owner, parent in hangs_off:
            if parent != HOST and parent not in by_name:
                known = ", ".join([HOST, *by_name])
                raise MachineError(f"machine {self.name}: {owner} hangs off unknown link {parent!r}; known: {known}")
        for link in self.links:
            seen, at = {link.name}, link.parent
            while at != HOST:
                if at in seen:
                    raise MachineError(
                        f"machine {self.name}: links {sorted(seen)} form a loop; one must hang off {HOST!r}"
                    )
                seen.add(at)
                at = by_name[at].parent
        for gpu in self.gpus:
            if gpu.usable_bytes <= 0:
                raise MachineError(
                    f"machine {self.name}: gpu {gpu.name} reserves {format_bytes(gpu.reserved_bytes)} "
                    f"of {format_bytes(gpu.memory_bytes)}; nothing is left"
                )
        for edge in self.nvlinks:
            if edge.gpus[0] == edge.gpus[1] or not all(0 <= g < len(self.gpus) for g in edge.gpus):
                raise MachineError(f"machine {self.name}: nvlink between GPUs {edge.gpus}; there are {len(self.gpus)}")

    def with_gpus(self, count: int) -> Machine:
        """This machine with its first ``count`` GPUs, or with its last one repeated until there are ``count``."""
        if count < 1:
            raise MachineError(f"machine {self.name}: {count} GPUs asked for; at least 1 is needed")
        last = self.gpus[-1]
        extra = tuple(msgspec.structs.replace(last, name=str(i)) for i in range(len(self.gpus), count))
        nvlinks = tuple(edge for edge in self.nvlinks if max(edge.gpus) < count)
        return msgspec.structs.replace(self, gpus=self.gpus[:count] + extra, nvlinks=nvlinks)

    def with_usable_memory(self, usable_bytes: int) -> Machine:
        """This machine with every GPU's usable memory set."""
        gpus = tuple(msgspec.structs.replace(gpu, memory_bytes=usable_bytes + gpu.reserved_bytes) for gpu in self.gpus)
        return msgspec.structs.replace(self, gpus=gpus)

    def with_host_memory(self, memory_bytes: int | None) -> Machine:
        """This machine with its host memory set (None: unlimited)."""
        return msgspec.structs.replace(self, host=msgspec.structs.replace(self.host, memory_bytes=memory_bytes))
