"""The façade: all that a run asks of its devices. Emulated GPUs and CUDA stand behind it alike.

    Devices   the GPUs of one run and the host beside them
    └── Queue     one lane's in-order queue: wait for marks, work, set marks

A *mark* is a point in a queue's work. Emulated queues are synchronous, so a mark is the time at which it was set. On
CUDA it is an event; what was enqueued before it may still be running, and another queue waits for it without the host
doing so. Queues of the host (``gpu`` None) always have waited when :meth:`Queue.wait` returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from sim.hardware.machine import Machine
from sim.schedule import LaneKey

T = TypeVar("T")

Mark = object
"""A point in a queue's work; only the devices that made it can read it."""


class Aborted(BaseException):
    """Raised in a lane that waits or works when the run is given up because of something elsewhere."""


class Copy(NamedTuple):
    """Bytes to be copied: two uint8 tensors of the same length."""

    target: Tensor
    source: Tensor


class Sum(NamedTuple):
    """Flat tensors of the same length and dtype, on different GPUs in rank order, to be added into ``target``, which
    may be one of them."""

    target: Tensor
    addends: Sequence[Tensor]


@dataclass(frozen=True)
class Overruns:
    """Tasks that took longer than their device is supposed to, and by how much together.

    An emulated GPU lasts a multiple of the CPU time that its mathematics takes; on an overloaded machine even that was
    not enough. Real devices have none.
    """

    count: int = 0
    total_ns: int = 0

    def __add__(self, other: Overruns) -> Overruns:
        return Overruns(self.count + other.count, self.total_ns + other.total_ns)

    def since(self, earlier: Overruns) -> Overruns:
        """Those after ``earlier``, an earlier state of the same count."""
        return Overruns(self.count - earlier.count, self.total_ns - earlier.total_ns)


class Queue(Protocol):
    """A lane's queue. One thread uses it."""

    def wait(self, mark: Mark) -> None:
        """What is enqueued from now on waits for what came before ``mark`` in its queue."""

    def mark(self) -> Mark:
        """The point after everything enqueued so far."""

    def compute(self, work: Callable[[], T]) -> T:
        """Run ``work``, which calls torch, as mathematics of this device."""

    def swap(self, copies: Sequence[Copy]) -> None:
        """Copy between the host and the lane's GPU, in the lane's direction."""

    def send(self, copies: Sequence[Copy], peer: int) -> None:
        """Copy from the lane's GPU to another one."""

    def all_reduce(self, shares: Sequence[Tensor]) -> None:
        """Add tensors (one a GPU, in rank order, the same shape and dtype) and leave the sum in all of them.

        They are added in rank order, whatever way they travel, so that results do not depend on timing.
        """

    def reduce_scatter(self, sums: Sequence[Sum], gpus: int) -> None:
        """Leave each sum at its target, added in rank order; as a ring of the first ``gpus`` GPUs does it."""

    def all_gather(self, copies: Sequence[Copy], gpus: int) -> None:
        """Copy what each of the first ``gpus`` GPUs has to all of them, itself included; as a ring of them does it."""


class Devices(Protocol):
    """The devices of one run: a machine's GPUs, and the host."""

    @property
    def gpus(self) -> int:
        """How many GPUs there are."""

    def device(self, gpu: int) -> torch.device:
        """Where a GPU's tensors live."""

    def generator(self, gpu: int) -> torch.Generator:
        """The random generator that layers on this GPU draw from. Use it inside :meth:`Queue.compute` only."""

    def gpu_bytes(self, gpu: int, size: int) -> Tensor:
        """Memory of a GPU: uint8 [size], not initialised. It may be dropped while queues still work on it."""

    def host_bytes(self, size: int) -> Tensor:
        """Host memory that copies are fast from and to: uint8 [size], not initialised. May be dropped as early."""

    def queue(self, lane: LaneKey) -> Queue:
        """A new queue for a lane."""

    def running(self) -> AbstractContextManager[None]:
        """Around each step: sets the process up for running (threads of torch, say), and puts it back afterwards."""

    def begin(self) -> None:
        """The step starts now: all queues are idle."""

    def finish(self) -> None:
        """Return when everything enqueued has ended."""

    def time_ns(self, mark: Mark) -> int:
        """When a mark was passed, on the clock of ``time.perf_counter_ns``. Call after :meth:`finish`."""

    def abort(self) -> None:
        """Wake whatever waits inside these devices: it raises :class:`Aborted`. Not undone until :meth:`begin`."""

    @property
    def overruns(self) -> Overruns:
        """Overruns since the devices were opened."""


class DeviceKind(Enum):
    """What stands behind the façade."""

    EMULATED = "emulated"
    CUDA = "cuda"


def open_devices(kind: DeviceKind, machine: Machine) -> Devices:
    """The devices of a machine. Raises DeviceError if they are not there, MachineError if it cannot be emulated."""
    match kind:
        case DeviceKind.EMULATED:
            from .emulated import EmulatedDevices

            return EmulatedDevices(machine)
        case DeviceKind.CUDA:
            from .cuda import CudaDevices

            return CudaDevices(machine)
