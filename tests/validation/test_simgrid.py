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

from sim.engine.durations import Demands
from sim.engine.simulate import run_step
from sim.hardware.fabric import Fabric, Route
from sim.hardware.machine import HOST, Gpu, Host, Interconnect, Link, Machine, NvLink
from sim.schedule import Task, TaskKind
from sim.units import NS_PER_S
from tests.sim.handmade import Hand, plan

CHILD = Path(__file__).with_name("simgrid_child.py")
CASES = 240
ENGINE_CASES = 40
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
    """A Python that can import the SimGrid that the child is written for (3.x)."""
    probe = ["-c", "from simgrid import NetZone; NetZone.create_full_zone"]
    pythons = [python for python in (sys.executable, "/usr/bin/python3") if Path(python).exists()]
    return next(
        (python for python in pythons if not subprocess.run([python, *probe], capture_output=True).returncode), None
    )


def simgrid_ends(python: str, cases: list[dict[str, Any]]) -> list[list[float]]:
    done = subprocess.run([python, CHILD], input=json.dumps(cases), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[float]] = json.loads(done.stdout)
    return found


def compare(ours: list[list[float]], fabrics: list[Fabric], copies: list[list[Copy]], slack_s: float = 0.0) -> None:
    """Fail unless SimGrid lets all copies of all cases end at the same times (s)."""
    python = simgrid_python()
    if python is None:
        pytest.skip("no Python here can import simgrid (Debian: apt-get install python3-simgrid)")
    theirs = simgrid_ends(python, [described(*case) for case in zip(fabrics, copies, strict=True)])
    wrong = [
        f"case {number}: {copy.bytes} B from {copy.start_ns} ns end at {end} s, by SimGrid at {expected} s"
        for number, ends in enumerate(zip(copies, ours, theirs, strict=True))
        for copy, end, expected in zip(*ends, strict=True)
        # Of the time that the copy took, which is stricter than of the time at which it ended.
        if abs(end - expected) > TOLERANCE * (expected - copy.start_ns / NS_PER_S) + slack_s
    ]
    assert not wrong, "\n".join(wrong[:10])


def test_copies_end_when_simgrid_says() -> None:
    draws = [Random(seed) for seed in range(CASES)]
    machines = [random_machine(draw) for draw in draws]
    fabrics = [Fabric(machine) for machine in machines]
    copies = [random_copies(*case) for case in zip(draws, fabrics, [len(m.gpus) for m in machines], strict=True)]
    compare([our_ends(*case) for case in zip(fabrics, copies, strict=True)], fabrics, copies)


class Waits:
    """Each GPU computes for a time of its own, once; nothing else takes time."""

    threads = 0

    def __init__(self, waits_ns: list[int]) -> None:
        self._waits_ns = waits_ns

    def compute_ns(self, task: Task) -> int:
        assert task.gpu is not None
        return self._waits_ns[task.gpu]

    def host_bytes(self, task: Task) -> int:
        raise AssertionError(f"{task} is not in the host")


def test_the_engine_ends_copies_when_simgrid_says() -> None:
    """Every GPU computes, then swaps in and out and sends to its neighbour at once."""
    ours, fabrics, copies = [], [], []
    for seed in range(CASES, CASES + ENGINE_CASES):
        draw = Random(seed)
        machine = random_machine(draw)
        gpus = len(machine.gpus)
        waits = [draw.choice([0, draw.randrange(100_000_000)]) for _ in range(gpus)]
        demands = Demands(machine, Waits(waits), gpus)
        hand, started = Hand(plan(gpus=gpus, minibatch=gpus)), []
        for gpu in range(gpus):
            computed = hand.task(TaskKind.FORWARD, gpu=gpu)
            for kind in (TaskKind.SWAP_IN, TaskKind.SWAP_OUT, TaskKind.P2P)[: 3 if gpus > 1 else 2]:
                peer = (gpu + 1) % gpus if kind is TaskKind.P2P else None
                size = draw.randint(10**6, 10**8)
                task = hand.task(kind, gpu=gpu, peer=peer, bytes=size, waits_for=(computed,))
                started.append((task, Copy(demands.of(hand.tasks[task]).flows[0].route, size, waits[gpu])))
        step = run_step(hand.schedule(), demands)
        ours.append([step.end_ns[task] / NS_PER_S for task, _ in started])
        fabrics.append(demands.fabric)
        copies.append([copy for _, copy in started])
    compare(ours, fabrics, copies, slack_s=2e-9)  # as the engine counts whole nanoseconds
