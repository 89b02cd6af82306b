"""A machine refuses what cannot be, and gives variants of itself."""

from __future__ import annotations

from typing import Any

import pytest

from sim.errors import MachineError
from sim.hardware.machine import Emulation, Gpu, Host, Interconnect, Link, Machine, NvLink

GIB = 2**30
JOINT = Interconnect(bandwidth=1e9)


def make_gpu(**changes: Any) -> Gpu:
    return Gpu(**{"name": "G", "memory_bytes": 4 * GIB, "bandwidth": 1e9, **changes})


def make_machine(**changes: Any) -> Machine:
    host = Host(memory_bytes=64 * GIB, dram_bandwidth=1e10, cores=4)
    return Machine(**{"name": "m", "host": host, "gpus": (make_gpu(), make_gpu()), **changes})


def two_sockets(**changes: Any) -> Host:
    return Host(memory_bytes=64 * GIB, dram_bandwidth=1e10, cores=4, sockets=2, **changes)


def link(name: str, parent: str = "host") -> Link:
    return Link(name=name, bandwidth=1e9, parent=parent)


def test_a_machine_needs_no_link() -> None:
    assert make_machine().links == ()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"gpus": ()}, r"machine m: it has no GPU"),
        ({"links": (link("a"), link("a"))}, r"link names must be unique"),
        ({"links": (link("host"),)}, r"link names must be unique and not 'host'"),
        (
            {"gpus": (make_gpu(), make_gpu(link="swich")), "links": (link("switch"),)},
            r"GPU 1 hangs off unknown link 'swich'; known: host, switch",
        ),
        ({"links": (link("a", parent="b"),)}, r"link a hangs off unknown link 'b'"),
        ({"links": (link("a", parent="a"),)}, r"links \['a'\] form a loop"),
        ({"links": (link("a", "b"), link("b", "c"), link("c", "a"))}, r"links \['a', 'b', 'c'\] form a loop"),
        ({"gpus": (make_gpu(reserved_bytes=4 * GIB),)}, r"GPU 0 reserves 4.00 GiB of 4.00 GiB; nothing is left"),
        ({"nvlinks": (NvLink(gpus=(0, 2), bandwidth=1e9),)}, r"NVLink between GPUs \(0, 2\); it joins two of 0…1"),
        ({"nvlinks": (NvLink(gpus=(1, 1), bandwidth=1e9),)}, r"NVLink between GPUs \(1, 1\)"),
        (
            {"nvlinks": (NvLink(gpus=(0, 1), bandwidth=1e9), NvLink(gpus=(1, 0), bandwidth=1e9))},
            r"several NVLinks between GPUs",
        ),
        (
            {"links": (link("up"),), "emulation": Emulation(pace=4, gpu_bandwidth=1e9, links={"down": 1e9})},
            r"a rate for each of its links, and no other; see \['down', 'up'\]",
        ),
        ({"host": two_sockets()}, r"it has 2 socket\(s\); several are joined by an \[interconnect\]"),
        ({"interconnect": JOINT}, r"it has 1 socket\(s\); several are joined by an \[interconnect\], and only several"),
        ({"gpus": (make_gpu(socket=1),)}, r"GPU 0 is on socket 1; sockets are 0…0"),
        (
            {"host": two_sockets(), "interconnect": JOINT, "links": (Link(name="a", bandwidth=1e9, socket=2),)},
            r"link a is on socket 2; sockets are 0…1",
        ),
        (
            {
                "host": two_sockets(),
                "interconnect": JOINT,
                "links": (link("a"),),
                "gpus": (make_gpu(link="a", socket=1),),
            },
            r"GPU 0 hangs off 'a' and says socket 1; only what hangs off the host may",
        ),
        (
            {"host": two_sockets(memory_on=(0, 0)), "interconnect": JOINT},
            r"host memory on sockets \[0, 0\]; sockets are 0…1, each named once",
        ),
        (
            {"gpus": (make_gpu(efficiency=((8, 0.5), (8, 0.6))),)},
            r"efficiency of GPU 0: sizes must grow from above 0; 8 B follows 8 B",
        ),
        (
            {"links": (Link(name="a", bandwidth=1e9, efficiency=((0, 0.5),)),)},
            r"efficiency of link a: sizes must grow from above 0; 0 B follows 0 B",
        ),
        (
            {"nvlinks": (NvLink(gpus=(0, 1), bandwidth=1e9, efficiency=((8, 0.5), (10, 1.0))),)},
            r"efficiency of NVLink \(0, 1\): a copy of 10 B would end before one of 8 B",
        ),
    ],
)
def test_what_cannot_be(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(MachineError, match=problem):
        make_machine(**changes)


def test_a_branch_off_a_loop_is_found_too() -> None:
    links = (link("leaf", "a"), link("a", "b"), link("b", "a"))
    with pytest.raises(MachineError, match="form a loop"):
        make_machine(links=links)


def test_usable_memory_is_what_is_not_reserved() -> None:
    assert make_gpu(reserved_bytes=GIB).usable_bytes == 3 * GIB


def test_fewer_gpus_keep_the_first_and_their_nvlinks() -> None:
    gpus = tuple(make_gpu(name=name) for name in "abcd")
    edges = tuple(NvLink(gpus=pair, bandwidth=1e9) for pair in ((0, 1), (2, 3)))
    fewer = make_machine(gpus=gpus, nvlinks=edges).with_gpus(3)
    assert [gpu.name for gpu in fewer.gpus] == ["a", "b", "c"]
    assert fewer.nvlinks == edges[:1]


def test_more_gpus_repeat_the_last() -> None:
    first, last = make_gpu(name="a"), make_gpu(name="b", speed=0.5)
    assert make_machine(gpus=(first, last)).with_gpus(4).gpus == (first, last, last, last)


def test_a_machine_has_at_least_one_gpu() -> None:
    with pytest.raises(MachineError, match="machine m: 0 GPUs asked for"):
        make_machine().with_gpus(0)


def test_a_machine_has_no_absurd_number_of_gpus() -> None:
    with pytest.raises(MachineError, match="machine m: 1025 GPUs asked for; one server has at most 1024"):
        make_machine().with_gpus(1025)


def test_usable_memory_can_be_set_beside_what_is_reserved() -> None:
    machine = make_machine(gpus=(make_gpu(reserved_bytes=GIB), make_gpu())).with_usable_memory(9 * 10**9)
    assert [gpu.usable_bytes for gpu in machine.gpus] == [9 * 10**9] * 2
    assert [gpu.reserved_bytes for gpu in machine.gpus] == [GIB, 0]


def test_host_memory_can_be_unlimited() -> None:
    assert make_machine().with_host_memory(None).host.memory_bytes is None
    assert make_machine().with_host_memory(5).host.memory_bytes == 5
