"""How much memory a piece of torch code takes: the bytes of what it creates, now and at most.

On the CPU every operator is seen by :class:`StorageTracker`; on CUDA the caching allocator counts. Both answer
through :class:`MemoryMeter`; :func:`measure_memory` picks one.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class MemoryMeter(Protocol):
    """Bytes of the storages that were created inside the meter's context."""

    @property
    def live_bytes(self) -> int:
        """Created inside and still alive. May be read after the context too."""

    @property
    def peak_bytes(self) -> int:
        """The most that ``live_bytes`` has been since the context was entered, or since the last reset."""

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now."""


def measure_memory(device: torch.device) -> AbstractContextManager[MemoryMeter]:
    """A context in which a device's memory is metered, from zero."""
    return CudaMeter(device) if device.type == "cuda" else StorageTracker()


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Counts the storages that operators create while this mode is active in the calling thread.

    A storage counts once, however many views it has, until its last holder (a tensor, or autograd) lets go; which
    thread lets go does not matter. What existed before (parameters, inputs, an arena) never counts, nor does writing
    into it: a storage that an operator receives before any operator returned it came from outside. Scratch memory
    inside a single operator is not seen. Backward counts as well: autograd runs it in the calling thread on the CPU,
    and takes the mode along to its own threads elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Keyed by the storage's address. The callback that removes an entry runs before the address can be used again,
        # but maybe in another thread, so it only queues the address: bookkeeping belongs to the thread that tracks.
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._dead: deque[int] = deque()
        self._live_bytes = 0
        self._peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        """See :class:`MemoryMeter`."""
        self._bury()
        return self._live_bytes

    @property
    def peak_bytes(self) -> int:
        """See :class:`MemoryMeter`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """See :class:`MemoryMeter`."""
        self._peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and note what it took and what it returned."""
        kwargs = kwargs or {}
        # lift_fresh receives a tensor that Python has just made (torch.tensor): it is new all the same.
        if func is not torch.ops.aten.lift_fresh.default:
            self._bury()
            for storage in _storages((args, kwargs)):
                if storage._cdata not in self._refs:
                    self._watch(storage, 0)
        result = func(*args, **kwargs)
        self._bury()
        for storage in _storages(result):
            key, size = storage._cdata, storage.nbytes()
            if key not in self._refs:
                self._watch(storage, size)
            elif self._sizes[key] and self._sizes[key] != size:  # resized in place
                self._live_bytes += size - self._sizes[key]
                self._sizes[key] = size
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        return result

    def _watch(self, storage: torch.UntypedStorage, counted_bytes: int) -> None:
        """Follow a storage until it dies. One from outside counts 0 bytes."""
        key, dead = storage._cdata, self._dead
        self._refs[key] = weakref.ref(storage, lambda _: dead.append(key))
        self._sizes[key] = counted_bytes
        self._live_bytes += counted_bytes

    def _bury(self) -> None:
        """Forget the storages that died since the last look."""
        while self._dead:
            key = self._dead.popleft()
            del self._refs[key]
            self._live_bytes -= self._sizes.pop(key)


def _storages(values: Any) -> Iterable[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


class CudaMeter:
    """The CUDA allocator's own count, as a difference to what it was on entering (blocks of 512 bytes).

    Scratch memory inside operators is included. The allocator counts all threads, and its peak is one per device: use
    one meter at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base_bytes = 0

    def __enter__(self) -> Self:
        self._base_bytes = torch.cuda.memory_allocated(self._device)
        self.reset_peak()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    @property
    def live_bytes(self) -> int:
        """See :class:`MemoryMeter`."""
        return torch.cuda.memory_allocated(self._device) - self._base_bytes

    @property
    def peak_bytes(self) -> int:
        """See :class:`MemoryMeter`."""
        return torch.cuda.max_memory_allocated(self._device) - self._base_bytes

    def reset_peak(self) -> None:
        """See :class:`MemoryMeter`."""
        torch.cuda.reset_peak_memory_stats(self._device)
