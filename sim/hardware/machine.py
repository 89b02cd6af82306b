"""The Machine: what a server offers. GPUs hang off a tree of links whose root is host memory.

    host memory (DRAM bandwidth)
      └── link "root"         each link: bandwidth per direction, optional cap on both directions together, latency
            ├── gpu 0         a GPU names the link it hangs off; its own link is ``gpu.bandwidth``
            └── gpu 1

The values are immutable descriptions; what happens on them lives in the engines. ``files.py`` reads and writes
the TOML form, ``fabric.py`` says what each copy loads.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..errors import MachineError
from ..units import format_bytes

HOST = "host"

Rate = Annotated[float, msgspec.Meta(gt=0)]
Size = Annotated[int, msgspec.Meta(ge=0)]


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    """One GPU; ``name`` is its model. Usable memory is ``memory_bytes - reserved_bytes``.

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
    """A direct edge between two GPUs (indices) that copies between them take instead of the tree; ``bandwidth``
    (bytes/s) holds in each direction."""

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

    ``pace``: a task lasts this multiple of the CPU time it really used. The rates (bytes/s) are nominal: copies are
    throttled to them, and what they then reach is measured. ``links`` gives one for every link of the machine, by name.
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
        if not self.gpus:
            raise self._fault("it has no GPU; add a [[gpus]] table")
        self._check_links()
        for number, gpu in enumerate(self.gpus):
            if gpu.usable_bytes <= 0:
                raise self._fault(
                    f"GPU {number} reserves {format_bytes(gpu.reserved_bytes)} of {format_bytes(gpu.memory_bytes)}; "
                    "nothing is left"
                )
        joined = [frozenset(edge.gpus) for edge in self.nvlinks]
        for edge, pair in zip(self.nvlinks, joined, strict=True):
            if len(pair) < 2 or not pair <= set(range(len(self.gpus))):
                raise self._fault(f"NVLink between GPUs {edge.gpus}; it joins two of 0…{len(self.gpus) - 1}")
            if joined.count(pair) > 1:
                raise self._fault(f"several NVLinks between GPUs {edge.gpus}; add their bandwidths in one")
        names = {link.name for link in self.links}
        if self.emulation is not None and self.emulation.links.keys() != names:
            wrong = sorted(names ^ self.emulation.links.keys())
            raise self._fault(f"emulation.links must give a rate for each of its links, and no other; see {wrong}")

    def _check_links(self) -> None:
        parents = {link.name: link.parent for link in self.links}
        if len(parents) != len(self.links) or HOST in parents:
            raise self._fault(f"link names must be unique and not {HOST!r}")
        ends = [(f"GPU {number}", gpu.link) for number, gpu in enumerate(self.gpus)]
        ends += [(f"link {name}", parent) for name, parent in parents.items()]
        for owner, parent in ends:
            if parent != HOST and parent not in parents:
                raise self._fault(
                    f"{owner} hangs off unknown link {parent!r}; known: {', '.join([HOST, *sorted(parents)])}"
                )
        for name in parents:
            way = [name]
            while (parent := parents[way[-1]]) != HOST:
                if parent in way:
                    raise self._fault(f"links {sorted(way)} form a loop; one must hang off {HOST!r}")
                way.append(parent)

    def _fault(self, problem: str) -> MachineError:
        return MachineError(f"machine {self.name}: {problem}")

    def with_gpus(self, count: int) -> Machine:
        """This machine with its first ``count`` GPUs, or with its last one repeated until there are ``count``."""
        if count < 1:
            raise self._fault(f"{count} GPUs asked for; at least 1 is needed")
        gpus = self.gpus[:count] + self.gpus[-1:] * (count - len(self.gpus))
        nvlinks = tuple(edge for edge in self.nvlinks if max(edge.gpus) < count)
        return msgspec.structs.replace(self, gpus=gpus, nvlinks=nvlinks)

    def with_usable_memory(self, usable_bytes: int) -> Machine:
        """This machine with every GPU's usable memory set."""
        gpus = tuple(msgspec.structs.replace(gpu, memory_bytes=usable_bytes + gpu.reserved_bytes) for gpu in self.gpus)
        return msgspec.structs.replace(self, gpus=gpus)

    def with_host_memory(self, memory_bytes: int | None) -> Machine:
        """This machine with its host memory set (None: unlimited)."""
        return msgspec.structs.replace(self, host=msgspec.structs.replace(self.host, memory_bytes=memory_bytes))
