"""Measuring a machine's copies, on the devices that will run.

Every figure comes from timing copies through the devices' own queues: one GPU alone at several sizes (its rate, and
what a copy costs before its first byte), all GPUs below a link at once (the link's rate), both directions at once
(whether they limit each other). :func:`measured_machine` decides what to copy and what the times mean; it sees only
times, so it can be tested against a fabric without a clock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
import psutil
import torch
from torch import Tensor

from sim.hardware.machine import HOST, Gpu, Host, Link, Machine
from sim.schedule import Lane, LaneKey, TaskKind
from sim.units import NS_PER_S

from ..devices.facade import Copy, DeviceKind, Devices, Queue, open_devices
from ..errors import DeviceError
from ..reporting import Progress, silent

REPEATS = 5
COPY_S = 0.04
"""About how long the longest copy lasts."""
SIZE_STEPS = (1 / 64, 1 / 16, 1 / 4, 1)
"""Sizes of copies, relative to the longest."""
PROBE_BYTES = 2**20
LARGEST_BYTES = 2**28
SHARED_BELOW = 0.95
"""A limit counts as there when copies together reach less than this share of what they reach one by one."""
MEMCPY_BYTES = 2**26


class Transfer(NamedTuple):
    """A copy to be timed: a swap of ``gpu`` (``peer`` None), or P2P from ``gpu`` to ``peer``."""

    kind: TaskKind
    gpu: int
    bytes: int
    peer: int | None = None


Measure = Callable[[Sequence[Transfer]], int]
"""How long copies that start together take until the last ends, in nanoseconds."""


class CopyRate(NamedTuple):
    """A copy of n bytes takes ``overhead_ns + n / bandwidth``; bandwidth in bytes/s."""

    overhead_ns: int
    bandwidth: float


def calibrate(machine: Machine, kind: DeviceKind, progress: Progress = silent) -> Machine:
    """``machine`` with what its copies really reach on the devices of this ``kind``, and this computer as its host.

    Overheads are measured from end to end, so links keep no latency. Memory, speeds and P2P access are kept, as are
    the [emulation] part and, on emulated devices, the caps on both directions together, which the emulator plays.
    Takes some seconds. Raises DeviceError if the devices are not there.
    """
    devices = open_devices(kind, machine)
    with devices.running():
        measured = measured_machine(
            machine, _Stopwatch(devices), progress, both_directions=kind is not DeviceKind.EMULATED
        )
        return msgspec.structs.replace(measured, host=measured_host(machine.host))


def cuda_machine() -> Machine:
    """The CUDA devices of this computer, below one link, with rates still to be measured (they say 1 byte/s).

    Speeds are 1: relative to traces made on these devices. What is in use already is reserved. Raises DeviceError if
    there is no CUDA device.
    """
    count = torch.cuda.device_count()
    if count == 0:
        raise DeviceError("there is no CUDA device; calibrate the machine 'emulated' instead (--device emulated)")
    gpus = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        peers = [peer for peer in range(count) if peer != index]
        gpus.append(
            Gpu(
                name=torch.cuda.get_device_name(index),
                memory_bytes=total,
                reserved_bytes=total - free,
                bandwidth=1.0,
                link="root",
                p2p=bool(peers) and all(torch.cuda.can_device_access_peer(index, peer) for peer in peers),
            )
        )
    host = Host(memory_bytes=psutil.virtual_memory().total, dram_bandwidth=1.0, cores=_cores())
    return Machine(name="this-computer", host=host, gpus=tuple(gpus), links=(Link(name="root", bandwidth=1.0),))


def measured_host(host: Host) -> Host:
    """``host`` with this computer's memory, cores, and what a plain copy in memory reads and writes together."""
    source = torch.ones(MEMCPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    durations = []
    for _ in range(REPEATS):
        started = time.perf_counter_ns()
        target.copy_(source)
        durations.append(time.perf_counter_ns() - started)
    return msgspec.structs.replace(
        host,
        memory_bytes=psutil.virtual_memory().total,
        dram_bandwidth=2 * MEMCPY_BYTES / min(durations) * NS_PER_S,
        cores=_cores(),
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------------------ what times mean


def fit_copy_rate(samples: Iterable[tuple[int, float]]) -> CopyRate:
    """Least squares of ``overhead + bytes / bandwidth`` to (bytes, ns) samples.

    The squared error of a copy is weighted by 1 / duration, between trusting all to the nanosecond and to the per cent
    alike. An overhead below 0 becomes 0. Raises DeviceError if more bytes take no more time.
    """
    sizes, durations = np.array(list(samples), dtype=float).T
    weights = durations**-0.5
    columns = np.stack([weights, sizes * weights], axis=1)
    overhead, ns_per_byte = np.linalg.lstsq(columns, durations * weights, rcond=None)[0]
    if overhead < 0:
        overhead, ns_per_byte = 0.0, durations.sum() / sizes.sum()
    if ns_per_byte <= 0:
        raise DeviceError(
            f"copies of {int(min(sizes))} to {int(max(sizes))} bytes take equally long; this computer is too busy to "
            "be calibrated, try again"
        )
    return CopyRate(round(overhead), float(NS_PER_S / ns_per_byte))


def measured_machine(
    machine: Machine, measure: Measure, progress: Progress = silent, *, both_directions: bool = True
) -> Machine:
    """``machine`` with measured rates and overheads of its GPUs, links and NVLink edges.

    A GPU's two directions have one bandwidth, their mean. A link is as fast as all GPUs below it together, if that is
    less than their sum; otherwise it only must not hold them back. ``both_directions`` False leaves those caps alone.
    """
    replace = msgspec.structs.replace
    every = range(len(machine.gpus))
    steps = len(every) + len(machine.links) + len(machine.nvlinks)
    done = 0

    def report(what: str) -> None:
        nonlocal done
        progress(done / steps, what)
        done += 1

    gpus: list[Gpu] = []
    for gpu in every:
        report(f"copies of GPU {gpu}")
        gpus.append(_measured_gpu(machine, gpu, measure, both_directions))
    links = []
    for link in machine.links:
        report(f"link {link.name}")
        below = [gpu for gpu in every if link.name in _way(machine, gpu)]
        links.append(_measured_link(link, {gpu: gpus[gpu] for gpu in below}, measure, both_directions))
    nvlinks = []
    for edge in machine.nvlinks:
        report(f"NVLink {edge.gpus[0]}-{edge.gpus[1]}")
        rate = _rate(machine, measure, TaskKind.P2P, *edge.gpus)
        nvlinks.append(replace(edge, bandwidth=rate.bandwidth, efficiency=()))
    progress(1.0, "calibrated")
    return replace(machine, gpus=tuple(gpus), links=tuple(links), nvlinks=tuple(nvlinks))


def _measured_gpu(machine: Machine, gpu: int, measure: Measure, both_directions: bool) -> Gpu:
    """Alone: in, out, to another GPU, and in and out at once."""
    spec = machine.gpus[gpu]
    into = _rate(machine, measure, TaskKind.SWAP_IN, gpu)
    out = _rate(machine, measure, TaskKind.SWAP_OUT, gpu)
    joined = {frozenset(edge.gpus) for edge in machine.nvlinks}
    peers = [peer for peer in range(len(machine.gpus)) if peer != gpu and frozenset((gpu, peer)) not in joined]
    to_peer = None
    if spec.p2p and peers:
        # The next GPU, so that all pairs of neighbours in a ring are measured.
        peer = next((peer for peer in peers if peer > gpu), peers[0])
        to_peer = _rate(machine, measure, TaskKind.P2P, gpu, peer).bandwidth
    spec = msgspec.structs.replace(
        spec,
        bandwidth=(into.bandwidth + out.bandwidth) / 2,
        bandwidth_up=None,
        efficiency=(),
        copy_overhead_ns=round((into.overhead_ns + out.overhead_ns) / 2),
        p2p_bandwidth=to_peer or spec.p2p_bandwidth,
    )
    if not both_directions:
        return spec
    directions = [TaskKind.SWAP_IN, TaskKind.SWAP_OUT]
    together = _together({gpu: spec}, directions, measure)
    capped = together < SHARED_BELOW * (into.bandwidth + out.bandwidth)
    return msgspec.structs.replace(spec, both_directions=together if capped else None)


def _measured_link(link: Link, below: dict[int, Gpu], measure: Measure, both_directions: bool) -> Link:
    """All GPUs below the link at once, in each direction, and in both."""
    alone = sum(gpu.bandwidth for gpu in below.values())
    if not below:
        return link
    one_way = median(_together(below, [kind], measure) for kind in (TaskKind.SWAP_IN, TaskKind.SWAP_OUT))
    limits = one_way < SHARED_BELOW * alone
    rate = one_way if limits else max(link.bandwidth, alone)
    measured = msgspec.structs.replace(link, latency_ns=0, bandwidth=rate, bandwidth_up=None, efficiency=())
    if not both_directions:
        return measured
    both = _together(below, [TaskKind.SWAP_IN, TaskKind.SWAP_OUT], measure)
    expected = 2 * min(one_way, alone)
    own = sum(gpu.both_directions or 2 * gpu.bandwidth for gpu in below.values())
    capped = both < SHARED_BELOW * min(expected, own)
    return msgspec.structs.replace(measured, both_directions=both if capped else None)


def _rate(machine: Machine, measure: Measure, kind: TaskKind, gpu: int, peer: int | None = None) -> CopyRate:
    """Copies of several sizes, each alone; sizes take turns, so that a slow moment meets all of them."""
    room = min(machine.gpus[end].usable_bytes for end in (gpu, peer) if end is not None) // 4
    probe = Transfer(kind, gpu, min(PROBE_BYTES, room), peer)
    measure([probe])  # warm
    longest = min(LARGEST_BYTES, room, max(PROBE_BYTES, probe.bytes * COPY_S * NS_PER_S / measure([probe])))
    sizes = [max(1, round(longest * step)) for step in SIZE_STEPS]
    durations: dict[int, list[int]] = {size: [] for size in sizes}
    for _ in range(REPEATS):
        for size in sizes:
            durations[size].append(measure([probe._replace(bytes=size)]))
    return fit_copy_rate((size, median(times)) for size, times in durations.items())


def _together(gpus: dict[int, Gpu], kinds: Sequence[TaskKind], measure: Measure) -> float:
    """Bytes/s of all these GPUs' copies together; each copies what it could alone in the same time."""
    transfers = [
        Transfer(kind, index, round(min(LARGEST_BYTES, gpu.usable_bytes // 4, gpu.bandwidth * COPY_S)))
        for index, gpu in gpus.items()
        for kind in kinds
    ]
    overhead = max(gpu.copy_overhead_ns for gpu in gpus.values())
    duration = median(measure(transfers) for _ in range(REPEATS))
    return sum(transfer.bytes for transfer in transfers) / max(1.0, duration - overhead) * NS_PER_S


def _way(machine: Machine, gpu: int) -> Iterator[str]:
    """Names of the links between a GPU and the host."""
    parents = {link.name: link.parent for link in machine.links}
    at = machine.gpus[gpu].link
    while at != HOST:
        yield at
        at = parents[at]


# ---------------------------------------------------------------------------------------------------- timing copies


class _Stopwatch:
    """Times copies on devices (:data:`Measure`). Memory and queues are made at first use and kept."""

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._queues: dict[LaneKey, Queue] = {}
        self._host: dict[LaneKey, Tensor] = {}
        self._gpu: dict[tuple[int, LaneKey], Tensor] = {}

    def __call__(self, transfers: Sequence[Transfer]) -> int:
        jobs = [self._job(transfer) for transfer in transfers]
        ready = threading.Barrier(len(jobs))
        self._devices.begin()
        with ThreadPoolExecutor(len(jobs)) as threads:
            marks = list(threads.map(lambda job: job(ready), jobs))
        self._devices.finish()
        started = [self._devices.time_ns(start) for start, _ in marks]
        ended = [self._devices.time_ns(end) for _, end in marks]
        return max(1, max(ended) - min(started))

    def _job(self, transfer: Transfer) -> Callable[[threading.Barrier], tuple[object, object]]:
        """What a thread does: wait for the others, copy, and return the marks before and after."""
        lane = (transfer.gpu, _LANES[transfer.kind])
        if lane not in self._queues:
            self._queues[lane] = self._devices.queue(lane)
        queue = self._queues[lane]
        own = self._gpu_memory(transfer.gpu, lane, transfer.bytes)

        def run(ready: threading.Barrier) -> tuple[object, object]:
            ready.wait()
            start = queue.mark()
            match transfer.kind, transfer.peer:
                case TaskKind.SWAP_IN, None:
                    queue.swap([Copy(own, host)])
                case TaskKind.SWAP_OUT, None:
                    queue.swap([Copy(host, own)])
                case TaskKind.P2P, int(peer):
                    queue.send([Copy(self._gpu_memory(peer, lane, transfer.bytes), own)], peer)
                case _:
                    raise ValueError(f"{transfer} is no copy")
            return start, queue.mark()

        host = self._host_memory(lane, transfer.bytes)
        return run

    def _host_memory(self, lane: LaneKey, size: int) -> Tensor:
        if lane not in self._host or len(self._host[lane]) < size:
            self._host[lane] = self._devices.host_bytes(size).fill_(1)
        return self._host[lane][:size]

    def _gpu_memory(self, gpu: int, lane: LaneKey, size: int) -> Tensor:
        key = (gpu, lane)
        if key not in self._gpu or len(self._gpu[key]) < size:
            self._gpu[key] = torch.ones(size, dtype=torch.uint8, device=self._devices.device(gpu))
        return self._gpu[key][:size]


_LANES = {TaskKind.SWAP_IN: Lane.SWAP_IN, TaskKind.SWAP_OUT: Lane.SWAP_OUT, TaskKind.P2P: Lane.P2P_OUT}
