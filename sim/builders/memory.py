"""Memory pass: where every buffer lies, and which frees each allocation has to wait for.

GPU buffers of Harmony plans are *placed*: at its point of the total order an allocation takes the first hole that
fits, and waits for the tasks that freed that hole. So no timing can exceed the plan, and nothing can deadlock. Tensors
between layers, many and alike in size, are placed from the top of the arena, all else from its bottom: mixed, they
would leave no hole for the next weights or workspace::

    0  │ weights │ gradient │ next weights │ workspace →      …      ← input │ output │ next input │  cap

A hole that was freed only just now, on another lane, would make the allocating task wait for its neighbour and undo
double buffering. Such holes are taken only when no other fits. Skipping them costs room, so groups that are *tight* do
not: double buffering happens as memory allows.

Buffers of paged plans and of the host are *counted*: see :func:`count_pages` and :func:`count_host`.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ..errors import DoesNotFit
from ..schedule import Buffer, Lane, LaneKey, TaskKind, TensorKind
from .draft import Draft, Entry

ALIGNMENT = 256
"""Offsets are multiples of this many bytes, so that tensors of any dtype can lie there."""

_FROM_TOP = frozenset({TensorKind.DATA, TensorKind.STASH, TensorKind.ACTIVATION, TensorKind.ACTIVATION_GRADIENT})


class GroupDoesNotFit(DoesNotFit):
    """An allocation found no hole; ``group`` is the builder's group it was made for (it may ask for less)."""

    group: int | None = None


@dataclass(frozen=True, slots=True, order=True)
class _Hole:
    """Free addresses ``[start, stop)``; ``freer`` is the entry that freed them (-1: they were never used)."""

    start: int
    stop: int
    freer: int


