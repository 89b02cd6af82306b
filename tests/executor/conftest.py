from __future__ import annotations

import pytest
import torch

from executor.devices.facade import DeviceKind

torch.set_num_threads(1)

DEVICES = [
    pytest.param(DeviceKind.EMULATED, id="emulated"),
    pytest.param(DeviceKind.CUDA, id="cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> DeviceKind:
    """Emulated GPUs everywhere; CUDA with ``-m gpu``."""
    kind: DeviceKind = request.param
    return kind
