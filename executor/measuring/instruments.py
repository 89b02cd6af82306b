"""What a profile is made with: where tensors lie, and what says how long work took."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from traces.schema import Phase, Provenance

from ..devices.processor import SteadyClock
from ..models.layers import LayerModel
from ..running.optimizer import PackOptimizer
from .bench import UpdateBench
from .sampling import Clock, cuda_clock, wall_clock

Updates = Mapping[Phase, Callable[[], int]]
"""Does an update on the host (UPDATE_CPU) or on the device (UPDATE_GPU), and says how many nanoseconds it took."""


@dataclass(frozen=True)
class Instruments:
    """``clock`` times work on ``device``; ``updates`` those of what a layer owns. ``generator`` is what layers on the
    device draw from. ``times`` and ``sizes`` say what the numbers are worth."""

    name: str
    device: torch.device
    clock: Clock
    updates: Callable[[LayerModel, int, PackOptimizer], Updates]
    generator: torch.Generator
    times: Provenance = Provenance.MEASURED
    sizes: Provenance = Provenance.MEASURED


def instruments_of(device: torch.device) -> Instruments:
    """Those that measure on the CPU, in steady time, or on a CUDA device, in its own."""
    if device.type == "cpu":
        steady = SteadyClock()
        return Instruments(str(device), device, steady, _updates(device, steady, steady), torch.default_generator)
    clock = cuda_clock(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    name, generator = torch.cuda.get_device_name(device), torch.cuda.default_generators[index]
    return Instruments(name, device, clock, _updates(device, clock, wall_clock), generator)


def _updates(
    device: torch.device, clock: Clock, host_clock: Clock
) -> Callable[[LayerModel, int, PackOptimizer], Updates]:
    def updates(model: LayerModel, layer: int, optimizer: PackOptimizer) -> Updates:
        bench = UpdateBench(model, layer, device, optimizer)
        return {
            Phase.UPDATE_CPU: lambda: bench.host_ns(host_clock),
            Phase.UPDATE_GPU: lambda: bench.device_ns(clock),
        }

    return updates