class Arena:
    """The address space of one GPU while the total order is walked.

    Holes are kept sorted; neighbouring ones freed by different entries stay apart, so that an allocation waits only
    for the frees it really relies on.
    """

    def __init__(self, cap: int) -> None:
        self._holes = [_Hole(0, cap // ALIGNMENT * ALIGNMENT, -1)]

    def allocate(
        self, size: int, *, avoid_from: int | None = None, at_top: bool = False
    ) -> tuple[int, list[int]] | None:
        """The lowest (``at_top``: highest) ``size`` free bytes: their offset, and the entries that freed them.

        Holes freed by entry ``avoid_from`` or later are used only if nothing else fits; None if nothing fits at all.
        """
        needed = _aligned(size)
        found = None if avoid_from is None else self._take(needed, at_top, avoid_from)
        return found or self._take(needed, at_top, None)

    def free(self, offset: int, size: int, freer: int) -> None:
        """Give back an allocation, from entry ``freer`` on."""
        insort(self._holes, _Hole(offset, offset + _aligned(size), freer))

    def _take(self, needed: int, at_top: bool, avoid_from: int | None) -> tuple[int, list[int]] | None:
        runs = self._runs(avoid_from)
        for first, last in reversed(runs) if at_top else runs:
            low, high = self._holes[first].start, self._holes[last].stop
            if high - low >= needed:
                start = high - needed if at_top else low
                return start, self._carve(first, last, start, start + needed)
        return None

    def _runs(self, avoid_from: int | None) -> list[tuple[int, int]]:
        """Index ranges of holes without gaps between them."""
        runs: list[tuple[int, int]] = []
        for index, hole in enumerate(self._holes):
            if avoid_from is not None and hole.freer >= avoid_from:
                continue
            if runs and runs[-1][1] == index - 1 and self._holes[index - 1].stop == hole.start:
                runs[-1] = (runs[-1][0], index)
            else:
                runs.append((index, index))
        return runs

    def _carve(self, first: int, last: int, start: int, stop: int) -> list[int]:
        """Take ``[start, stop)`` out of holes ``first … last``; returns who freed it."""
        kept: list[_Hole] = []
        freers: set[int] = set()
        for hole in self._holes[first : last + 1]:
            if hole.start < start:
                kept.append(_Hole(hole.start, min(hole.stop, start), hole.freer))
            if hole.stop > stop:
                kept.append(_Hole(max(hole.start, stop), hole.stop, hole.freer))
            if hole.start < stop and start < hole.stop:
                freers.add(hole.freer)
        self._holes[first : last + 1] = kept
        return sorted(freers - {-1})


@dataclass(frozen=True)
class Placement:
    """Offsets of all buffers (None: not in a GPU's arena), the highest end address per GPU, and what found no room."""

    offsets: list[int | None]
    peaks: tuple[int, ...]
    refusals: tuple[GroupDoesNotFit, ...]


def place(draft: Draft, caps: Sequence[int], tight: Collection[int] = ()) -> Placement:
    """Place every GPU buffer, and add to each entry the frees it relies on.

    ``tight`` are the groups in which room counts for more than not waiting. A buffer that finds no hole is refused and
    left out; the rest is placed all the same, so that one pass shows everything that is too large.
    """
    arenas = [Arena(cap) for cap in caps]
    held = [0] * len(caps)
    stashes = [0] * len(caps)  # of that
    last_compute = [0] * len(caps)
    offsets: list[int | None] = [None] * len(draft.buffers)
    refusals: list[GroupDoesNotFit] = []
    for resident in (buffer for buffer in draft.buffers if buffer.resident):
        assert resident.gpu is not None, "the host's memory is not placed"
        found = arenas[resident.gpu].allocate(resident.bytes)
        if found is None:
            raise _too_much_stays(resident, held[resident.gpu], caps[resident.gpu])
        offsets[resident.id], _ = found
        held[resident.gpu] += resident.bytes
    stays = held.copy()
    for index, entry in enumerate(draft.entries):
        for buffer in entry.allocates:
            gpu, size = draft.buffers[buffer].gpu, draft.buffers[buffer].bytes
            if gpu is None:
                continue
            at_top = draft.buffers[buffer].kind in _FROM_TOP
            avoid_from = None if entry.group in tight else _recent(entry, last_compute[gpu])
            found = arenas[gpu].allocate(size, avoid_from=avoid_from, at_top=at_top)
            if found is None:
                refusals.append(_no_room(draft, entry, buffer, held[gpu], caps[gpu], stashes[gpu], stays[gpu]))
                continue
            offsets[buffer], freers = found
            entry.after.update(freers)
            held[gpu] += size
            stashes[gpu] += size if draft.buffers[buffer].kind is TensorKind.STASH else 0
        for buffer in entry.frees:
            gpu, offset, size = draft.buffers[buffer].gpu, offsets[buffer], draft.buffers[buffer].bytes
            if gpu is not None and offset is not None:
                arenas[gpu].free(offset, size, index)
                held[gpu] -= size
                stashes[gpu] -= size if draft.buffers[buffer].kind is TensorKind.STASH else 0
        if entry.lane is Lane.COMPUTE and entry.gpu is not None:
            last_compute[entry.gpu] = index
    offsets, peaks = _without_gap(draft, offsets, caps)
    return Placement(offsets, peaks, tuple(refusals))


def _without_gap(
    draft: Draft, offsets: list[int | None], caps: Sequence[int]
) -> tuple[list[int | None], tuple[int, ...]]:
    """Move what was placed from the top down by what never was in use between the two ends."""
    bottom, top = [0] * len(caps), [cap // ALIGNMENT * ALIGNMENT for cap in caps]
    for buffer, offset in zip(draft.buffers, offsets, strict=True):
        if buffer.gpu is None or offset is None:
            continue
        if buffer.kind in _FROM_TOP:
            top[buffer.gpu] = min(top[buffer.gpu], offset)
        else:
            bottom[buffer.gpu] = max(bottom[buffer.gpu], offset + _aligned(buffer.bytes))
    gaps = [max(0, high - low) for low, high in zip(bottom, top, strict=True)]
    peaks = [0] * len(caps)
    moved: list[int | None] = []
    for buffer, offset in zip(draft.buffers, offsets, strict=True):
        if buffer.gpu is not None and offset is not None:
            offset -= gaps[buffer.gpu] if buffer.kind in _FROM_TOP else 0
            peaks[buffer.gpu] = max(peaks[buffer.gpu], offset + _aligned(buffer.bytes))
        moved.append(offset)
    return moved, tuple(peaks)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _recent(entry: Entry, last_compute: int) -> int:
    """First entry whose frees ``entry`` had better not wait for: copies since the GPU's last compute task and, for a
    copy that arrives from another GPU, that compute task itself.
    """
    return last_compute if entry.kind is TaskKind.P2P else last_compute + 1


def _too_much_stays(buffer: Buffer, held: int, cap: int) -> DoesNotFit:
    layers = buffer.layer_first, buffer.layer_last
    what = f"{buffer.kind.value} of {buffer.bytes} B, which stays from step to step, and the {held} B that do as well"
    return DoesNotFit(buffer.gpu, layers, what, held + buffer.bytes, cap)


def _no_room(
    draft: Draft, entry: Entry, buffer: int, held: int, cap: int, stashes: int = 0, stays: int = 0
) -> GroupDoesNotFit:
    wanted = draft.buffers[buffer]
    pieces = "" if held + wanted.bytes > cap else ", for which no single hole is left,"
    kept = f" ({stashes} B of that stashes, which need not stay: --stash)" if stashes else ""
    kept += f" ({stays} B of that from step to step: --resident-weights, --resident-state)" if stays else ""
    what = f"{wanted.kind.value} of {wanted.bytes} B{pieces} and the {held} B held beside it{kept}"
    error = GroupDoesNotFit(wanted.gpu, (wanted.layer_first, wanted.layer_last), what, held + wanted.bytes, cap)
    error.group = entry.group
    return error


def count_pages(draft: Draft, caps: Sequence[int]) -> tuple[int, ...]:
    """Count the GPU buffers of a paged plan: each allocation waits for every earlier free on its GPU.

    Returns the peak per GPU; raises DoesNotFit when the pager held more than the cap.
    """
    held, peak = [0] * len(caps), [0] * len(caps)
    freed: list[dict[LaneKey, int]] = [{} for _ in caps]
    for index, entry in enumerate(draft.entries):
        for buffer in entry.allocates:
            gpu = draft.buffers[buffer].gpu
            if gpu is None:
                continue
            entry.after.update(freed[gpu].values())
            held[gpu] += draft.buffers[buffer].bytes
            peak[gpu] = max(peak[gpu], held[gpu])
            if held[gpu] > caps[gpu]:
                raise _no_room(draft, entry, buffer, held[gpu] - draft.buffers[buffer].bytes, caps[gpu])
        for buffer in entry.frees:
            gpu = draft.buffers[buffer].gpu
            if gpu is not None:
                held[gpu] -= draft.buffers[buffer].bytes
                freed[gpu][entry.lanes[0]] = index
    return tuple(peak)


def count_host(draft: Draft, gpus: int) -> int:
    """Count dynamic host memory, one partition per GPU that fills it. Returns the sum of the partitions' peaks.

    An allocation waits for just as many of its partition's earlier frees as keep it under that peak at any timing.
    """
    moves: list[list[tuple[int, int]]] = [[] for _ in range(gpus)]  # (entry, +bytes or -bytes), in total order
    partition: dict[int, int] = {}
    for index, entry in enumerate(draft.entries):
        for buffer in entry.allocates:
            if draft.buffers[buffer].gpu is None:
                if entry.gpu is None:
                    raise AssertionError("host buffers are allocated by copies out of a GPU")
                partition[buffer] = entry.gpu
                moves[entry.gpu].append((index, draft.buffers[buffer].bytes))
        for buffer in entry.frees:
            if draft.buffers[buffer].gpu is None:
                moves[partition[buffer]].append((index, -draft.buffers[buffer].bytes))
    return sum(_count_partition(draft, part) for part in moves)


def _count_partition(draft: Draft, moves: list[tuple[int, int]]) -> int:
    held = peak = 0
    for _, size in moves:
        held += size
        peak = max(peak, held)
    frees = [(index, -size) for index, size in moves if size < 0]
    relied_on: dict[LaneKey, int] = {}
    allocated = freed = used = 0
    for index, size in moves:
        if size < 0:
            continue
        allocated += size
        while allocated - freed > peak:
            freer, amount = frees[used]
            relied_on[draft.entries[freer].lanes[0]] = freer
            freed, used = freed + amount, used + 1
        draft.entries[index].after.update(relied_on.values())
    return peak
