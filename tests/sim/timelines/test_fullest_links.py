"""Which link binds a copy, on machines where one link is clearly the narrowest, or becomes so by what else copies."""

from __future__ import annotations

import pytest

from sim.engine.simulate import simulate
from sim.hardware.machine import Gpu, Host, Link, Machine, NvLink
from sim.schedule import Schedule, TaskKind, TensorKind
from sim.timelines.fullest_links import fullest_links
from sim.timelines.replay import StepTimes
from tests.sim.handmade import Hand, plan, tiny_trace


def shared(
    *, root: float = 1e9, own: float = 1e9, dram: float = 1e12, up: float | None = None, p2p: bool = True
) -> Machine:
    """Two GPUs behind one link, each on a link of its own; rates in bytes/s."""
    one = Gpu(name="0", memory_bytes=10**15, bandwidth=own, link="root", p2p=p2p)
    host = Host(memory_bytes=None, dram_bandwidth=dram, cores=1)
    link = Link(name="root", bandwidth=root, bandwidth_up=up)
    return Machine(name="shared", host=host, gpus=(one,), links=(link,)).with_gpus(2)


def copies(*tasks: tuple[TaskKind, int, int]) -> Schedule:
    """Copies at once: kind, GPU, bytes; a P2P copy goes to the other GPU, an all-reduce over both."""
    hand = Hand(plan(gpus=2))
    for kind, gpu, size in tasks:
        where = {TaskKind.P2P: {"gpu": gpu, "peer": 1 - gpu}, TaskKind.ALLREDUCE: {"gpu": None}}.get(kind, {"gpu": gpu})
        hand.task(kind, tensor_kind=TensorKind.WEIGHT, bytes=size, **where)  # type: ignore[arg-type]
    return hand.schedule()


def names(schedule: Schedule, machine: Machine) -> list[str]:
    """The bottleneck of every copy, in a simulation."""
    frame = simulate(schedule, tiny_trace(), machine).frame
    times = StepTimes(frame["start_ns"].tolist(), frame["end_ns"].tolist())
    return list(fullest_links(schedule, times, machine, range(len(schedule.tasks))).values())


IN, OUT, P2P, RING = TaskKind.SWAP_IN, TaskKind.SWAP_OUT, TaskKind.P2P, TaskKind.ALLREDUCE


@pytest.mark.parametrize(
    ("machine", "bottleneck"),
    [
        (shared(own=0.5e9), "gpu0 down"),
        (shared(root=0.5e9), "root down"),
        (shared(dram=0.1e9), "dram"),
        (shared(), "root down"),  # both are as full; the one nearest to the host counts
    ],
)
def test_alone_it_is_the_narrowest_link(machine: Machine, bottleneck: str) -> None:
    assert names(copies((IN, 0, 1000)), machine) == [bottleneck]


def test_directions_are_told_apart() -> None:
    assert names(copies((IN, 0, 1000), (OUT, 0, 1000)), shared(up=0.5e9)) == ["root down", "root up"]


def test_what_else_copies_makes_a_shared_link_the_bottleneck() -> None:
    """One GPU alone is bound by its own link, of 0.7 GB/s; two of them by the shared one, of 1 GB/s."""
    machine = shared(own=0.7e9)
    assert names(copies((IN, 1, 1000)), machine) == ["gpu1 down"]
    assert names(copies((IN, 0, 1000), (IN, 1, 1000)), machine) == ["root down"] * 2


def test_most_of_the_time_counts() -> None:
    """Beside a short copy for GPU 1, a long one for GPU 0 is still bound by its own link."""
    assert names(copies((IN, 0, 100_000), (IN, 1, 1000)), shared(own=0.7e9)) == ["gpu0 down", "root down"]


def test_between_gpus() -> None:
    """Without P2P a copy takes the shared link both ways; over NVLink only that; a ring takes both edges."""
    assert names(copies((P2P, 0, 1000)), shared(own=0.7e9)) == ["gpu0 up"]
    assert names(copies((P2P, 0, 1000)), shared(own=0.7e9, dram=0.9e9, p2p=False)) == ["dram"]
    joined = shared()
    joined = Machine(
        name="joined", host=joined.host, gpus=joined.gpus, links=joined.links,
        nvlinks=(NvLink(gpus=(0, 1), bandwidth=2e9),),
    )  # fmt: skip
    assert names(copies((P2P, 1, 1000)), joined) == ["nvlink 1-0"]
    assert names(copies((RING, 0, 1000)), shared(own=0.7e9)) == ["gpu0 down"]


def test_a_copy_that_took_no_time_has_a_bottleneck_as_well() -> None:
    schedule = copies((IN, 0, 1000), (OUT, 1, 0))
    assert fullest_links(schedule, StepTimes([5, 7], [5, 9]), shared(own=0.5e9), [0]) == {0: "gpu0 down"}
