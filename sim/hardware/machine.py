"""The Machine: what a server offers. GPUs hang off a tree of links whose root is the host.

    host                      memory, its DRAM bandwidth; one or several sockets, joined by an interconnect
      └── link "root"         each link: bandwidth by direction, optional cap on both directions together, latency,
            ├── gpu 0         efficiency by size; a GPU names the link it hangs off; its own is ``gpu.bandwidth``
            └── gpu 1

The values are immutable descriptions; what happens on them lives in the engines. ``files.py`` reads and writes
the TOML form, ``fabric.py`` says what each copy loads.
"""

from __future__ import annotations

import math
from enum import Enum
from itertools import pairwise
from typing import Annotated

import msgspec

from ..errors import MachineError
from ..units import format_bytes

HOST = "host"

MOST_GPUS = 1024
"""More are a slip of the pen; one server has nowhere near as many."""

Rate = Annotated[float, msgspec.Meta(gt=0)]
Size = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

Efficiency = tuple[tuple[Size, Share], ...]
"""What copies of some sizes (bytes, ascending) reach, as shares of the bandwidth. Times of sizes between them are
interpolated; smaller copies reach the first share, larger ones the last. Empty: any copy reaches all."""


class Sharing(Enum):
    """How copies at the same time share links.

    ``FAIR``: max-min fairly. ``PRIORITY``: copies that a GPU's standing compute lane waits for before all others, and
    copies out of GPUs after all others; max-min fairly among each of these. This is for the simulator: what runs on
    GPUs, emulated or real, shares as their links do.
    """

    FAIR = "fair"
    PRIORITY = "priority"


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the machine's parts: immutable, named fields only."""


class _Link(_Value, frozen=True, kw_only=True):
    """What is said of any full-duplex link towards the host.

    ``bandwidth`` (bytes/s) holds in each direction, or away from the host only, if ``bandwidth_up`` says another one
    towards it; ``both_directions`` (bytes/s), if given, caps their sum. What hangs off the host is plugged into
    ``socket``.
    """

    bandwidth: Rate
    bandwidth_up: Rate | None = None
    both_directions: Rate | None = None
    efficiency: Efficiency = ()
    socket: Size = 0

    @property
    def rate_up(self) -> float:
        """Bandwidth towards the host."""
        return self.bandwidth_up or self.bandwidth


class Link(_Link, frozen=True, kw_only=True):
    """A link towards the host; ``parent`` is the next one, or ``"host"``."""

    name: str
    parent: str = HOST
    latency_ns: Size = 0


class Gpu(_Link, frozen=True, kw_only=True):
    """One GPU with its own link, which hangs off link ``link`` (or the host).

    ``name`` is its model. Usable memory is ``memory_bytes - reserved_bytes``.
    ``speed`` is relative to the device on which traces for this machine were made (0.5: half as fast).
    ``p2p_bandwidth`` caps a single copy to or from another GPU; ``p2p`` False sends such copies through the host.
    ``copy_overhead_ns`` is what a copy costs before its first byte.
    """

    name: str
    memory_bytes: Size
    link: str = HOST
    reserved_bytes: Size = 0
    speed: Rate = 1.0
    p2p: bool = True
    p2p_bandwidth: Rate | None = None
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
    efficiency: Efficiency = ()


class Host(_Value, frozen=True):
    """Host memory and CPU. ``memory_bytes`` None is unlimited (what-if). ``speed`` scales CPU updates as a GPU's.

    What is in host memory is spread evenly over the sockets ``memory_on`` (empty: all of them), and ``dram_bandwidth``
    (bytes/s) is what their DRAM gives together, what is read and what is written added up. Copies share it with updates
    and reductions in the host, which share the ``cores``, too. Without a figure, nothing slows another there.
    """

    memory_bytes: Size | None
    dram_bandwidth: Rate = math.inf
    cores: Annotated[int, msgspec.Meta(ge=1)] | None = None
    speed: Rate = 1.0
    sockets: Annotated[int, msgspec.Meta(ge=1)] = 1
    memory_on: tuple[Size, ...] = ()

    @property
    def memory_sockets(self) -> tuple[int, ...]:
        """The sockets that hold host memory."""
        return self.memory_on or tuple(range(self.sockets))


