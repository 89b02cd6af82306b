"""What `harmony machines NAME` shows and writes."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sim.machine import Machine
from sim.machine_files import load_machine, shipped_machines
from sim.machine_report import describe, machine_to_dict


def shown(machine: Machine) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(describe(machine))
    return capture.get()


def test_a_tree_of_links_with_neighbouring_equal_gpus_together() -> None:
    lines = [line.rstrip() for line in shown(load_machine("8x1080ti-2switch")).splitlines()]
    assert lines[-5:] == [
        "host: 698.49 GiB of memory, DRAM 120.00 GB/s, 32 cores",
        "├── link switch0: 12.35 GB/s each way",
        "│   └── GPUs 0-3: 12.35 GB/s each way, 10 us a copy",
        "└── link switch1: 12.35 GB/s each way",
        "    └── GPUs 4-7: 12.35 GB/s each way, 10 us a copy",
    ]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("4x1080ti", ["GPUs 0-3", "GTX 1080 Ti", "10.00 GiB", "11.00 GiB", "8.80 GB/s"]),
        ("4x4090", ["via host", "25.00 GB/s each way, 35.00 GB/s both ways together"]),
        ("4x3090-nvlink", ["NVLink GPU 2 ↔ GPU 3: 56.00 GB/s each way"]),
        ("1x-h200", ["GPU 0", "as the links"]),
        ("emulated", ["2 cores, speed 0.25", "emulated at pace 4, nominal rates: GPU 250.0 MB/s, uplink 300.0 MB/s"]),
    ],
)
def test_what_matters_is_shown(name: str, parts: list[str]) -> None:
    text = shown(load_machine(name))
    assert [part for part in parts if part not in text] == []


def test_unlimited_memory_and_latency() -> None:
    machine = load_machine("4x1080ti").with_host_memory(None)
    assert "host: unlimited memory" in shown(machine)


@pytest.mark.parametrize("name", shipped_machines())
def test_plain_data_is_json_and_complete(name: str) -> None:
    machine = load_machine(name)
    plain = machine_to_dict(machine)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["host"]["memory_bytes"] == machine.host.memory_bytes
    assert [gpu["usable_bytes"] for gpu in plain["gpus"]] == [gpu.usable_bytes for gpu in machine.gpus]
    assert [gpu["copy_overhead_ns"] for gpu in plain["gpus"]] == [gpu.copy_overhead_ns for gpu in machine.gpus]
