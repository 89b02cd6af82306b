"""The memory of one GPU: buffers where the schedule puts them, never more than the cap.

Placed buffers (with an offset) are slices of one allocation, the arena. Counted ones (paged plans) are allocations of
their own, and only their sum is held against the cap. Reservations take their place in the plan but none here, as
autograd allocates that memory itself: workspaces, and of counted buffers those that keep what autograd saved and never
move.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

from torch import Tensor

from sim.schedule import Buffer

from ..errors import OutOfArena


class Block:
    """Memory of one buffer: ``bytes`` (uint8 [n]), and what its users derived from it and want to find again."""

    __slots__ = ("bytes", "views")

    def __init__(self, bytes: Tensor) -> None:
        self.bytes = bytes
        self.views: dict[Hashable, Any] = {}


class Arena:
    """The memory of GPU ``gpu`` for the ``buffers`` of a schedule, at most ``cap`` bytes.

    ``take`` gets so many bytes (uint8) from the device. ``reserved`` are ids of reservations. Used from several lanes
    at once. A placed buffer has the same block each time, a counted one a new block. Residents are held all the time.
    """

    def __init__(
        self,
        gpu: int,
        buffers: Iterable[Buffer],
        cap: int,
        take: Callable[[int], Tensor],
        reserved: Collection[int] = (),
    ) -> None:
        self.gpu, self.cap = gpu, cap
        self._take, self._reserved = take, reserved
        own = [buffer for buffer in buffers if buffer.gpu == gpu]
        placed = [(b, b.offset) for b in own if b.offset is not None and b.id not in reserved]
        for buffer, offset in placed:
            self._check_cap(buffer, offset)
        size = max([offset + buffer.bytes for buffer, offset in placed], default=0)
        memory = take(size)
        self._placed = {b.id: Block(memory[offset : offset + b.bytes]) for b, offset in placed}
        self._lock = threading.Lock()
        self._held: dict[int, Block | None] = {}  # None: a reservation
        self._spans: list[tuple[int, int, int]] = []  # start, stop, id of what is placed, sorted
        self._counted = 0
        self._residents = [buffer for buffer in own if buffer.resident]
        self._hold_residents()

    def allocate(self, buffer: Buffer) -> int:
        """Take a buffer's memory; its bytes. Raises OutOfArena past the cap, or where another buffer lies."""
        with self._lock:
            if buffer.id in self._held:
                raise OutOfArena(self.gpu, _name(buffer), buffer.bytes, self.cap, "it is allocated already")
            if buffer.offset is None:
                if self._counted + buffer.bytes > self.cap:
                    raise self._refusal(buffer, f"{self._counted} B are held")
                self._counted += buffer.bytes
            else:
                self._check_cap(buffer, buffer.offset)
                self._claim(buffer, buffer.offset)
            self._held[buffer.id] = self._block(buffer)
        return buffer.bytes

    def free(self, buffer: Buffer) -> int:
        """Give a buffer's memory back; its bytes. Raises OutOfArena if it is not held."""
        with self._lock:
            if buffer.id not in self._held:
                raise OutOfArena(self.gpu, _name(buffer), buffer.bytes, self.cap, "it is freed but not held")
            del self._held[buffer.id]
            if buffer.offset is None:
                self._counted -= buffer.bytes
            else:
                self._spans.remove((buffer.offset, buffer.offset + buffer.bytes, buffer.id))
        return buffer.bytes

    def block(self, buffer: Buffer) -> Block:
        """The memory of a buffer that is held. Raises OutOfArena if it is not: nothing reads what is gone."""
        block = self._held.get(buffer.id)
        if block is None:
            raise OutOfArena(self.gpu, _name(buffer), buffer.bytes, self.cap, "a task uses it while it is not held")
        return block

    def held(self) -> list[int]:
        """Ids of the buffers that are held, but for residents."""
        with self._lock:
            return [number for number in self._held if number not in {buffer.id for buffer in self._residents}]

    def clear(self) -> None:
        """Forget what is held but for residents, after a run that was given up."""
        with self._lock:
            self._held.clear()
            self._spans.clear()
            self._counted = 0
        self._hold_residents()

    def _hold_residents(self) -> None:
        for buffer in self._residents:
            self.allocate(buffer)

    def _block(self, buffer: Buffer) -> Block | None:
        if buffer.id in self._reserved:
            return None
        if buffer.offset is None:
            return Block(self._take(buffer.bytes))
        return self._placed[buffer.id]

    def _claim(self, buffer: Buffer, offset: int) -> None:
        span = (offset, offset + buffer.bytes, buffer.id)
        at = bisect_left(self._spans, span)
        for start, stop, other in self._spans[max(at - 1, 0) : at + 1]:
            if start < span[1] and offset < stop:
                raise self._refusal(buffer, f"buffer {other} lies at {start}-{stop}, this one would at {offset}")
        insort(self._spans, span)

    def _check_cap(self, buffer: Buffer, offset: int) -> None:
        if offset + buffer.bytes > self.cap:
            raise self._refusal(buffer, f"it would end at {offset + buffer.bytes}")

    def _refusal(self, buffer: Buffer, problem: str) -> OutOfArena:
        return OutOfArena(self.gpu, _name(buffer), buffer.bytes, self.cap, problem)


def _name(buffer: Buffer) -> str:
    run = f"{buffer.layer_first}-{buffer.layer_last}" if buffer.layer_last != buffer.layer_first else buffer.layer_first
    return f"buffer {buffer.id} ({buffer.kind.value} of {run})"
