"""Which bytes the copying tasks copy, and what reductions add.

State (weights, buffers, gradients, optimizer state) is cut by layers, and by shards; everything else by samples, of
which the two ends of a copy may hold different intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from sim.schedule import Buffer, Interval, Schedule, Task, TaskKind, TensorKind

from ..devices.facade import Copy, Queue, Sum
from .layout import HOME_KINDS
from .places import Places
from .store import Home, Minibatch

_Ends = Callable[[Home, TensorKind, int], list[Tensor]]
"""The bytes of a layer's block at home, to be read or to be written."""


class Transfers:
    """Carries out copies, collectives and reductions of steps whose data are ``minibatch``. Each method returns the
    bytes it moved."""

    def __init__(self, schedule: Schedule, places: Places, minibatch: Minibatch) -> None:
        self.minibatch = minibatch
        self._places = places
        self._buffers = schedule.buffers
        self._gpus = schedule.plan.gpus
        self._written_by = {number: task.gpu for task in schedule.copies(TaskKind.SWAP_OUT) for number in task.writes}
        self._known: dict[int, list[Copy]] = {}  # of tasks whose two ends always lie at the same place

    def swap_in(self, task: Task, queue: Queue) -> int:
        """From the host buffers that the task reads, or from the home store, to its GPU buffer."""
        return self._swap(task, queue, on_gpu=task.writes[0], in_host=task.reads)

    def swap_out(self, task: Task, queue: Queue) -> int:
        """From the task's GPU buffer to the host buffers that it writes, or to the home store."""
        return self._swap(task, queue, on_gpu=task.reads[0], in_host=task.writes)

    def p2p(self, task: Task, queue: Queue) -> int:
        """From a buffer on the sender to one on its peer."""
        assert task.peer is not None
        copies = [Copy(self._bytes(task.writes[0]), self._bytes(task.reads[0]))]
        queue.send(copies, task.peer)
        return _size(copies)

    def all_reduce(self, task: Task, queue: Queue) -> int:
        """Add the GPUs' gradients. Counts what all of them send together in a ring."""
        numbers = sorted(task.reads, key=lambda number: self._buffers[number].gpu or 0)
        layout = self._places.layouts[TensorKind.GRADIENT]
        flats = [layout.flat(self._bytes(number), task.layer_first, task.layer_last) for number in numbers]
        for shares in zip(*flats, strict=True):
            queue.all_reduce(shares)
        return 2 * (len(numbers) - 1) * sum(flat.nbytes for flat in flats[0])

    def reduce_scatter(self, task: Task, queue: Queue) -> int:
        """Add the GPUs' gradients, each shard on the GPU whose buffer for it the task writes; if the task also reads
        that, to what is there."""
        whole = [number for number in task.reads if self._buffers[number].shard is None]
        whole.sort(key=lambda number: self._buffers[number].gpu or 0)
        sums = []
        for number in task.writes:
            addends = [number, *whole] if number in task.reads else whole
            for layer in range(task.layer_first, task.layer_last + 1):
                flats = [self._flat(each, layer, _shard(self._buffers[number])) for each in (number, *addends)]
                sums += [Sum(target, parts) for target, *parts in zip(*flats, strict=True)]
        queue.reduce_scatter(sums, self._gpus)
        return (self._gpus - 1) * sum([each.target.nbytes for each in sums])

    def all_gather(self, task: Task, queue: Queue) -> int:
        """Copy the shards that the task reads into the whole buffers that it writes."""
        copies: list[Copy] = []
        for number in task.reads:
            for layer in range(task.layer_first, task.layer_last + 1):
                shard = _shard(self._buffers[number])
                for target in task.writes:
                    copies += map(Copy, self._flat(target, layer, shard), self._flat(number, layer, shard))
        queue.all_gather(copies, self._gpus)
        return (self._gpus - 1) * sum([self._buffers[number].bytes for number in task.reads])

    def reduce(self, task: Task) -> None:
        """Add the gradients that the GPUs wrote, in rank order, into the home gradient."""
        numbers = sorted(task.reads, key=lambda number: self._written_by[number] or 0)
        layout, home = self._places.layouts[TensorKind.GRADIENT], self._places.home(None)
        for layer in range(task.layer_first, task.layer_last + 1):
            totals = home.views(TensorKind.GRADIENT, layer)
            for rank, number in enumerate(numbers):
                parts = layout.views(self._bytes(number), self._buffers[number].layer_first, layer)
                for key, total in totals.items():
                    total.copy_(parts[key]) if rank == 0 else total.add_(parts[key])

    def load_residents(self) -> None:
        """Fill what stays on GPUs from step to step with what the store has."""
        for on_gpu, home in self._residents(Home.read):
            on_gpu.copy_(home)

    def residents_home(self) -> None:
        """Bring the store up to date with what stays on GPUs."""
        for on_gpu, home in self._residents(Home.write):
            home.copy_(on_gpu)

    def _residents(self, ends: _Ends) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of bytes that correspond: on a GPU, at home."""
        for buffer in self._buffers:
            if buffer.resident:
                yield from self._parts_at_home(buffer, (buffer.layer_first, buffer.layer_last), buffer.shard, ends)

    def _swap(self, task: Task, queue: Queue, on_gpu: int, in_host: Sequence[int]) -> int:
        copies = self._known.get(task.id)
        if copies is None:
            copies = list(self._copies(task, on_gpu, in_host))
            if self._buffers[on_gpu].offset is not None and not in_host:
                self._known[task.id] = copies
        queue.swap(copies)
        return _size(copies)

    def _copies(self, task: Task, on_gpu: int, in_host: Sequence[int]) -> Iterator[Copy]:
        inward = task.kind is TaskKind.SWAP_IN
        for gpu_part, host_part in self._parts(task, on_gpu, in_host):
            yield Copy(gpu_part, host_part) if inward else Copy(host_part, gpu_part)

    def _parts(self, task: Task, on_gpu: int, in_host: Sequence[int]) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of bytes that correspond: on the GPU, in the host."""
        buffer, block = self._buffers[on_gpu], self._bytes(on_gpu)
        if buffer.kind in HOME_KINDS and (task.shard is not None or not in_host):
            ends = Home.read if task.kind is TaskKind.SWAP_IN else Home.write
            yield from self._parts_at_home(buffer, (task.layer_first, task.layer_last), task.shard, ends)
        elif buffer.kind in HOME_KINDS:
            yield from self._parts_by_layer(task, buffer, block, in_host)
        elif in_host:
            for number in in_host:
                yield from self._overlap(buffer, self._buffers[number])
        else:
            whole, minibatch = _samples(buffer), self.minibatch
            own = self._places.record(buffer).pieces(block, whole, whole)
            yield from zip(own, minibatch.pieces(buffer.layer_first, whole), strict=True)

    def _parts_by_layer(
        self, task: Task, buffer: Buffer, block: Tensor, in_host: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        layout = self._places.layouts[buffer.kind]
        run = (task.layer_first, task.layer_last)
        own = layout.part(block, buffer.layer_first, run)
        for number in in_host:
            yield own, layout.part(self._bytes(number), self._buffers[number].layer_first, run)

    def _parts_at_home(
        self, buffer: Buffer, run: tuple[int, int], shard: int | None, ends: _Ends
    ) -> Iterator[tuple[Tensor, Tensor]]:
        block, home, shards = self._bytes(buffer.id), self._places.home(buffer.gpu), self._places.shards
        at_home = {layer: ends(home, buffer.kind, layer) for layer in range(run[0], run[1] + 1)}
        if shard is None:
            own = self._places.layouts[buffer.kind].part(block, buffer.layer_first, run)
            yield from _in_pieces(own, [piece for pieces in at_home.values() for piece in pieces])
            return
        for layer, pieces in at_home.items():
            parts = shards.parts(buffer, block, layer, shard)
            for part, its in zip(parts, shards.home_parts(pieces, buffer.kind, layer, shard), strict=True):
                yield from _in_pieces(part, its)

    def _flat(self, number: int, layer: int, shard: int) -> list[Tensor]:
        return self._places.shards.flat(self._buffers[number], self._bytes(number), layer, shard)

    def _overlap(self, a: Buffer, b: Buffer) -> Iterator[tuple[Tensor, Tensor]]:
        """The bytes of the samples that both hold."""
        held_by_a, held_by_b = _samples(a), _samples(b)
        if held_by_a == held_by_b:
            yield self._bytes(a.id), self._bytes(b.id)
            return
        both = max(held_by_a[0], held_by_b[0]), min(held_by_a[1], held_by_b[1])
        if both[0] < both[1]:
            record = self._places.record(a)
            yield from zip(
                record.pieces(self._bytes(a.id), held_by_a, both),
                record.pieces(self._bytes(b.id), held_by_b, both),
                strict=True,
            )

    def _bytes(self, number: int) -> Tensor:
        return self._places.block(number).bytes


def _in_pieces(block: Tensor, pieces: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """A block's bytes with those of pieces that follow one another."""
    at = 0
    for piece in pieces:
        yield block[at : at + piece.nbytes], piece
        at += piece.nbytes


def _shard(buffer: Buffer) -> int:
    assert buffer.shard is not None
    return buffer.shard


def _samples(buffer: Buffer) -> Interval:
    assert buffer.samples is not None
    return buffer.samples


def _size(copies: Sequence[Copy]) -> int:
    return sum([copy.target.nbytes for copy in copies])
