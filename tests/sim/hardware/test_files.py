"""Machine files: what they may say, how they refuse the rest, and that writing and reading gives the same machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.errors import MachineError
from sim.hardware.files import load_machine, save_machine, shipped_machines
from sim.hardware.machine import HOST, Efficiency, Emulation, Gpu, Host, Interconnect, Link, Machine, NvLink, Sharing
from traces.errors import FileError

SMALL = """
sharing = "priority"

[host]
memory = "64 GB"
dram_bandwidth = "20 GB/s"
cores = 4
sockets = 2
memory_on = [1]

[interconnect]
bandwidth = "16 GB/s"
both_directions = "30 GB/s"
latency = "1 us"

[[links]]
name = "switch"
bandwidth = "12.35 GB/s"
latency = "2 us"

[[gpus]]
count = 2
name = "GTX"
memory = "11 GiB"
reserved = "1 GiB"
link = "switch"
bandwidth = "12 GB/s"
copy_overhead = "10 us"

[[gpus]]
name = "RTX"
memory = "24 GB"
bandwidth = "25 GB/s"
bandwidth_up = "24 GB/s"
both_directions = "35 GB/s"
efficiency = [["64 KiB", 0.25], ["1 MiB", 1]]
socket = 1
p2p = false
speed = 2

[[nvlinks]]
gpus = [0, 1]
bandwidth = "50 GB/s"
efficiency = [["1 MB", 0.5]]

[emulation]
pace = 4
gpu_bandwidth = "0.25 GB/s"
links = { switch = "0.3 GB/s" }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.toml"


def test_every_key_arrives(path: Path) -> None:
    path.write_text(SMALL)
    gtx = Gpu(
        name="GTX",
        memory_bytes=11 * 2**30,
        reserved_bytes=2**30,
        link="switch",
        bandwidth=12e9,
        copy_overhead_ns=10_000,
    )
    rtx = Gpu(
        name="RTX",
        memory_bytes=24 * 10**9,
        bandwidth=25e9,
        bandwidth_up=24e9,
        both_directions=35e9,
        efficiency=((2**16, 0.25), (2**20, 1.0)),
        socket=1,
        p2p=False,
        speed=2.0,
    )
    assert load_machine(path) == Machine(
        name="small",
        host=Host(memory_bytes=64 * 10**9, dram_bandwidth=20e9, cores=4, sockets=2, memory_on=(1,)),
        interconnect=Interconnect(bandwidth=16e9, both_directions=30e9, latency_ns=1000),
        sharing=Sharing.PRIORITY,
        links=(Link(name="switch", bandwidth=12.35e9, latency_ns=2000),),
        gpus=(gtx, gtx, rtx),
        nvlinks=(NvLink(gpus=(0, 1), bandwidth=50e9, efficiency=((10**6, 0.5),)),),
        emulation=Emulation(pace=4.0, gpu_bandwidth=0.25e9, links={"switch": 0.3e9}),
    )


