from __future__ import annotations

from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from executor.devices.facade import DeviceKind
from executor.reporting import silent
from executor.training.target import Target
from sim.hardware.files import load_machine, save_machine
from tests.executor import made
from tests.executor.trained import chain
from tests.executor.training.loops import ON_CPU, schedule_of


def test_a_machine_is_a_value_a_name_or_a_file(tmp_path: Path) -> None:
    machine = load_machine("4x1080ti")
    save_machine(machine, tmp_path / "mine.toml")
    for given in (machine, "4x1080ti", tmp_path / "mine.toml"):
        target = Target(given, gpus=2, gpu_memory="1 GB")
        assert [gpu.usable_bytes for gpu in target.described().gpus] == [10**9] * 2
        assert target.measured(silent) == target.described()


def test_without_a_machine_it_is_emulated_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Target().kind is DeviceKind.EMULATED
    assert Target().described() == load_machine("emulated")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert Target().kind is DeviceKind.CUDA
    assert Target(device=DeviceKind.EMULATED).described() == load_machine("emulated")


def test_a_schedule_gets_the_gpus_and_the_memory_that_it_was_planned_for() -> None:
    schedule = schedule_of(chain(), replace(ON_CPU, gpus=3))
    machine = Target(device=DeviceKind.EMULATED).fitting(schedule)
    assert [gpu.usable_bytes for gpu in machine.gpus] == list(schedule.memory.gpu_cap_bytes)
    narrow = Target(device=DeviceKind.EMULATED, gpus=2, gpu_memory=1000).fitting(schedule)
    assert [gpu.usable_bytes for gpu in narrow.gpus] == [1000, 1000]
    assert Target(made.machine(3)).fitting(schedule) == made.machine(3)
