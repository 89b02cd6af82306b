"""A machine for a person to read: GPUs, the tree of links, the host; and the same as plain data."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..units import exact_bytes, exact_ns, format_bytes, format_rate
from .fabric import Fabric
from .machine import HOST, Gpu, Interconnect, Link, Machine, Sharing


def machine_to_dict(machine: Machine) -> dict[str, Any]:
    """The machine in plain JSON types, under the names of its fields; each GPU also has its ``usable_bytes``."""
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(machine))
    for gpu, entry in zip(machine.gpus, plain["gpus"], strict=True):
        entry["usable_bytes"] = gpu.usable_bytes
    return plain


def describe(machine: Machine) -> RenderableType:
    """A rich renderable: what the GPUs are, how they hang together, and what the host offers."""
    parts: list[RenderableType] = [Text(machine.name, style="bold")]
    if machine.description:
        parts.append(Text(machine.description))
    parts += [_gpu_table(machine), _link_tree(machine)]
    for edge in machine.nvlinks:
        first, second = edge.gpus
        parts.append(Text(f"NVLink GPU {first} ↔ GPU {second}: {format_rate(edge.bandwidth)} each way"))
    if (joint := machine.interconnect) is not None:
        homes = ", ".join(str(socket) for socket in machine.host.memory_sockets)
        text = f"interconnect of the sockets: {format_rate(joint.bandwidth)} each way"
        parts.append(Text(text + _more(joint) + f"; memory on sockets {homes}"))
    if machine.host.dram_bandwidth < math.inf:
        parts.append(Text("updates and reductions in the host share DRAM with copies, and the cores with each other"))
    if machine.sharing is Sharing.PRIORITY:
        parts.append(Text("copies that computation waits for go first, copies out of GPUs last"))
    if machine.emulation is not None:
        nominal = [("GPU", machine.emulation.gpu_bandwidth), *machine.emulation.links.items()]
        rates = ", ".join(f"{name} {format_rate(rate)}" for name, rate in nominal)
        parts.append(Text(f"emulated at pace {machine.emulation.pace:g}, nominal rates: {rates}"))
    return Group(*parts)


def _runs(gpus: tuple[Gpu, ...]) -> list[tuple[str, int, Gpu]]:
    """Neighbouring equal GPUs: how to call them, the first's number, and one of them."""
    runs = []
    for gpu, members in groupby(enumerate(gpus), key=lambda numbered: numbered[1]):
        numbers = [number for number, _ in members]
        label = f"GPUs {numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else f"GPU {numbers[0]}"
        runs.append((label, numbers[0], gpu))
    return runs


def _gpu_table(machine: Machine) -> Table:
    table = Table("", "model", "usable", "memory", "swap in", "P2P", "speed")
    fabric = Fabric(machine)
    for label, number, gpu in _runs(machine.gpus):
        if not gpu.p2p:
            p2p = "via host"
        else:
            p2p = format_rate(gpu.p2p_bandwidth) if gpu.p2p_bandwidth is not None else "as the links"
        table.add_row(
            label,
            gpu.name,
            format_bytes(gpu.usable_bytes),
            format_bytes(gpu.memory_bytes),
            format_rate(fabric.uncontended_rate(fabric.swap_in(number))),
            p2p,
            f"{gpu.speed:g}",
        )
    return table


def _link_tree(machine: Machine) -> Tree:
    host = machine.host
    memory = "unlimited memory" if host.memory_bytes is None else f"{format_bytes(host.memory_bytes)} of memory"
    dram = "DRAM that slows nothing" if host.dram_bandwidth == math.inf else f"DRAM {format_rate(host.dram_bandwidth)}"
    cores = "cores for all" if host.cores is None else f"{host.cores} cores"
    speed = "" if host.speed == 1 else f", speed {host.speed:g}"
    tree = Tree(f"host: {memory}, {dram}, {cores}{speed}")
    _grow(tree, machine, HOST)
    return tree


def _grow(tree: Tree, machine: Machine, parent: str) -> None:
    for link in machine.links:
        if link.parent == parent:
            _grow(tree.add(f"link {link.name}: {_rates(link)}"), machine, link.name)
    for label, _, gpu in _runs(machine.gpus):
        if gpu.link == parent:
            tree.add(f"{label}: {_rates(gpu)}")


def _rates(end: Link | Gpu) -> str:
    text = f"{format_rate(end.bandwidth)} each way"
    if end.bandwidth_up is not None:
        text = f"{format_rate(end.bandwidth)} down, {format_rate(end.bandwidth_up)} up"
    text += _more(end)
    if end.efficiency:
        text += "; " + ", ".join(f"{share:.0%} at {exact_bytes(size)}" for size, share in end.efficiency)
    return text if not end.socket else f"{text}; socket {end.socket}"


def _more(end: Link | Gpu | Interconnect) -> str:
    text = ""
    if end.both_directions is not None:
        text += f", {format_rate(end.both_directions)} both ways together"
    match end:
        case Link(latency_ns=delay_ns) | Interconnect(latency_ns=delay_ns) if delay_ns:
            text += f", latency {exact_ns(delay_ns)}"
        case Gpu(copy_overhead_ns=delay_ns) if delay_ns:
            text += f", {exact_ns(delay_ns)} a copy"
    return text
