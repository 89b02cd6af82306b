"""Opening a session on a machine: the memory is there, the devices are."""

from __future__ import annotations

from torch.optim import Optimizer

from sim.errors import DoesNotFit
from sim.hardware.machine import Machine
from sim.schedule import Schedule

from ..devices.facade import DeviceKind, open_devices
from ..models.layers import LayerModel
from .host_memory import HostMemory
from .session import Session


def open_session(
    schedule: Schedule,
    model: LayerModel,
    optimizer: Optimizer,
    machine: Machine,
    device: DeviceKind,
    *,
    seed: int = 0,
    first_step: int = 0,
) -> Session:
    """A session on devices of this kind. Raises DoesNotFit if the schedule needs more memory than the machine has,
    NotEnoughHostMemory if it needs more than this computer has left, DeviceError if the devices are not there, and what
    :class:`Session` raises."""
    _check_memory(schedule, machine)
    HostMemory.of(schedule, device).check()
    return Session(schedule, model, optimizer, open_devices(device, machine), seed=seed, first_step=first_step)


def _check_memory(schedule: Schedule, machine: Machine) -> None:
    """The machine has what the plan takes. (GPUs that are missing are the devices' matter.)"""
    memory, layers = schedule.memory, (0, schedule.layers - 1)
    what = f"the buffers of {schedule.plan.policy.value}"
    for gpu, (peak, spec) in enumerate(zip(memory.gpu_peak_bytes, machine.gpus, strict=False)):
        if peak > spec.usable_bytes:
            raise DoesNotFit(gpu, layers, what, peak, spec.usable_bytes)
    host = machine.host.memory_bytes
    if host is not None and memory.host_peak_bytes > host:
        raise DoesNotFit(None, layers, "the model's state, data and stash", memory.host_peak_bytes, host)
