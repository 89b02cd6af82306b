"""CUDA devices: a stream for every lane, events as marks, pinned host memory.

Lanes only enqueue. A queue waits for another's mark on the GPU, so a lane's thread runs ahead of its stream; queues of
the host really wait. Placed buffers need no further care: the arena outlives everything, and what is put into a hole
waits for the marks of what was there. Memory taken on its own is registered with every stream, so that the caching
allocator does not give it to anyone else before they are through with it. Streams of another GPU that write to it are
waited for by one of these.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from sim.hardware.machine import Machine
from sim.schedule import Lane, LaneKey

from ..errors import DeviceError
from .facade import Copy, Mark, Overruns, Queue, Sum, T

REDUCED_BYTES = 16 * 2**20
"""An all-reduce goes on in pieces of this size, of which each GPU holds two beside its gradients."""


class _Event(NamedTuple):
    """A mark in a stream of a GPU."""

    gpu: int
    event: torch.cuda.Event


class CudaDevices:
    """See :class:`~executor.devices.facade.Devices`. GPU i of the machine is CUDA device i."""

    def __init__(self, machine: Machine) -> None:
        found = torch.cuda.device_count()
        if found < len(machine.gpus):
            raise DeviceError(
                f"machine {machine.name} has {len(machine.gpus)} GPU(s), there are {found} CUDA devices; plan with "
                "--gpus, or run on emulated ones (--device emulated)"
            )
        self._gpus = len(machine.gpus)
        self._streams: list[list[torch.cuda.Stream]] = [[] for _ in range(self._gpus)]
        self._base_ns = 0
        self._bases: list[torch.cuda.Event] = []
        self._pins = True

    @property
    def gpus(self) -> int:
        """See :class:`~executor.devices.facade.Devices`; so for all methods."""
        return self._gpus

    @property
    def overruns(self) -> Overruns:
        """A real device is as fast as it is."""
        return Overruns()

    def device(self, gpu: int) -> torch.device:
        """``cuda:gpu``."""
        return torch.device("cuda", gpu)

    def generator(self, gpu: int) -> torch.Generator:
        """The device's default generator."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        generator: torch.Generator = torch.cuda.default_generators[gpu]
        return generator

    def gpu_bytes(self, gpu: int, size: int) -> Tensor:
        """Memory that any stream of the GPU may use until it is dropped."""
        memory = torch.empty(size, dtype=torch.uint8, device=self.device(gpu))
        for stream in self._streams[gpu]:
            memory.record_stream(stream)
        return memory

    def host_bytes(self, size: int) -> Tensor:
        """Pinned memory; pageable memory, with one warning, when no more can be pinned."""
        if self._pins:
            try:
                return torch.empty(size, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                warnings.warn(
                    f"no more host memory can be pinned ({error}); copies will be slower. Raise the limit on locked "
                    "memory (ulimit -l)",
                    RuntimeWarning,
                    stacklevel=2,
                )
        return torch.empty(size, dtype=torch.uint8)

    def queue(self, lane: LaneKey) -> Queue:
        """A stream of the lane's GPU; for the collective lane one of each; none for the host."""
        gpu, kind = lane
        if gpu is not None:
            return GpuQueue(gpu, self._stream(gpu))
        if kind is Lane.COLLECTIVE:
            return CollectiveQueue([self._stream(each) for each in range(self._gpus)])
        return HostQueue()

    def _stream(self, gpu: int) -> torch.cuda.Stream:
        stream = torch.cuda.Stream(device=gpu)  # type: ignore[no-untyped-call]
        self._streams[gpu].append(stream)
        return stream

    @contextmanager
    def running(self) -> Iterator[None]:
        """Nothing to set up."""
        yield

    def begin(self) -> None:
        """Take the time on all clocks at once."""
        self.finish()
        self._bases = []
        for gpu in range(self._gpus):
            with torch.cuda.device(gpu):
                base = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                base.record()
                self._bases.append(base)
        self.finish()
        self._base_ns = time.perf_counter_ns()

    def finish(self) -> None:
        """Wait for all GPUs."""
        for gpu in range(self._gpus):
            torch.cuda.synchronize(gpu)

    def time_ns(self, mark: Mark) -> int:
        """Times of events count from the base of their GPU."""
        match mark:
            case _Event(gpu, event):
                elapsed_ms: float = self._bases[gpu].elapsed_time(event)
                return self._base_ns + round(elapsed_ms * 1e6)
            case int():
                return mark
            case _:
                raise TypeError(f"{mark!r} is no mark of these devices")

    def abort(self) -> None:
        """Nothing to wake: what is enqueued ends by itself."""


class _LaneQueue:
    """A queue that refuses everything, for each kind of lane to override what it does."""

    def compute(self, work: Callable[[], T]) -> T:
        """Mathematics."""
        raise self._refusal("compute")

    def swap(self, copies: Sequence[Copy]) -> None:
        """Copies from or to the host."""
        raise self._refusal("swap")

    def send(self, copies: Sequence[Copy], peer: int) -> None:
        """Copies to another GPU."""
        raise self._refusal("send")

    def all_reduce(self, shares: Sequence[Tensor]) -> None:
        """Sums over GPUs."""
        raise self._refusal("reduce")

    def reduce_scatter(self, sums: Sequence[Sum], gpus: int) -> None:
        """Sums over GPUs, each for one of them."""
        raise self._refusal("reduce")

    def all_gather(self, copies: Sequence[Copy], gpus: int) -> None:
        """Copies from all GPUs to all."""
        raise self._refusal("gather")

    def _refusal(self, what: str) -> ValueError:
        return ValueError(f"a lane of {type(self).__name__} does not {what}")


class GpuQueue(_LaneQueue):
    """A stream. See :class:`~executor.devices.facade.Queue`."""

    def __init__(self, gpu: int, stream: torch.cuda.Stream) -> None:
        self._gpu, self._stream = gpu, stream

    def wait(self, mark: Mark) -> None:
        """On the GPU, for an event; what the host did is done."""
        if isinstance(mark, _Event):
            self._stream.wait_event(mark.event)

    def mark(self) -> Mark:
        """An event."""
        return _record(self._gpu, self._stream)

    def compute(self, work: Callable[[], T]) -> T:
        """On this stream; so autograd's backward, which takes the streams of its forward."""
        with torch.cuda.stream(self._stream):
            return work()

    def swap(self, copies: Sequence[Copy]) -> None:
        """Copy without waiting."""
        with torch.cuda.stream(self._stream):
            for target, source in copies:
                target.copy_(source, non_blocking=True)

    def send(self, copies: Sequence[Copy], peer: int) -> None:
        """The same: torch copies from peer to peer on the sender's stream, through the host if it must."""
        self.swap(copies)


class CollectiveQueue(_LaneQueue):
    """A stream on every GPU. See :class:`~executor.devices.facade.Queue`."""

    def __init__(self, streams: Sequence[torch.cuda.Stream]) -> None:
        self._streams = streams

    def wait(self, mark: Mark) -> None:
        """All streams wait."""
        if isinstance(mark, _Event):
            for stream in self._streams:
                stream.wait_event(mark.event)

    def mark(self) -> Mark:
        """An event on the first GPU, after everything on all of them."""
        first, *others = self._streams
        for stream in others:
            first.wait_stream(stream)
        return _record(0, first)

    def all_reduce(self, shares: Sequence[Tensor]) -> None:
        """Every GPU adds one part of all shares in rank order, and gives the sum to all: each sends 2(N-1)/N of its
        share, as in a ring."""
        with self._current(len(shares)):
            length = max(1, REDUCED_BYTES // shares[0].element_size())
            for owner, parts in enumerate(zip(*(share.tensor_split(len(shares)) for share in shares), strict=True)):
                for start in range(0, parts[0].numel(), length):
                    _add_on(shares[owner].device, [part[start : start + length] for part in parts])

    def reduce_scatter(self, sums: Sequence[Sum], gpus: int) -> None:
        """Every GPU adds what it is to have, in rank order: together they send what a ring would."""
        with self._current(gpus):
            for target, addends in sums:
                length = max(1, REDUCED_BYTES // target.element_size())
                for start in range(0, target.numel(), length):
                    pieces = [addend[start : start + length] for addend in addends]
                    target[start : start + length].copy_(_added(target.device, pieces), non_blocking=True)

    def all_gather(self, copies: Sequence[Copy], gpus: int) -> None:
        """Copy from GPU to GPU without waiting."""
        with self._current(gpus):
            for target, source in copies:
                target.copy_(source, non_blocking=True)

    @contextmanager
    def _current(self, gpus: int) -> Iterator[None]:
        """Copies between GPUs run on the current streams of both."""
        with ExitStack() as stack:
            for stream in self._streams[:gpus]:
                stack.enter_context(torch.cuda.stream(stream))
            yield


class HostQueue(_LaneQueue):
    """The host's lane. See :class:`~executor.devices.facade.Queue`."""

    def wait(self, mark: Mark) -> None:
        """Really wait."""
        if isinstance(mark, _Event):
            mark.event.synchronize()

    def mark(self) -> Mark:
        """Now, on the clock of ``time.perf_counter_ns``."""
        return time.perf_counter_ns()

    def compute(self, work: Callable[[], T]) -> T:
        """In the lane's thread."""
        return work()


def _record(gpu: int, stream: torch.cuda.Stream) -> _Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return _Event(gpu, event)


def _add_on(device: torch.device, pieces: Sequence[Tensor]) -> None:
    """Add pieces, which lie on different devices, on one of them; leave the sum in all."""
    total = _added(device, pieces)
    for piece in pieces:
        piece.copy_(total, non_blocking=True)


def _added(device: torch.device, pieces: Sequence[Tensor]) -> Tensor:
    """The sum of pieces that lie on different devices."""
    total = pieces[0].to(device, non_blocking=True, copy=True)
    for piece in pieces[1:]:
        total += piece.to(device, non_blocking=True)
    return total