def test_a_name_in_the_file_goes_before_the_files_name(path: Path) -> None:
    path.write_text('name = "mine"\ndescription = "d"\n' + SMALL.replace('"64 GB"', '"unlimited"'))
    machine = load_machine(str(path))
    assert (machine.name, machine.description, machine.host.memory_bytes) == ("mine", "d", None)


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('memory = "24 GB"', 'memroy = "24 GB"', "[[gpus]] 2: unknown key 'memroy'; did you mean 'memory'?"),
        ("cores = 4", "cores = 4\nxyz = 1", "[host]: unknown key 'xyz'; known: memory, dram_bandwidth, cores, "),
        ("memory_on = [1]", "memory_no = [1]", "[host]: unknown key 'memory_no'; did you mean 'memory_on'?"),
        ('latency = "1 us"', 'latancy = "1 us"', "[interconnect]: unknown key 'latancy'; did you mean 'latency'?"),
        ("bandwidth_up", "bandwidth_pu", "[[gpus]] 2: unknown key 'bandwidth_pu'; did you mean 'bandwidth_up'?"),
        (
            'efficiency = [["1 MB"',
            'eficiency = [["1 MB"',
            "[[nvlinks]] 1: unknown key 'eficiency'; did you mean 'efficiency'?",
        ),
        ("[[nvlinks]]", "[[nvlink]]", "unknown key 'nvlink'; did you mean 'nvlinks'?"),
        ('gpu_bandwidth = "0.25 GB/s"', "", "[emulation]: 'gpu_bandwidth' is missing"),
        ('bandwidth = "25 GB/s"', "", "[[gpus]] 2: 'bandwidth' is missing"),
        ('memory = "64 GB"', "memory = 64", "[host]: memory: '64' is not a size; write a number and a unit"),
        ('memory = "64 GB"', 'memory = "64 Go"', "[host]: memory: '64 Go' is not a size"),
        ('memory = "64 GB"', "memory = true", "[host]: memory: 'True' is not a size"),
        ('"12.35 GB/s"', '"12.35 GB"', "[[links]] 1: bandwidth: '12.35 GB' is not a rate"),
        ('"12.35 GB/s"', '"0 GB/s"', "[[links]] 1: bandwidth: '0 GB/s' is not a rate above 0"),
        ('"2 us"', '"2 GB"', "[[links]] 1: latency: '2 GB' is not a time"),
        ("cores = 4", "cores = 0", "[host]: cores: 0 is not a whole number of at least 1"),
        ("cores = 4", "cores = 4.5", "[host]: cores: 4.5 is not a whole number of at least 1"),
        ("cores = 4", "cores = true", "[host]: cores: True is not a whole number of at least 1"),
        ("count = 2", "count = 1000000000", "[[gpus]] 1: count: 1000000000 is more than 1024"),
        ("count = 2", "count = -1", "[[gpus]] 1: count: -1 is not a whole number of at least 1"),
        ("speed = 2", "speed = 0", "[[gpus]] 2: speed: 0 is not a number above 0"),
        ("speed = 2", 'speed = "2"', "[[gpus]] 2: speed: '2' is not a number above 0"),
        ("speed = 2", "speed = inf", "[[gpus]] 2: speed: inf is not a number above 0"),
        ("speed = 2", "speed = nan", "[[gpus]] 2: speed: nan is not a number above 0"),
        ("memory_on = [1]", "memory_on = 1", "[host]: memory_on: 1 is not a list of sockets; write for example [0, 1]"),
        ("memory_on = [1]", "memory_on = [-1]", "[host]: memory_on: [-1] is not a list of sockets"),
        ("memory_on = [1]", "memory_on = [2]", "machine small: host memory on sockets [2]; sockets are 0…1"),
        ("socket = 1", "socket = -1", "[[gpus]] 2: socket: -1 is not a whole number of at least 0"),
        (
            'sharing = "priority"',
            'sharing = "unfair"',
            "sharing: 'unfair' is not a way to share links; known: fair, priority",
        ),
        ('["1 MiB", 1]', '["1 MiB", 1.5]', "[[gpus]] 2: efficiency: ['1 MiB', 1.5] is not a size and a share"),
        ('["1 MiB", 1]', '"1 MiB"', "[[gpus]] 2: efficiency: '1 MiB' is not a size and a share"),
        ('["1 MiB", 1]', '["1 Mio", 1]', "[[gpus]] 2: efficiency: '1 Mio' is not a size"),
        ('[["1 MB", 0.5]]', "0.5", "[[nvlinks]] 1: efficiency: 0.5 is not a size and a share"),
        ("pace = 4", "pace = 0.5", "[emulation]: pace: 0.5 is not a number of at least 1 (or 0, unpaced)"),
        ("p2p = false", 'p2p = "no"', "[[gpus]] 2: p2p: 'no' is not true or false"),
        ('name = "RTX"', "name = 3090", "[[gpus]] 2: name: 3090 is not text; put it in quotes"),
        ("gpus = [0, 1]", "gpus = [0]", "[[nvlinks]] 1: gpus: [0] is not a pair of GPU numbers"),
        ("gpus = [0, 1]", "gpus = [0, 9]", "machine small: NVLink between GPUs (0, 9)"),
        ('switch = "0.3 GB/s"', 'switch = "3"', "[emulation]: links: switch: '3' is not a rate"),
        ('links = { switch = "0.3 GB/s" }', 'links = "fast"', "[emulation]: links: 'fast' is not a table"),
        ('link = "switch"', 'link = "swich"', "machine small: GPU 0 hangs off unknown link 'swich'"),
        ("[host]", "[[host]]", "host: [{'memory': '64 GB', 'dram_bandwidth': '20 GB/s', 'cores': 4, "),
        ("[host]", "[host", "it is not TOML: Expected ']'"),
    ],
)
def test_errors_say_where_and_what(path: Path, old: str, new: str, problem: str) -> None:
    assert SMALL.count(old) == 1
    path.write_text(SMALL.replace(old, new))
    with pytest.raises(MachineError) as caught:
        load_machine(path)
    assert str(caught.value).startswith(f"machine file {path}: {problem}")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'host' is missing"),
        ("gpus = 4\n[host]\n", "gpus: 4 is not a list of tables; write each as [[gpus]]"),
        ('host = "h"\n', "host: 'h' is not a table; write it as [host]"),
        (SMALL.split("[[gpus]]")[0], "machine small: it has no GPU; add a [[gpus]] table"),
        ("gpus = [4]\n" + SMALL.split("[[links]]")[0], "[[gpus]] 1: 4 is not a table"),
    ],
)
def test_tables_that_are_none(path: Path, text: str, problem: str) -> None:
    path.write_text(text)
    with pytest.raises(MachineError) as caught:
        load_machine(path)
    assert str(caught.value).startswith(f"machine file {path}: {problem}")


