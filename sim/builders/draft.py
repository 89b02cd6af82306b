"""A schedule while it is being planned: entries in total order, and the buffers they touch.

Builders append entries that say only *what* they read and write. Three passes then make them a schedule:

1. :func:`assign_lifetimes`: the first user of a buffer allocates it, the last one frees it.
2. memory (``memory.py``): offsets, and the frees that each allocation relies on.
3. :func:`finish`: dependencies from reads and writes, pruned to what is not implied by lane order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from ..plan import Plan
from ..schedule import Buffer, Interval, Lane, LaneKey, MemoryPlan, Schedule, Task, TaskKind, TensorKind


@dataclass(slots=True)
class Entry:
    """A task to be. Its index in :attr:`Draft.entries` is its place in the total order and later its id.

    ``after`` holds entries that must end first for reasons that reads and writes of buffers do not show.
    ``group`` tells the builder which of its groups the entry was made for on the GPU whose memory it takes.
    """

    kind: TaskKind
    gpu: int | None
    lane: Lane
    layers: tuple[int, int]
    samples: Interval | None
    microbatch: int | None
    tensor_kind: TensorKind | None
    bytes: int
    peer: int | None
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    after: set[int]
    group: int | None
    is_saved: bool = False
    recompute: bool = True
    shard: int | None = None
    allocates: list[int] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)

    @property
    def lanes(self) -> tuple[LaneKey, ...]:
        """As :attr:`Task.lanes`."""
        own = (self.gpu, self.lane)
        return (own, (self.peer, Lane.P2P_IN)) if self.peer is not None else (own,)

    @property
    def users(self) -> tuple[int, ...]:
        """Buffers it touches, each once."""
        return tuple(dict.fromkeys(self.reads + self.writes))


class Draft:
    """Entries and buffers, both append-only until the passes run."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.buffers: list[Buffer] = []

    def buffer(
        self,
        gpu: int | None,
        kind: TensorKind,
        layers: tuple[int, int],
        size: int,
        samples: Interval | None = None,
        *,
        is_saved: bool = False,
        shard: int | None = None,
        resident: bool = False,
    ) -> int:
        """Declare a buffer of ``size`` bytes on a GPU (None: in dynamic host memory); returns its id."""
        first, last = layers
        self.buffers.append(
            Buffer(
                id=len(self.buffers),
                gpu=gpu,
                kind=kind,
                layer_first=first,
                layer_last=last,
                bytes=size,
                samples=samples,
                is_saved=is_saved,
                shard=shard,
                resident=resident,
            )
        )
        return len(self.buffers) - 1

    def add(
        self,
        kind: TaskKind,
        lane: LaneKey,
        layers: tuple[int, int],
        *,
        samples: Interval | None = None,
        microbatch: int | None = None,
        tensor_kind: TensorKind | None = None,
        size: int = 0,
        peer: int | None = None,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        after: Iterable[int] = (),
        group: int | None = None,
        is_saved: bool = False,
        recompute: bool = True,
        shard: int | None = None,
    ) -> int:
        """Append an entry to the total order; returns its index. ``size`` is the bytes of a copy."""
        gpu, lane_kind = lane
        self.entries.append(
            Entry(
                kind, gpu, lane_kind, layers, samples, microbatch, tensor_kind, size, peer, tuple(reads), tuple(writes),
                set(after), group, is_saved, recompute, shard,
            )
        )  # fmt: skip
        return len(self.entries) - 1


def assign_lifetimes(draft: Draft) -> None:
    """Let each buffer's first user allocate it and its last user free it, after all its other users; but for those
    that are there before the step and after it."""
    users: list[list[int]] = [[] for _ in draft.buffers]
    for index, entry in enumerate(draft.entries):
        for buffer in entry.users:
            users[buffer].append(index)
    for buffer, touched in enumerate(users):
        if not touched:
            raise AssertionError(f"{draft.buffers[buffer]} is never used")
        if draft.buffers[buffer].resident:
            continue
        draft.entries[touched[0]].allocates.append(buffer)
        last = draft.entries[touched[-1]]
        last.frees.append(buffer)
        last.after.update(touched[:-1])


def finish(
    draft: Draft, *, model: str, plan: Plan, layers: int, memory: MemoryPlan, offsets: Sequence[int | None]
) -> Schedule:
    """Make the draft a Schedule: add the dependencies that reads and writes imply, and drop the implied ones."""
    _add_data_dependencies(draft)
    waits = _pruned(draft)
    tasks = tuple(
        Task(
            id=index,
            kind=entry.kind,
            gpu=entry.gpu,
            lane=entry.lane,
            layer_first=entry.layers[0],
            layer_last=entry.layers[1],
            samples=entry.samples,
            microbatch=entry.microbatch,
            tensor_kind=entry.tensor_kind,
            bytes=entry.bytes,
            is_saved=entry.is_saved,
            shard=entry.shard,
            peer=entry.peer,
            recompute=entry.recompute,
            waits_for=waits[index],
            reads=entry.reads,
            writes=entry.writes,
            allocates=tuple(entry.allocates),
            frees=tuple(entry.frees),
        )
        for index, entry in enumerate(draft.entries)
    )
    buffers = tuple(
        buffer if offset is None else msgspec.structs.replace(buffer, offset=offset)
        for buffer, offset in zip(draft.buffers, offsets, strict=True)
    )
    return Schedule(model=model, plan=plan, layers=layers, memory=memory, buffers=buffers, tasks=tasks)


def _add_data_dependencies(draft: Draft) -> None:
    """A reader waits for every earlier writer of a buffer, a writer for every earlier user."""
    writers: list[list[int]] = [[] for _ in draft.buffers]
    readers: list[list[int]] = [[] for _ in draft.buffers]
    for index, entry in enumerate(draft.entries):
        for buffer in entry.reads:
            entry.after.update(writers[buffer])
        for buffer in entry.writes:
            entry.after.update(writers[buffer])
            entry.after.update(readers[buffer])
        entry.after.discard(index)
        for buffer in entry.reads:
            readers[buffer].append(index)
        for buffer in entry.writes:
            # The new writer waits for everything before it, so it alone stands for all of that from now on.
            writers[buffer] = [index]
            readers[buffer] = []


def _pruned(draft: Draft) -> list[tuple[int, ...]]:
    """What each entry waits for: of each other lane only the latest entry; its own lanes are in order anyway."""
    numbers: dict[LaneKey, int] = {}
    lanes = [[numbers.setdefault(key, len(numbers)) for key in entry.lanes] for entry in draft.entries]
    result = []
    for entry, own in zip(draft.entries, lanes, strict=True):
        latest: dict[int, int] = {}
        for before in entry.after:
            theirs = lanes[before]
            if before > latest.get(theirs[0], -1) and not any(lane in own for lane in theirs):
                latest[theirs[0]] = before
        result.append(tuple(sorted(latest.values())))
    return result
