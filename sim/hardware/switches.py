"""Which GPUs lie behind which switches, and an order of GPUs that crosses from one switch to the next."""

from __future__ import annotations

from itertools import chain, zip_longest

from .machine import HOST, Gpu, Link, Machine


def cross_order(machine: Machine) -> tuple[int, ...]:
    """All GPUs, such that neighbours lie behind different switches: each switch in turn gives its next GPU.

    So do the sockets above the switches, and the switches below them. Two switches of two GPUs: 0, 2, 1, 3.
    """
    sockets: dict[int, list[list[int]]] = {}
    for end, order in _behind(machine, HOST):
        sockets.setdefault(end.socket, []).append(order)
    return tuple(_in_turn([_in_turn(orders) for orders in sockets.values()]))


def _behind(machine: Machine, parent: str) -> list[tuple[Link | Gpu, list[int]]]:
    """What hangs off a link (or the host) directly, each with the crossing order of the GPUs that it leads to."""
    links: list[tuple[Link | Gpu, list[int]]] = [
        (link, _in_turn([order for _, order in _behind(machine, link.name)]))
        for link in machine.links
        if link.parent == parent
    ]
    return links + [(gpu, [number]) for number, gpu in enumerate(machine.gpus) if gpu.link == parent]


def _in_turn(orders: list[list[int]]) -> list[int]:
    """The first of each, then the second of each, and so on."""
    return [gpu for gpu in chain.from_iterable(zip_longest(*orders)) if gpu is not None]
