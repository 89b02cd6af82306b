"""What `harmony machines NAME` shows and writes."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from sim.hardware.files import load_machine, shipped_machines
from sim.hardware.machine import Emulation, Gpu, Host, Interconnect, Link, Machine, Sharing
from sim.hardware.report import describe, machine_to_dict


def shown(machine: Machine) -> str:
    console = Console(width=100, color_system=None)
    with console.capture() as capture:
        console.print(describe(machine))
    return capture.get()


def test_a_tree_of_links_with_neighbouring_equal_gpus_together() -> None:
    lines = [line.rstrip() for line in shown(load_machine("8x1080ti-2switch")).splitlines()]
    assert lines[-6:] == [
        "host: 698.49 GiB of memory, DRAM 120.00 GB/s, 32 cores",
        "├── link switch0: 12.35 GB/s each way",
        "│   └── GPUs 0-3: 12.35 GB/s each way, 10 us a copy",
        "└── link switch1: 12.35 GB/s each way",
        "    └── GPUs 4-7: 12.35 GB/s each way, 10 us a copy",
        "updates and reductions in the host share DRAM with copies, and the cores with each other",
    ]


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("4x1080ti", ["GPUs 0-3", "GTX 1080 Ti", "10.00 GiB", "11.00 GiB", "8.80 GB/s"]),
        ("4x4090", ["via host", "25.00 GB/s each way, 35.00 GB/s both ways together"]),
        ("4x3090-nvlink", ["NVLink GPU 2 ↔ GPU 3: 56.00 GB/s each way"]),
        ("1x-h200", ["GPU 0", "as the links"]),
    ],
)
def test_what_matters_is_shown(name: str, parts: list[str]) -> None:
    text = shown(load_machine(name))
    assert [part for part in parts if part not in text] == []


def test_what_only_some_machines_have() -> None:
    machine = Machine(
        name="odd",
        host=Host(memory_bytes=None, dram_bandwidth=1e9, cores=2, speed=0.25),
        links=(Link(name="up", bandwidth=3e8, latency_ns=1500),),
        gpus=(Gpu(name="G", memory_bytes=2**20, bandwidth=5e8, link="up"),),
        emulation=Emulation(pace=4, gpu_bandwidth=2.5e8, links={"up": 1.5e8}),
    )
    lines = [line.rstrip() for line in shown(machine).splitlines()]
    assert lines[-5:] == [
        "host: unlimited memory, DRAM 1.00 GB/s, 2 cores, speed 0.25",
        "└── link up: 300.0 MB/s each way, latency 1.5 us",
        "    └── GPU 0: 500.0 MB/s each way",
        "updates and reductions in the host share DRAM with copies, and the cores with each other",
        "emulated at pace 4, nominal rates: GPU 250.0 MB/s, up 150.0 MB/s",
    ]


def test_sockets_efficiency_and_priority() -> None:
    machine = Machine(
        name="two",
        host=Host(memory_bytes=None, dram_bandwidth=1e9, cores=2, sockets=2),
        interconnect=Interconnect(bandwidth=3e9, both_directions=5e9, latency_ns=700),
        links=(Link(name="up", bandwidth=3e8, socket=1, efficiency=((2**16, 0.25), (2**20, 1.0))),),
        gpus=(Gpu(name="G", memory_bytes=2**20, bandwidth=5e8, bandwidth_up=4e8, link="up"),),
        sharing=Sharing.PRIORITY,
    )
    lines = [line.rstrip() for line in shown(machine).splitlines()]
    assert lines[-7:] == [
        "host: unlimited memory, DRAM 1.00 GB/s, 2 cores",
        "└── link up: 300.0 MB/s each way; 25% at 64 KiB, 100% at 1 MiB; socket 1",
        "    └── GPU 0: 500.0 MB/s down, 400.0 MB/s up",
        "interconnect of the sockets: 3.00 GB/s each way, 5.00 GB/s both ways together, latency 0.7 us;",
        "memory on sockets 0, 1",
        "updates and reductions in the host share DRAM with copies, and the cores with each other",
        "copies that computation waits for go first, copies out of GPUs last",
    ]


@pytest.mark.parametrize("name", shipped_machines())
def test_plain_data_is_json_and_complete(name: str) -> None:
    machine = load_machine(name)
    plain = machine_to_dict(machine)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["host"]["memory_bytes"] == machine.host.memory_bytes
    assert [gpu["usable_bytes"] for gpu in plain["gpus"]] == [gpu.usable_bytes for gpu in machine.gpus]
    assert [gpu["copy_overhead_ns"] for gpu in plain["gpus"]] == [gpu.copy_overhead_ns for gpu in machine.gpus]


def test_a_host_of_which_little_is_known() -> None:
    gpu = Gpu(name="G", memory_bytes=2**20, bandwidth=5e8)
    lines = [line.rstrip() for line in shown(Machine(name="m", host=Host(memory_bytes=None), gpus=(gpu,))).splitlines()]
    assert lines[-2] == "host: unlimited memory, DRAM that slows nothing, cores for all"