def test_bytes_that_are_no_text(path: Path) -> None:
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(MachineError, match="it is not TOML"):
        load_machine(path)


def test_a_folder_is_no_machine(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cannot be read: Is a directory"):
        load_machine(tmp_path)


def test_an_unknown_name_gives_the_nearest_and_all() -> None:
    with pytest.raises(MachineError) as caught:
        load_machine("4x1080")
    assert str(caught.value) == (
        "machine file 4x1080: no such file, nor a shipped machine of that name; did you mean '4x1080ti'? shipped: "
        + ", ".join(shipped_machines())
    )


def test_a_file_goes_before_a_shipped_machine_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "4x1080ti").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    assert len(load_machine("4x1080ti").gpus) == 3


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="make that folder first"):
        save_machine(load_machine("emulated"), tmp_path / "none" / "m.toml")


class TestShipped:
    def test_names(self) -> None:
        expected = {
            "1x-h200", "4x1080ti", "4x3090-nvlink", "4x4090", "4xa100", "4xh100", "8x1080ti-2switch", "8x4090",
            "emulated",
        }  # fmt: skip
        assert set(shipped_machines()) == expected

    @pytest.mark.parametrize("name", shipped_machines())
    def test_each_loads_under_its_name_and_survives_writing(self, name: str, path: Path) -> None:
        machine = load_machine(name)
        assert machine.name == name
        assert machine.description
        save_machine(machine, path)
        assert load_machine(path) == machine

    def test_the_1080_ti_servers_have_what_the_artifact_assumes(self) -> None:
        for name, gpus, host_bytes in (("4x1080ti", 4, 375 * 10**9), ("8x1080ti-2switch", 8, 750 * 10**9)):
            machine = load_machine(name)
            assert [gpu.usable_bytes for gpu in machine.gpus] == [10 * 2**30] * gpus
            assert machine.host.memory_bytes == host_bytes
            assert {link.bandwidth for link in machine.links} == {12.35e9}

    def test_the_emulated_machine_is_slowed_by_its_pace(self) -> None:
        machine = load_machine("emulated")
        assert machine.emulation is not None
        assert machine.emulation.pace >= 2 * len(machine.gpus)
        assert {machine.host.speed, *(gpu.speed for gpu in machine.gpus)} == {1 / machine.emulation.pace}

    def test_the_emulated_machine_promises_its_nominal_rates(self) -> None:
        machine = load_machine("emulated")
        assert machine.emulation is not None
        assert {link.name: link.bandwidth for link in machine.links} == machine.emulation.links
        assert {gpu.bandwidth for gpu in machine.gpus} == {machine.emulation.gpu_bandwidth}
        assert {gpu.p2p_bandwidth for gpu in machine.gpus} == {machine.emulation.p2p_bandwidth}


