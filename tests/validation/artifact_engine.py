"""The artifact's events on our engine: as the tasks of a Schedule, on a Machine whose links nothing shares.

The artifact divides the host's bandwidth by the ranks once and for all; here that is a link of that bandwidth for each
GPU, straight to a host that is never the bottleneck, and an edge between neighbours for copies from GPU to GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from msgspec.structs import replace

from sim.engine.durations import Demands
from sim.engine.simulate import run_step
from sim.hardware.machine import Machine, NvLink
from sim.schedule import Lane, Schedule, Task, TaskKind
from sim.units import NS_PER_S
from tests.sim.handmade import Hand, machine, plan

from .artifact_cases import Case
from .artifact_graph import Event, Stream

_LANES = {
    Stream.SWAP_IN: (TaskKind.SWAP_IN, Lane.SWAP_IN),
    Stream.SWAP_OUT: (TaskKind.SWAP_OUT, Lane.SWAP_OUT),
    Stream.P2P_IN: (TaskKind.P2P, Lane.P2P_OUT),
    Stream.COMPUTE: (TaskKind.FORWARD, Lane.COMPUTE),
    Stream.CPU: (TaskKind.UPDATE, Lane.UPDATE),
}


class Times(NamedTuple):
    """When an event began and ended."""

    start_ns: int
    end_ns: int


def run_events(events: list[Event], case: Case) -> list[Times]:
    """Simulate: the times of each event."""
    tasks = _task_of_each(events)
    schedule = _schedule(events, tasks, case.busy_ranks)
    seconds = [0.0] * len(schedule.tasks)
    for event, task in zip(events, tasks, strict=True):
        seconds[task] = event.seconds or 0.0
    step = run_step(schedule, Demands(_machine(case), _Given(seconds), case.busy_ranks))
    return [Times(step.start_ns[task], step.end_ns[task]) for task in tasks]


class _Given:
    """Durations that the events bring along, by task; in the host nothing slows another."""

    threads = 0

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = seconds

    def compute_ns(self, task: Task) -> int:
        return round(self._seconds[task.id] * NS_PER_S)

    def host_bytes(self, task: Task) -> int:
        return 0


def _task_of_each(events: list[Event]) -> list[int]:
    """Ids of the tasks. A copy between ranks is one task for two events, at the receiver's place."""
    ids: dict[Event, int] = {}
    for event in events:
        if event.stream is not Stream.P2P_OUT:
            ids[event] = len(ids)
    return [ids[event.partner] if event.stream is Stream.P2P_OUT and event.partner else ids[event] for event in events]


def _schedule(events: list[Event], tasks: list[int], gpus: int) -> Schedule:
    hand = Hand(plan(gpus=gpus, minibatch=gpus))
    task_of = dict(zip(events, tasks, strict=True))
    for event in events:
        if event.stream is Stream.P2P_OUT:
            continue
        kind, lane = _LANES[event.stream]
        sender, receiver = (event.partner.rank, event.rank) if event.partner else (event.rank, None)
        waits = [*event.waits, *(event.partner.waits if event.partner else ())]
        hand.task(
            kind,
            event.layers,
            gpu=sender,
            lane=lane,
            peer=receiver,
            microbatch=event.microbatch,
            bytes=event.bytes or 0,
            waits_for=tuple(task_of[before] for before in waits),
        )
    return hand.schedule()


def _machine(case: Case) -> Machine:
    gpus, constants = case.busy_ranks, case.constants
    neighbours = {(min(edge), max(edge)) for edge in ((gpu, (gpu + 1) % gpus) for gpu in range(gpus)) if gpus > 1}
    return replace(
        machine(gpus=gpus, bandwidth=constants.bw_swap / gpus, dram=math.inf),
        nvlinks=tuple(NvLink(gpus=edge, bandwidth=constants.bw_p2p) for edge in sorted(neighbours)),
    )
