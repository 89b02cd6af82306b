"""Emulated GPUs: real tensors and real copies on the CPU, as slow as the machine's description says.

All emulated GPUs of the process take turns on one core; updates in the host have another. A task of mathematics sleeps
until it has lasted ``1 / speed`` times the steady CPU time (``processor.py``) that it really took, so that neither a
busy machine nor the turns of others blur it; unpaced (``pace`` 0) it takes as long as it takes. Copies are real, and
share the nominal links of the machine's ``[emulation]`` part in real time.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from sim.errors import MachineError
from sim.hardware.fabric import Fabric, Route, ring_edge_bytes
from sim.hardware.machine import Machine
from sim.schedule import Lane, LaneKey
from sim.units import NS_PER_S

from .facade import Aborted, Copy, Mark, Overruns, Sum, T
from .links import Load, SharedLinks
from .processor import SteadyClock, quiet

_GPUS_TURN = threading.Lock()
"""Held by the emulated GPU that calculates: one at a time, in the whole process."""
_HOST_TURN = threading.Lock()
"""Held while the host calculates."""

PIECE_BYTES = 512 * 1024
"""Copies go on in pieces of at least this size …"""
PIECE_S = 0.002
"""… which take at least this long, so that waking after each costs little."""


def nominal_machine(machine: Machine) -> Machine:
    """The machine that is emulated: its links at the nominal rates of the ``[emulation]`` part, without delays.

    What copying costs besides (its start, host memory) is real here, for calibration to measure. Raises MachineError
    for a machine without such a part.
    """
    emulation = machine.emulation
    if emulation is None:
        raise MachineError(
            f"machine {machine.name} cannot be emulated: it has no [emulation] part with pace and nominal rates; "
            "use the machine 'emulated', or add one"
        )
    replace = msgspec.structs.replace
    plain: dict[str, Any] = {"bandwidth_up": None, "efficiency": ()}
    links = tuple(replace(link, bandwidth=emulation.links[link.name], latency_ns=0, **plain) for link in machine.links)
    rates = {"bandwidth": emulation.gpu_bandwidth, "p2p_bandwidth": emulation.p2p_bandwidth}
    gpus = tuple(replace(gpu, copy_overhead_ns=0, **rates, **plain) for gpu in machine.gpus)
    return replace(machine, host=replace(machine.host, dram_bandwidth=math.inf), links=links, gpus=gpus)


class _Core:
    """Where mathematics is done, one task after the other."""

    def __init__(self, turn: threading.Lock, aborted: threading.Event) -> None:
        self._turn, self._aborted = turn, aborted
        self._clock = SteadyClock()
        self.overruns = Overruns()

    def calculate(self, work: Callable[[], T]) -> T:
        """Do ``work`` in turn."""
        with self._turn:
            if self._aborted.is_set():
                raise Aborted
            return work()

    def pace(self, work: Callable[[], T], pace: float) -> T:
        """Do ``work`` in turn, and return when it has lasted its pace times its steady CPU time."""
        started_ns = time.perf_counter_ns()
        results: list[T] = []
        with self._turn:
            if self._aborted.is_set():
                raise Aborted
            due_ns = round(pace * self._clock(lambda: results.append(work())))
            left_ns = started_ns + due_ns - time.perf_counter_ns()
            if left_ns < 0:
                self.overruns = Overruns(self.overruns.count + 1, self.overruns.total_ns - left_ns)
        if left_ns > 0 and self._aborted.wait(left_ns / NS_PER_S):
            raise Aborted
        return results[0]


class EmulatedDevices:
    """See :class:`~executor.devices.facade.Devices`."""

    def __init__(self, machine: Machine) -> None:
        self.fabric = Fabric(nominal_machine(machine))
        self.links = SharedLinks(self.fabric)
        self._paces = [1 / gpu.speed for gpu in machine.gpus]
        self._host_pace = 1 / machine.host.speed
        self._paced = machine.emulation is not None and machine.emulation.pace > 0
        self._aborted = threading.Event()
        self._gpu_core, self._host_core = _Core(_GPUS_TURN, self._aborted), _Core(_HOST_TURN, self._aborted)

    @property
    def gpus(self) -> int:
        """See :class:`~executor.devices.facade.Devices`; so for all methods."""
        return len(self._paces)

    @property
    def overruns(self) -> Overruns:
        """Tasks of mathematics that lasted longer than their pace asks."""
        return self._gpu_core.overruns + self._host_core.overruns

    def device(self, gpu: int) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def generator(self, gpu: int) -> torch.Generator:
        """The process's generator, which all emulated GPUs share in turn."""
        return torch.default_generator

    def gpu_bytes(self, gpu: int, size: int) -> Tensor:
        """Plain memory; its user counts what it takes."""
        return torch.empty(size, dtype=torch.uint8)

    def host_bytes(self, size: int) -> Tensor:
        """Plain memory."""
        return torch.empty(size, dtype=torch.uint8)

    def queue(self, lane: LaneKey) -> EmulatedQueue:
        """A synchronous queue."""
        return EmulatedQueue(self, lane)

    def running(self) -> AbstractContextManager[None]:
        """Nothing of torch's or Python's own beside the mathematics."""
        return quiet()

    def begin(self) -> None:
        """Empty links, nothing aborted."""
        self._aborted.clear()
        self.links.reopen()

    def finish(self) -> None:
        """Nothing to wait for: queues are synchronous."""

    def time_ns(self, mark: Mark) -> int:
        """Marks are times."""
        assert isinstance(mark, int)
        return mark

    def abort(self) -> None:
        """Wake who sleeps for its pace or waits for a link."""
        self._aborted.set()
        self.links.close()

    def calculate(self, gpu: int | None, work: Callable[[], T]) -> T:
        """Paced mathematics of a GPU, or of the host."""
        core, pace = (self._host_core, self._host_pace) if gpu is None else (self._gpu_core, self._paces[gpu])
        return core.pace(work, pace) if self._paced else core.calculate(work)


