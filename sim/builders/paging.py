"""The virtual memory pass: one pager per GPU decides what comes in and what goes out around each step.

A plain schedule says only which tensors each of its steps touches. Its steps are played in compute order::

    step            backward of layer 1 touches  W1  x1  dW1  g2  g1
    held before     W1  x1  g2
    make_ready      dW1 comes in; something else goes out if it does not fit
    (the step)      g1 is made
    settle          x1 and g2 are dead and freed; then by residency
                    none: W1 and dW1 go out, g1 is handed to the next step
                    next: whatever the next step does not touch goes out
                    lru:  nothing goes out before room is needed

Here are only decisions, in whole tensors and bytes; ``paged_tasks.py`` makes tasks of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from enum import Enum
from typing import NamedTuple

import msgspec

from ..errors import DoesNotFit
from ..plan import Residency, Writeback
from ..schedule import Interval, TaskKind, TensorKind


class Tensor(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A tensor as the pager of one GPU sees it: the unit that comes in and goes out. Each is equal to itself only.

    ``home`` numbers its place in this GPU's part of the host store; tied weights share one. None: it has no place
    there, and lies in a host buffer while it is out. ``samples`` and ``microbatch`` are of tensors of a microbatch.
    """

    kind: TensorKind
    layer: int
    bytes: int
    home: int | None = None
    samples: Interval | None = None
    microbatch: int | None = None


class PagedStep(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What one GPU does at a time in a plain schedule: one layer on one microbatch, or one layer's update.

    ``touches`` holds each tensor once, in pin order: weight, buffer, input, labels, gradients, incoming gradient,
    outputs, optimizer state. The rest are parts of it, but for ``stale``:

    - ``creates``: new, so allocated without a copy. ``changes``: modified in place.
    - ``dies``: never used again, so freed unwritten.
    - ``hands_on``: the next step takes it over; it stays even where everything else goes out.
    - ``goes_out``: the home copy is needed next, so it is evicted right after the step.
    - ``stale``: other tensors whose copy on the GPU the step makes out of date.
    - ``completes``: the gradient to which this step adds the last microbatch. GPUs that split the minibatch add theirs
      after it, before anything goes out.

    ``workspace_bytes`` are held beside all this while the step runs.
    """

    kind: TaskKind
    layer: int
    touches: tuple[Tensor, ...]
    samples: Interval | None = None
    microbatch: int | None = None
    creates: tuple[Tensor, ...] = ()
    changes: tuple[Tensor, ...] = ()
    dies: tuple[Tensor, ...] = ()
    hands_on: tuple[Tensor, ...] = ()
    goes_out: tuple[Tensor, ...] = ()
    stale: tuple[Tensor, ...] = ()
    completes: Tensor | None = None
    workspace_bytes: int = 0


class Action(Enum):
    """What happens to a tensor on the GPU: copied in, copied out and freed, or freed without a copy."""

    COME_IN = "come in"
    GO_OUT = "go out"
    DROP = "drop"


class Move(NamedTuple):
    """A decision of the pager."""

    action: Action
    tensor: Tensor


class Pager:
    """The memory of one GPU, in whole tensors, while its steps are played in order.

    For each step call :meth:`make_ready`, then :meth:`settle`; after the last one :meth:`flush`. What they return is
    to be done in that order. A tensor that a step creates is there from :meth:`make_ready` on.
    """

    def __init__(self, gpu: int, cap: int, residency: Residency, writeback: Writeback) -> None:
        self._gpu, self._cap = gpu, cap
        self._residency, self._writeback = residency, writeback
        self._resident: OrderedDict[Tensor, None] = OrderedDict()  # least recently used first, then in touch order
        self._dirty: set[Tensor] = set()
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that are on the GPU."""
        return self._held

    @property
    def resident(self) -> tuple[Tensor, ...]:
        """Tensors that are on the GPU, least recently used first."""
        return tuple(self._resident)

    def make_ready(self, step: PagedStep) -> list[Move]:
        """Bring in what the step touches and is not there, and evict until that and its workspace fit.

        Raises DoesNotFit if the step does not fit alone.
        """
        self._check_fits(step)
        moves: list[Move] = []
        for tensor in step.touches:
            if tensor in self._resident:
                self._resident.move_to_end(tensor)
                continue
            self._make_room(tensor.bytes, step.touches, moves)
            self._held += tensor.bytes
            self._resident[tensor] = None
            if tensor not in step.creates:
                moves.append(Move(Action.COME_IN, tensor))
        self._make_room(step.workspace_bytes, step.touches, moves)
        self._dirty.update(step.creates, step.changes)
        return moves

    def settle(self, step: PagedStep, following: PagedStep | None) -> list[Move]:
        """Free what died with the step, then evict what the residency does not keep for the ``following`` step."""
        moves: list[Move] = []
        for tensor in step.dies + step.stale:
            if tensor in self._resident:
                self._remove(tensor, Action.DROP, moves)
        for tensor in step.goes_out:
            self._evict(tensor, moves)
        match self._residency:
            case Residency.NONE:
                self._evict_all_but(step.hands_on, moves)
            case Residency.NEXT:
                self._evict_all_but(following.touches if following else (), moves)
            case Residency.LRU:
                pass
        return moves

    def flush(self) -> list[Move]:
        """Evict everything: a step ends with all state in the host."""
        moves: list[Move] = []
        self._evict_all_but((), moves)
        return moves

    def _check_fits(self, step: PagedStep) -> None:
        needed = sum(tensor.bytes for tensor in step.touches) + step.workspace_bytes
        if needed > self._cap:
            batch = f" of {step.samples[1] - step.samples[0]} sample(s)" if step.samples else ""
            what = f"what its {step.kind.value}{batch} touches and the workspace"
            raise DoesNotFit(self._gpu, (step.layer, step.layer), what, needed, self._cap)

    def _make_room(self, needed: int, pinned: Collection[Tensor], moves: list[Move]) -> None:
        while self._held + needed > self._cap:
            self._evict(next(tensor for tensor in self._resident if tensor not in pinned), moves)

    def _evict_all_but(self, kept: Collection[Tensor], moves: list[Move]) -> None:
        for tensor in [tensor for tensor in self._resident if tensor not in kept]:
            self._evict(tensor, moves)

    def _evict(self, tensor: Tensor, moves: list[Move]) -> None:
        written = self._writeback is Writeback.ALWAYS or tensor in self._dirty
        self._remove(tensor, Action.GO_OUT if written else Action.DROP, moves)

    def _remove(self, tensor: Tensor, action: Action, moves: list[Move]) -> None:
        del self._resident[tensor]
        self._dirty.discard(tensor)
        self._held -= tensor.bytes
        moves.append(Move(action, tensor))
