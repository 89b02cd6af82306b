"""Where to train: the machine, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from sim.hardware.files import load_machine
from sim.hardware.machine import Machine
from sim.schedule import Schedule
from sim.units import parse_bytes

from ..devices.facade import DeviceKind
from ..errors import DeviceError
from ..measuring.calibrate import calibrate, cuda_machine
from ..reporting import Progress

EMULATED_MACHINE = "emulated"
"""The shipped machine that says how this computer plays GPUs."""


@dataclass(frozen=True)
class Target:
    """Where to train, as far as the user says it: a machine by value, name or file, or else this computer (its CUDA
    devices, or emulated ones), its first ``gpus``, and how much memory of each (bytes, or such as "9 GB")."""

    machine: Machine | str | Path | None = None
    device: DeviceKind | None = None
    gpus: int | None = None
    gpu_memory: int | str | None = None

    @property
    def kind(self) -> DeviceKind:
        """CUDA devices where there are any, unless the user says otherwise."""
        if self.device is not None:
            return self.device
        return DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.EMULATED

    def described(self) -> Machine:
        """The machine with so many GPUs and so much memory. Without a machine given, rates of copies may be nominal."""
        match self.machine:
            case Machine():
                machine = self.machine
            case None:
                machine = cuda_machine() if self.kind is DeviceKind.CUDA else load_machine(EMULATED_MACHINE)
            case _:
                machine = load_machine(str(self.machine))
        if self.gpus is not None:
            machine = machine.with_gpus(self.gpus)
        if self.gpu_memory is not None:
            memory = self.gpu_memory if isinstance(self.gpu_memory, int) else parse_bytes(self.gpu_memory)
            machine = machine.with_usable_memory(memory)
        return machine

    def measured(self, progress: Progress) -> Machine:
        """The same with rates that copies reach: as given, or else calibrated."""
        machine = self.described()
        return machine if self.machine is not None else calibrate(machine, self.kind, progress)

    def fitting(self, schedule: Schedule) -> Machine:
        """The machine to run a schedule on: without one given, as many GPUs as it is for, and, if they are emulated, as
        much memory as it was planned for."""
        machine = self.described()
        if self.machine is not None:
            return machine
        if self.gpus is None:
            machine = machine.with_gpus(schedule.plan.gpus)
        if self.gpu_memory is None and self.kind is DeviceKind.EMULATED:
            machine = machine.with_usable_memory(max(schedule.memory.gpu_cap_bytes))
        return machine.with_host_memory(psutil.virtual_memory().total)


def kind_of_device(device: DeviceKind | str) -> DeviceKind:
    """By name. Raises DeviceError."""
    try:
        return DeviceKind(device)
    except ValueError:
        known = ", ".join(kind.value for kind in DeviceKind)
        raise DeviceError(f"there are no devices {device!r}; known are {known}") from None
