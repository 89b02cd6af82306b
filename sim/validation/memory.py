"""Faults in the memory plan: buffers that are not there when used, that overlap, or peaks that are not as planned.

Everything is checked for every timing, by what surely happens before what.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from ..builders.memory import ALIGNMENT
from ..schedule import Buffer, Schedule, Task, TaskKind, TensorKind
from .happens_before import HappensBefore


def memory_faults(schedule: Schedule, surely: HappensBefore) -> Iterator[str]:
    """All faults of buffers and of the memory plan."""
    lives = _Lives(schedule)
    yield from _life_faults(lives)
    for buffer in schedule.buffers:
        yield from _use_faults(buffer, lives, surely)
    for buffer in schedule.residents:
        yield from _resident_faults(buffer)
    yield from _device_faults(schedule)
    if lives.all_whole:
        yield from _overlap_faults(lives, surely)
        yield from _peak_faults(lives, surely)


class _Lives:
    """For each buffer the tasks that allocate it, free it and use it, each in the total order."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.allocates: list[list[Task]] = [[] for _ in schedule.buffers]
        self.frees: list[list[Task]] = [[] for _ in schedule.buffers]
        self.users: list[list[Task]] = [[] for _ in schedule.buffers]
        for task in schedule.tasks:
            for ids, table in ((task.allocates, self.allocates), (task.frees, self.frees)):
                for number in ids:
                    table[number].append(task)
            for number in dict.fromkeys(task.reads + task.writes):
                self.users[number].append(task)

    @property
    def all_whole(self) -> bool:
        """Whether each buffer is allocated once and freed once, but for those that are there all the time."""
        return all(
            len(tasks) == (0 if buffer.resident else 1) and (buffer.offset is not None or not buffer.resident)
            for table in (self.allocates, self.frees)
            for buffer, tasks in zip(self.schedule.buffers, table, strict=True)
        )


def _life_faults(lives: _Lives) -> Iterator[str]:
    for verb, table in (("allocated", lives.allocates), ("freed", lives.frees)):
        for buffer, tasks in zip(lives.schedule.buffers, table, strict=True):
            if buffer.resident:
                yield from (f"{buffer} is there from step to step, and {verb} by {task}" for task in tasks)
                continue
            if not tasks:
                yield f"{buffer} is never {verb}"
            if len(tasks) > 1:
                yield f"{buffer} is {verb} {len(tasks)} times: by {' and by '.join(map(str, tasks))}"


def _resident_faults(buffer: Buffer) -> Iterator[str]:
    if buffer.kind not in (TensorKind.WEIGHT, TensorKind.OPTIMIZER_STATE):
        yield f"{buffer} stays from step to step; only weights and optimizer state may"
    if buffer.gpu is None or buffer.offset is None:
        yield f"{buffer} stays from step to step and has no place on a GPU"


def _use_faults(buffer: Buffer, lives: _Lives, surely: HappensBefore) -> Iterator[str]:
    """Uses before the allocation, after the free, before anything is written, or at the same time as a write."""
    users, first, last = lives.users[buffer.id], lives.allocates[buffer.id], lives.frees[buffer.id]
    if len(first) == 1:
        for task in users:
            if task is not first[0] and not surely(first[0].id, task.id):
                yield f"{task} may use {buffer} before {first[0]} has allocated it"
    if len(last) == 1:
        for task in users + [task for task in first if task not in users]:
            if task is not last[0] and not surely(task.id, last[0].id):
                yield f"{last[0]} may free {buffer} while {task} still needs it"
    writer: Task | None = None
    readers: list[Task] = []  # since then
    for task in users:
        writes = buffer.id in task.writes
        if writer is None and not writes and not buffer.resident:
            yield f"{task} reads {buffer} before anything has written it"
        others = [*([] if writer is None else [writer]), *(readers if writes else [])]
        for other in others:
            if not surely(other.id, task.id):
                yield f"{other} and {task} may touch {buffer} at the same time, and one of them writes it"
        if writes:
            writer, readers = task, []
        else:
            readers.append(task)


def _device_faults(schedule: Schedule) -> Iterator[str]:
    """Tasks that use memory of a device where they are not."""
    everywhere = frozenset([None, *range(schedule.plan.gpus)])
    for task in schedule.tasks:
        readable, writable = _reach(task, everywhere)
        for verb, ids, reach in (("reads", task.reads, readable), ("writes", task.writes, writable)):
            for number in ids:
                if schedule.buffers[number].gpu not in reach:
                    yield f"{task} {verb} {schedule.buffers[number]}, which is out of its reach"


def _reach(task: Task, everywhere: frozenset[int | None]) -> tuple[frozenset[int | None], frozenset[int | None]]:
    """Devices (None: the host) whose memory a task may read, and may write."""
    own, host = frozenset([task.gpu]), frozenset([None])
    match task.kind:
        case TaskKind.SWAP_IN:
            return host, own
        case TaskKind.SWAP_OUT:
            return own, host
        case TaskKind.P2P:
            return own, frozenset([task.peer])
        case TaskKind.ALLREDUCE | TaskKind.REDUCE_SCATTER | TaskKind.ALL_GATHER:
            return everywhere - host, everywhere - host
        case _:
            return own, own


