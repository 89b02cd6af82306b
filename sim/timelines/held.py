"""What a GPU, or the host, holds when it holds most: bytes by tensor kind, and the largest buffers.

Twice: *planned*, as the schedule's total order would have it, one task after the other; and *observed*, at the times
at which tasks really ran. Lanes run side by side, so the two moments differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from ..schedule import Buffer, Interval, Schedule, TensorKind
from ..units import NS_PER_S
from .replay import MemoryChange

_LARGEST = 5
"""How many buffers are named."""


class HeldBuffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A buffer that is held: ``bytes`` of a tensor of these layers and samples."""

    tensor_kind: TensorKind
    layer_first: int
    layer_last: int
    samples: Interval | None
    bytes: int


class Held(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is held at one moment. ``by_kind`` adds up to ``bytes``, the host's store included; ``largest`` are buffers.

    ``time_ns`` and ``step`` say when (None: in the total order, which has no times, or never).
    """

    bytes: int
    by_kind: dict[TensorKind, int]
    largest: tuple[HeldBuffer, ...]
    step: int | None = None
    time_ns: int | None = None


class Peaks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one memory holds when it holds most, by plan and as observed."""

    planned: Held
    observed: Held

    def to_dict(self) -> dict[str, Any]:
        """JSON types only; ``time_s`` counts as the timeline's times do."""
        shown: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        for held in shown.values():
            time_ns = held.pop("time_ns")
            held["time_s"] = None if time_ns is None else time_ns / NS_PER_S
        return shown


def held_at_peaks(schedule: Schedule, steps: Sequence[Sequence[MemoryChange]]) -> dict[str, Peaks]:
    """For each GPU (``"0"``, ``"1"``, …) and the ``"host"``. ``steps`` are the memory changes of each step, by time.

    Of several moments at which as much is held, the first counts.
    """
    planned = _held_at_peak(schedule, _in_total_order(schedule))
    observed = [_held_at_peak(schedule, changes) for changes in steps]
    devices: list[int | None] = [*range(schedule.plan.gpus), None]
    peaks = {}
    for gpu in devices:
        step = max(range(len(steps)), key=lambda step: (observed[step][gpu].bytes, -step))
        most = msgspec.structs.replace(observed[step][gpu], step=step)
        peaks["host" if gpu is None else str(gpu)] = Peaks(
            planned=msgspec.structs.replace(planned[gpu], time_ns=None), observed=most
        )
    return peaks


def _in_total_order(schedule: Schedule) -> Iterable[MemoryChange]:
    """Allocations and frees as if each task ended before the next one starts; times are places in that order."""
    yield from (MemoryChange(-1, buffer, buffer.bytes) for buffer in schedule.residents)
    for task in schedule.tasks:
        for number in task.allocates:
            buffer = schedule.buffers[number]
            yield MemoryChange(2 * task.id, buffer, buffer.bytes)
        for number in task.frees:
            buffer = schedule.buffers[number]
            yield MemoryChange(2 * task.id + 1, buffer, -buffer.bytes)


def _held_at_peak(schedule: Schedule, changes: Iterable[MemoryChange]) -> dict[int | None, Held]:
    by_device: dict[int | None, list[MemoryChange]] = {gpu: [] for gpu in (*range(schedule.plan.gpus), None)}
    for change in changes:
        by_device[change.gpu].append(change)
    store: dict[int | None, Mapping[TensorKind, int]] = {None: schedule.memory.host_store}
    return {gpu: _at_peak(own, store.get(gpu, {})) for gpu, own in by_device.items()}


def _at_peak(changes: Sequence[MemoryChange], store: Mapping[TensorKind, int]) -> Held:
    """What one memory holds besides its ``store`` at its fullest moment; what is freed then does not count."""
    held = most = until = 0
    time_ns: int | None = None
    done = 0
    for moment, together in groupby(changes, key=attrgetter("time_ns")):
        for change in together:
            held += change.delta_bytes
            done += 1
        if held > most:
            most, until, time_ns = held, done, moment
    live: dict[int, int] = {}
    for change in changes[:until]:
        live[change.buffer.id] = live.get(change.buffer.id, 0) + change.delta_bytes
    buffers = {change.buffer.id: change.buffer for change in changes[:until]}
    return _held([(buffers[number], size) for number, size in live.items() if size], store, time_ns)


def _held(live: Sequence[tuple[Buffer, int]], store: Mapping[TensorKind, int], time_ns: int | None) -> Held:
    sizes = dict.fromkeys(TensorKind, 0) | dict(store)
    for buffer, size in live:
        sizes[buffer.kind] += size
    largest = sorted(live, key=lambda item: (-item[1], item[0].id))[:_LARGEST]
    return Held(
        bytes=sum(sizes.values()),
        by_kind={kind: size for kind, size in sizes.items() if size},
        largest=tuple(
            HeldBuffer(
                tensor_kind=buffer.kind,
                layer_first=buffer.layer_first,
                layer_last=buffer.layer_last,
                samples=buffer.samples,
                bytes=size,
            )
            for buffer, size in largest
        ),
        time_ns=time_ns,
    )