# Any machine ----------------------------------------------------------------------------------------------------------

RATES = st.floats(0, 1e15, exclude_min=True)
SPEEDS = st.floats(1e-9, 1e9)
SIZES = st.integers(0, 2**60)
TIMES = st.integers(0, 10**12)
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def efficiencies(draw: st.DrawFn) -> Efficiency:
    """Up to three sizes, far enough from each other for the larger copy to take longer, whatever the shares."""
    base, shares = draw(st.integers(1, 2**30)), draw(st.lists(st.floats(0.01, 1), max_size=3))
    return tuple((base * 100**place, share) for place, share in enumerate(shares))


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    sockets = draw(st.integers(1, 3))
    names = draw(st.lists(NAMES.filter(lambda name: name != HOST), max_size=4, unique=True))
    links = tuple(
        Link(
            name=name,
            bandwidth=draw(RATES),
            parent=(parent := draw(st.sampled_from([HOST, *names[:number]]))),
            socket=draw(st.integers(0, sockets - 1)) if parent == HOST else 0,
            bandwidth_up=draw(st.none() | RATES),
            both_directions=draw(st.none() | RATES),
            latency_ns=draw(TIMES),
            efficiency=draw(efficiencies()),
        )
        for number, name in enumerate(names)
    )
    reserved = draw(SIZES)
    gpu = st.builds(
        Gpu,
        name=NAMES,
        memory_bytes=SIZES.map(lambda size: reserved + size + 1),
        bandwidth=RATES,
        link=st.sampled_from([HOST, *names]),
        reserved_bytes=st.sampled_from([0, reserved]),
        speed=SPEEDS,
        p2p=st.booleans(),
        p2p_bandwidth=st.none() | RATES,
        bandwidth_up=st.none() | RATES,
        both_directions=st.none() | RATES,
        copy_overhead_ns=TIMES,
        efficiency=efficiencies(),
    )
    kinds = draw(st.lists(gpu, min_size=1, max_size=3))
    gpus = tuple(kind for kind in kinds for _ in range(draw(st.integers(1, 3))))
    pairs = [(a, b) for a in range(len(gpus)) for b in range(a)]
    joined = draw(st.lists(st.sampled_from(pairs), unique=True, max_size=3)) if pairs else []
    emulation = Emulation(
        pace=draw(st.just(0.0) | st.floats(1, 100)),
        gpu_bandwidth=draw(RATES),
        p2p_bandwidth=draw(st.none() | RATES),
        links={name: draw(RATES) for name in names},
    )
    return Machine(
        name=draw(NAMES),
        description=draw(NAMES),
        host=Host(
            memory_bytes=draw(st.none() | SIZES),
            dram_bandwidth=draw(RATES),
            cores=draw(st.integers(1, 1000)),
            speed=draw(SPEEDS),
            sockets=sockets,
            memory_on=tuple(draw(st.lists(st.integers(0, sockets - 1), unique=True))),
        ),
        interconnect=draw(st.builds(Interconnect, bandwidth=RATES, both_directions=st.none() | RATES, latency_ns=TIMES))
        if sockets > 1
        else None,
        sharing=draw(st.sampled_from(Sharing)),
        links=links,
        gpus=gpus,
        nvlinks=tuple(NvLink(gpus=pair, bandwidth=draw(RATES)) for pair in joined),
        emulation=draw(st.sampled_from([None, emulation])),
    )


@given(machines())
@settings(max_examples=100, deadline=None)
def test_any_machine_survives_writing(tmp_path_factory: pytest.TempPathFactory, machine: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    save_machine(machine, path)
    assert load_machine(path) == machine
