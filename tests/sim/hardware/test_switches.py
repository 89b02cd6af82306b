"""GPUs in an order that crosses switches."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from sim.hardware.files import load_machine
from sim.hardware.machine import HOST, Gpu, Host, Interconnect, Link, Machine
from sim.hardware.switches import cross_order
from tests.sim.planner.test_estimates import machines


def machine(gpus: list[str], *, links: dict[str, str] | None = None, sockets: dict[str, int] | None = None) -> Machine:
    """GPUs below these links; of each link its parent, and of those below the host the socket."""
    at = sockets or {}
    made = [Link(name=name, bandwidth=1e9, parent=up, socket=at.get(name, 0)) for name, up in (links or {}).items()]
    count = 1 + max(at.values(), default=0)
    return Machine(
        name="any",
        host=Host(memory_bytes=None, dram_bandwidth=1e9, cores=1, sockets=count),
        gpus=tuple(Gpu(name="any", memory_bytes=1, bandwidth=1e9, link=link) for link in gpus),
        links=tuple(made),
        interconnect=Interconnect(bandwidth=1e9) if count > 1 else None,
    )


@pytest.mark.parametrize(
    ("described", "order"),
    [
        (machine([HOST, HOST, HOST]), (0, 1, 2)),
        (machine(["a", "a", "b", "b"], links={"a": HOST, "b": HOST}), (0, 2, 1, 3)),
        (machine(["a", "b", "a", "b"], links={"a": HOST, "b": HOST}), (0, 1, 2, 3)),
        (machine(["a", "a", "a", "b"], links={"a": HOST, "b": HOST}), (0, 3, 1, 2)),
        (machine(["a", "a", HOST], links={"a": HOST}), (0, 2, 1)),
        # Two switches below each of two others: first across the tops, then across the switches below them.
        (
            machine(list("ccddeeff"), links={"a": HOST, "b": HOST, "c": "a", "d": "a", "e": "b", "f": "b"}),
            (0, 4, 2, 6, 1, 5, 3, 7),
        ),
        # Across sockets before switches.
        (
            machine(list("abcd"), links=dict.fromkeys("abcd", HOST), sockets={"a": 0, "b": 0, "c": 1, "d": 1}),
            (0, 2, 1, 3),
        ),
    ],
)
def test_switches_take_turns(described: Machine, order: tuple[int, ...]) -> None:
    assert cross_order(described) == order


def test_of_shipped_machines() -> None:
    assert cross_order(load_machine("4x1080ti")) == (0, 1, 2, 3)
    assert cross_order(load_machine("8x1080ti-2switch")) == (0, 4, 1, 5, 2, 6, 3, 7)


@settings(max_examples=50, deadline=None)
@given(machines(max_gpus=6))
def test_every_gpu_is_in_it_once(described: Machine) -> None:
    assert sorted(cross_order(described)) == list(range(len(described.gpus)))