class Interconnect(_Value, frozen=True):
    """What joins every two sockets: ``bandwidth`` (bytes/s) in each direction, ``both_directions`` caps their sum."""

    bandwidth: Rate
    both_directions: Rate | None = None
    latency_ns: Size = 0


class Emulation(_Value, frozen=True):
    """How the emulator plays this machine on a CPU; nobody else reads it and calibration never changes it.

    ``pace``: a task lasts this multiple of the CPU time it really used; at 0 it takes as long as it takes. The rates
    (bytes/s) are nominal: copies are throttled to them, and what they then reach is measured. ``links`` gives one for
    every link of the machine, by name.
    """

    pace: Annotated[float, msgspec.Meta(ge=0)]
    gpu_bandwidth: Rate
    p2p_bandwidth: Rate | None = None
    links: dict[str, Rate] = {}


class Machine(_Value, frozen=True):
    """A server. Build one with :func:`sim.hardware.files.load_machine` or directly."""

    name: str
    host: Host
    gpus: tuple[Gpu, ...]
    links: tuple[Link, ...] = ()
    nvlinks: tuple[NvLink, ...] = ()
    interconnect: Interconnect | None = None
    sharing: Sharing = Sharing.FAIR
    emulation: Emulation | None = None
    description: str = ""

    def __post_init__(self) -> None:
        """Check that the links form a tree, and that every name resolves."""
        if not self.gpus:
            raise self._fault("it has no GPU; add a [[gpus]] table")
        self._check_links()
        self._check_sockets()
        self._check_efficiency()
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

    def _check_sockets(self) -> None:
        count, host = self.host.sockets, self.host
        known = f"sockets are 0…{count - 1}"
        if (count > 1) != (self.interconnect is not None):
            raise self._fault(f"it has {count} socket(s); several are joined by an [interconnect], and only several")
        if not set(host.memory_on) <= set(range(count)) or len(set(host.memory_on)) < len(host.memory_on):
            raise self._fault(f"host memory on sockets {list(host.memory_on)}; {known}, each named once")
        ends = [(f"GPU {number}", gpu.socket, gpu.link) for number, gpu in enumerate(self.gpus)]
        ends += [(f"link {link.name}", link.socket, link.parent) for link in self.links]
        for owner, socket, parent in ends:
            if socket and parent != HOST:
                raise self._fault(
                    f"{owner} hangs off {parent!r} and says socket {socket}; only what hangs off the host may"
                )
            if socket >= count:
                raise self._fault(f"{owner} is on socket {socket}; {known}")

    def _check_efficiency(self) -> None:
        known = [(f"GPU {number}", gpu.efficiency) for number, gpu in enumerate(self.gpus)]
        known += [(f"link {link.name}", link.efficiency) for link in self.links]
        known += [(f"NVLink {edge.gpus}", edge.efficiency) for edge in self.nvlinks]
        for owner, efficiency in known:
            for (size, share), (larger, its_share) in pairwise([(0, 1.0), *efficiency]):
                if size >= larger:
                    raise self._fault(
                        f"efficiency of {owner}: sizes must grow from above 0; {larger} B follows {size} B"
                    )
                if size / share > larger / its_share:
                    raise self._fault(f"efficiency of {owner}: a copy of {larger} B would end before one of {size} B")

    def _fault(self, problem: str) -> MachineError:
        return MachineError(f"machine {self.name}: {problem}")

    def with_gpus(self, count: int) -> Machine:
        """This machine with its first ``count`` GPUs, or with its last one repeated until there are ``count``."""
        if count < 1:
            raise self._fault(f"{count} GPUs asked for; at least 1 is needed")
        if count > MOST_GPUS:
            raise self._fault(f"{count} GPUs asked for; one server has at most {MOST_GPUS}")
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
