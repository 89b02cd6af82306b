"""Copies over random machines end when SimGrid says: same links and paths, and none of our code.

SimGrid runs in a child process, once for all cases (``simgrid_child.py``), if some Python here can import it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest

from sim.hardware.fabric import Fabric, Route
from sim.hardware.machine import HOST, Gpu, Host, Interconnect, Link, Machine, NvLink
from sim.units import NS_PER_S

CHILD = Path(__file__).with_name("simgrid_child.py")
CASES = 240
TOLERANCE = 1e-6


class Copy(NamedTuple):
    """Bytes over a route, from a start on (ns)."""

    route: Route
    bytes: int
    start_ns: int


def random_machine(draw: Random) -> Machine:
    """Up to eight GPUs on a tree of up to five links, with caps on both directions, NVLink, P2P or not, one or two
    sockets."""

    def rate() -> float:
        return draw.choice([draw.uniform(1e9, 50e9), 12.35e9, 25e9])

    def perhaps(value: Any) -> Any:
        return draw.choice([None, value])

    sockets = draw.choice([1, 2])
    links: list[Link] = []
    for number in range(draw.randint(0, 5)):
        parent = draw.choice([HOST, *(link.name for link in links)])
        socket = draw.randrange(sockets) if parent == HOST else 0
        links.append(
            Link(name=f"link{number}", parent=parent, socket=socket, bandwidth=rate(), both_directions=perhaps(rate()))
        )
    gpus = []
    for _ in range(draw.randint(1, 8)):
        at = draw.choice([HOST, *(link.name for link in links)])
        gpus.append(
            Gpu(
                name="gpu",
                memory_bytes=1,
                link=at,
                socket=draw.randrange(sockets) if at == HOST else 0,
                bandwidth=rate(),
                bandwidth_up=perhaps(rate()),
                both_directions=perhaps(rate()),
                p2p=draw.random() < 0.7,
                p2p_bandwidth=perhaps(rate()),
            )
        )
    pairs = draw.sample(pairs := list(combinations(range(len(gpus)), 2)), min(len(pairs), draw.choice([0, 0, 1, 2])))
    # Memory on one socket only: SimGrid has no flow that loads a link with a part of its bytes.
    host = Host(memory_bytes=None, dram_bandwidth=rate() * 3, cores=1, sockets=sockets, memory_on=(sockets - 1,))
    return Machine(
        name="random",
        host=host,
        interconnect=Interconnect(bandwidth=rate(), both_directions=perhaps(rate())) if sockets > 1 else None,
        links=tuple(links),
        gpus=tuple(gpus),
        nvlinks=tuple(NvLink(gpus=pair, bandwidth=rate()) for pair in pairs),
    )


def random_copies(draw: Random, fabric: Fabric, gpus: int) -> list[Copy]:
    """Swaps, copies between GPUs and work in host memory; some start together, some are alike."""
    starts = [draw.randrange(200_000_000) for _ in range(draw.randint(1, 12))]
    copies = []
    for _ in range(draw.randint(1, 24)):
        gpu, peer = draw.randrange(gpus), draw.randrange(gpus)
        kinds = [fabric.swap_in(gpu), fabric.swap_out(gpu), fabric.host_memory()]
        route = draw.choice(kinds if gpu == peer else [*kinds[:2], fabric.p2p(gpu, peer)])
        size = draw.choice([draw.randint(1, 10**7), draw.randint(10**7, 10**9), 64 * 2**20])
        copies.append(Copy(route, size, draw.choice(starts)))
    return copies


def our_ends(fabric: Fabric, copies: list[Copy]) -> list[float]:
    """In seconds."""
    fluid = fabric.fluid()
    for number, copy in sorted(enumerate(copies), key=lambda numbered: numbered[1].start_ns):
        fluid.start(copy.start_ns, number, copy.route.loads, copy.bytes, copy.route.cap)
    fluid.advance(10**18)
    return [fluid.finished[number] / NS_PER_S for number in range(len(copies))]


def described(fabric: Fabric, copies: list[Copy]) -> dict[str, Any]:
    """A case for SimGrid. A copy's own cap is a link that only it takes."""
    links = {resource.name: resource.capacity for resource in fabric.resources}
    links |= {f"cap{number}": copy.route.cap for number, copy in enumerate(copies) if copy.route.cap < float("inf")}
    flows = []
    for number, (route, size, start_ns) in enumerate(copies):
        path = [fabric.resources[resource].name for resource, times in route.loads for _ in range(int(times))]
        assert len(path) == sum(times for _, times in route.loads)
        path += [name for name in [f"cap{number}"] if name in links]
        flows.append([path, size, start_ns / NS_PER_S])
    return {"links": links, "flows": flows}


def simgrid_python() -> str | None:
    """A Python that can import SimGrid."""
    for python in (sys.executable, "/usr/bin/python3"):
        if (
            Path(python).exists()
            and not subprocess.run([python, "-c", "import simgrid"], capture_output=True).returncode
        ):
            return python
    return None


def simgrid_ends(python: str, cases: list[dict[str, Any]]) -> list[list[float]]:
    done = subprocess.run([python, CHILD], input=json.dumps(cases), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[float]] = json.loads(done.stdout)
    return found


def test_copies_end_when_simgrid_says() -> None:
    python = simgrid_python()
    if python is None:
        pytest.skip("no Python here can import simgrid (Debian: apt-get install python3-simgrid)")
    cases = []
    for seed in range(CASES):
        draw = Random(seed)
        machine = random_machine(draw)
        fabric = Fabric(machine)
        cases.append((fabric, random_copies(draw, fabric, len(machine.gpus))))
    expected = simgrid_ends(python, [described(*case) for case in cases])
    wrong = [
        f"case {seed}, copy {number} of {copy.bytes} B from {copy.start_ns} ns: {ours} s, SimGrid {theirs} s"
        for seed, (case, ends) in enumerate(zip(cases, expected, strict=True))
        for number, (copy, ours, theirs) in enumerate(zip(case[1], our_ends(*case), ends, strict=True))
        # Of the time that the copy took, which is stricter than of the time at which it ended.
        if abs(ours - theirs) > TOLERANCE * (theirs - copy.start_ns / NS_PER_S)
    ]
    assert not wrong, "\n".join(wrong[:10])