def _overlap_faults(lives: _Lives, surely: HappensBefore) -> Iterator[str]:
    """Buffers over the same addresses whose lives are not in order.

    Per address it is enough to compare each buffer with the one before it there: the order is transitive.
    """
    owners: dict[int | None, _Owners] = {}
    for buffer in lives.schedule.residents:
        assert buffer.offset is not None, "else the buffers are not whole"
        stop = buffer.offset + buffer.bytes
        for other in owners.setdefault(buffer.gpu, _Owners()).take(buffer.offset, stop, buffer.id):
            yield f"{buffer} and {lives.schedule.buffers[other]} both stay at the same addresses"
    for task in lives.schedule.tasks:
        for number in task.allocates:
            buffer = lives.schedule.buffers[number]
            if buffer.offset is None or not buffer.bytes:
                continue
            taken = owners.setdefault(buffer.gpu, _Owners()).take(buffer.offset, buffer.offset + buffer.bytes, number)
            for other in taken:
                before = lives.schedule.buffers[other]
                if before.resident:
                    yield f"{task} puts {buffer} over {before}, which stays there"
                    continue
                free = lives.frees[other][0]
                if not surely(free.id, task.id):
                    yield f"{task} may put {buffer} over {before} before {free} has freed that"


class _Owners:
    """The latest owner of every address that was ever taken."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, int]] = []  # (start, stop, owner), sorted and disjoint

    def take(self, start: int, stop: int, owner: int) -> list[int]:
        """Make ``owner`` the latest owner of ``[start, stop)``; returns the owners before it, ascending."""
        first = bisect_right(self._pieces, start, key=lambda piece: piece[1])
        last = bisect_left(self._pieces, stop, key=lambda piece: piece[0])
        over = self._pieces[first:last]
        left = [(at, start, who) for at, _, who in over[:1] if at < start]
        right = [(stop, end, who) for _, end, who in over[-1:] if end > stop]
        self._pieces[first:last] = [*left, (start, stop, owner), *right]
        return sorted({who for _, _, who in over})


def _peak_faults(lives: _Lives, surely: HappensBefore) -> Iterator[str]:
    """Planned peaks that are not what the buffers need, or above the caps."""
    schedule, plan = lives.schedule, lives.schedule.memory
    for gpu, (planned, cap) in enumerate(zip(plan.gpu_peak_bytes, plan.gpu_cap_bytes, strict=True)):
        own = [buffer for buffer in schedule.buffers if buffer.gpu == gpu and buffer.bytes]
        placed = [buffer.offset + buffer.bytes for buffer in own if buffer.offset is not None]
        if placed and len(placed) < len(own):
            yield f"gpu {gpu} has {len(placed)} buffers with an offset and {len(own) - len(placed)} without"
        elif placed:
            if not 0 <= planned - max(placed) < ALIGNMENT:
                yield f"the planned peak of gpu {gpu} is {planned} B, its buffers end at {max(placed)} B"
        elif planned != (needed := _counted_peak(own, lives, surely)):
            yield f"the planned peak of gpu {gpu} is {planned} B, its buffers need {needed} B at the worst timing"
        if planned > cap:
            yield f"the planned peak of gpu {gpu} is {planned} B, above its cap of {cap} B"
    needed = plan.host_store_bytes + _host_peak(lives, surely)
    if plan.host_peak_bytes != needed:
        yield (
            f"the planned peak of the host is {plan.host_peak_bytes} B, its store of {plan.host_store_bytes} B and its "
            f"buffers need {needed} B at the worst timing"
        )
    if plan.host_cap_bytes is not None and plan.host_peak_bytes > plan.host_cap_bytes:
        yield f"the planned peak of the host is {plan.host_peak_bytes} B, above its cap of {plan.host_cap_bytes} B"


def _host_peak(lives: _Lives, surely: HappensBefore) -> int:
    """The sum over partitions: dynamic host memory is planned apart for each GPU whose copies allocate it."""
    partitions: dict[int | None, list[Buffer]] = {}
    for buffer in lives.schedule.buffers:
        if buffer.gpu is None:
            partitions.setdefault(lives.allocates[buffer.id][0].gpu, []).append(buffer)
    return sum(_counted_peak(buffers, lives, surely) for buffers in partitions.values())


def _counted_peak(buffers: Sequence[Buffer], lives: _Lives, surely: HappensBefore) -> int:
    """The most bytes that these buffers can take at once, at any timing.

    When a task allocates, at most everything allocated up to it in the total order is held, less what has surely been
    freed by then.
    """
    sizes: dict[int, int] = {}  # allocating task -> bytes
    freed: dict[int, list[tuple[int, int]]] = {}  # lane -> (tasks of the lane ended, bytes)
    for buffer in buffers:
        allocator = lives.allocates[buffer.id][0].id
        sizes[allocator] = sizes.get(allocator, 0) + buffer.bytes
        lane, place = surely.place(lives.frees[buffer.id][0].id)
        freed.setdefault(lane, []).append((place, buffer.bytes))
    places: dict[int, list[int]] = {}
    totals: dict[int, list[int]] = {}
    for lane, frees in freed.items():
        frees.sort()
        places[lane] = [place for place, _ in frees]
        totals[lane] = list(accumulate((size for _, size in frees), initial=0))
    held = peak = 0
    for allocator in sorted(sizes):
        held += sizes[allocator]
        ended = surely.ended(allocator)
        gone = sum(totals[lane][bisect_right(places[lane], ended[lane])] for lane in places)
        peak = max(peak, held - gone)
    return peak