class EmulatedQueue:
    """A queue that does everything at once. See :class:`~executor.devices.facade.Queue`."""

    def __init__(self, devices: EmulatedDevices, lane: LaneKey) -> None:
        self._devices = devices
        self._gpu, self._lane = lane
        self._ways: dict[int | None, _Way] = {}  # by peer

    def wait(self, mark: Mark) -> None:
        """Whoever set the mark has done the work before it."""

    def mark(self) -> int:
        """Now, on the clock of ``time.perf_counter_ns``."""
        return time.perf_counter_ns()

    def compute(self, work: Callable[[], T]) -> T:
        """Paced mathematics of this lane's GPU, or of the host."""
        return self._devices.calculate(self._gpu, work)

    def swap(self, copies: Sequence[Copy]) -> None:
        """Copy at the rate of the lane's direction."""
        self._carry(copies, None)

    def send(self, copies: Sequence[Copy], peer: int) -> None:
        """Copy at the rate of the way to the peer."""
        self._carry(copies, peer)

    def all_reduce(self, shares: Sequence[Tensor]) -> None:
        """Add piece by piece, as fast as a ring of these GPUs would."""
        routes = self._devices.fabric.ring(len(shares))
        loads = [Load(route, ring_edge_bytes(shares[0].nbytes, len(shares))) for route in routes]
        self._devices.links.carry(loads, _add_up(shares))

    def reduce_scatter(self, sums: Sequence[Sum], gpus: int) -> None:
        """Add one sum after the other, as fast as a ring would."""
        total = sum([each.target.nbytes for each in sums])
        self._devices.links.carry(self._ring_loads((gpus - 1) * total, gpus), _add_into(sums, total))

    def all_gather(self, copies: Sequence[Copy], gpus: int) -> None:
        """Copy piece by piece, as fast as a ring would."""
        total = sum([copy.target.nbytes for copy in copies])
        self._devices.links.carry(
            self._ring_loads(total * (gpus - 1) / gpus, gpus), _copy_pieces(copies, total, PIECE_BYTES)
        )

    def _ring_loads(self, sent_bytes: float, gpus: int) -> list[Load]:
        return [Load(route, sent_bytes / gpus) for route in self._devices.fabric.ring(gpus)]

    def _carry(self, copies: Sequence[Copy], peer: int | None) -> None:
        way = self._ways.get(peer)
        if way is None:
            way = self._ways[peer] = self._find_way(peer)
        total = sum([copy.target.nbytes for copy in copies])
        self._devices.links.carry([Load(way.route, total)], _copy_pieces(copies, total, way.piece_bytes))

    def _find_way(self, peer: int | None) -> _Way:
        fabric, gpu = self._devices.fabric, self._gpu
        assert gpu is not None
        if peer is not None:
            route = fabric.p2p(gpu, peer)
        else:
            route = fabric.swap_in(gpu) if self._lane is Lane.SWAP_IN else fabric.swap_out(gpu)
        return _Way(route, max(PIECE_BYTES, round(fabric.uncontended_rate(route) * PIECE_S)))


class _Way(NamedTuple):
    """Where a queue's copies go, and in pieces of how many bytes."""

    route: Route
    piece_bytes: int


def _copy_pieces(copies: Sequence[Copy], total: int, piece_bytes: int) -> Iterator[float]:
    """Copy, and yield the share that is done after every ``piece_bytes``."""
    done = due = 0
    for target, source in copies:
        size = target.nbytes
        for start in range(0, size, piece_bytes):
            if size <= piece_bytes:
                target.copy_(source)
            else:
                target[start : start + piece_bytes].copy_(source[start : start + piece_bytes])
            done += min(piece_bytes, size - start)
            if piece_bytes <= done - due < total - due:
                due = done
                yield done / total


def _add_up(shares: Sequence[Tensor]) -> Iterator[float]:
    """Leave the sum of flat tensors in all of them, added in rank order; yields the share that is done."""
    count = shares[0].numel()
    length = max(1, PIECE_BYTES // shares[0].element_size())
    for start in range(0, count, length):
        pieces = [share[start : start + length] for share in shares]
        total = pieces[0].clone()
        for piece in pieces[1:]:
            total += piece
        for piece in pieces:
            piece.copy_(total)
        yield min(1.0, (start + length) / count)


def _add_into(sums: Sequence[Sum], total: int) -> Iterator[float]:
    """Add flat tensors, piece by piece; yields the share that is done."""
    done = 0
    for target, addends in sums:
        length = max(1, PIECE_BYTES // target.element_size())
        for start in range(0, target.numel(), length):
            first, *others = [addend[start : start + length] for addend in addends]
            added = first.clone()
            for other in others:
                added += other
            piece = target[start : start + length]
            piece.copy_(added)
            done += piece.nbytes
            yield done / total
