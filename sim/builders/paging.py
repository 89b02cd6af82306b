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
from collections.abc import Collection, Sequence
from enum import Enum
from itertools import pairwise
from typing import Literal, NamedTuple, NoReturn

import msgspec

from ..errors import DoesNotFit
from ..plan import Residency, Writeback
from ..schedule import Interval, TaskKind, TensorKind


class Home(NamedTuple):
    """A place in a host store. Tied weights share one."""

    kind: TensorKind
    layer: int
    samples: Interval | None = None


class Event(NamedTuple):
    """Something that one GPU does and another one waits for: x or g of a microbatch is there, or a partial gradient or
    an updated weight is on its way home."""

    what: Literal["x", "g", "gradient", "weight"]
    layer: int
    microbatch: int | None = None


class Tensor(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A tensor as the pager of one GPU sees it: the unit that comes in and goes out. Each is equal to itself only.

    Without a ``home`` it has no place in the host store, and lies in a host buffer while it is out. ``samples`` and
    ``microbatch`` are of tensors of a microbatch. ``is_saved``: what autograd saved of the layer's forward.
    ``passage``: as which it goes from one GPU to another.
    """

    kind: TensorKind
    layer: int
    bytes: int
    home: Home | None = None
    is_saved: bool = False
    passage: Event | None = None
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
    - ``stale``: tensors whose home copy changes with it or later, so that the one here is out of date after it.
    - ``receives``: what another GPU sends for it. ``sends``: what stays here until its receiver takes it.
    - ``completes``: the gradient to which this step adds the last microbatch. GPUs that split the minibatch add theirs
      after it, before anything goes out.

    The step waits for what it ``awaits`` of other GPUs, and ``signals`` to them when it and its copies are planned.
    ``workspace_bytes`` are held beside all this while it runs. A backward with ``recompute`` goes forward first.
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
    receives: Tensor | None = None
    sends: Tensor | None = None
    completes: Tensor | None = None
    awaits: tuple[Event, ...] = ()
    signals: tuple[Event, ...] = ()
    recompute: bool = True
    workspace_bytes: int = 0

    @property
    def waits_for(self) -> tuple[Event, ...]:
        """Everything that must have happened on other GPUs."""
        return _with_passage(self.awaits, self.receives)

    @property
    def causes(self) -> tuple[Event, ...]:
        """Everything that has happened when it and its copies are planned."""
        return _with_passage(self.signals, self.sends)


def _with_passage(events: tuple[Event, ...], tensor: Tensor | None) -> tuple[Event, ...]:
    return events if tensor is None or tensor.passage is None else (*events, tensor.passage)


class Action(Enum):
    """What happens to a tensor on the GPU: copied in, received from another GPU, copied out and freed, or freed without
    a copy."""

    COME_IN = "come in"
    ARRIVE = "arrive"
    GO_OUT = "go out"
    DROP = "drop"


class Move(NamedTuple):
    """A decision of the pager."""

    action: Action
    tensor: Tensor


class Pager:
    """The memory of one GPU, in whole tensors, while its steps are played in order.

    For each step call :meth:`make_ready`, then :meth:`prefetch`, then :meth:`settle`; after the last one
    :meth:`flush`. What they return is to be done in that order; the step itself comes before what :meth:`settle`
    returns. A tensor that a step creates is there from :meth:`make_ready` on; one that it sends, until :meth:`release`.
    ``following`` are the steps after it: :attr:`looks_ahead` of them, or as many as there are.
    """

    def __init__(self, gpu: int, cap: int, residency: Residency, writeback: Writeback, prefetch_depth: int = 0) -> None:
        self._gpu, self._cap, self._depth = gpu, cap, prefetch_depth
        self._residency, self._writeback = residency, writeback
        self._resident: OrderedDict[Tensor, None] = OrderedDict()  # least recently used first, then in touch order
        self._dirty: set[Tensor] = set()
        self._leaving: set[Tensor] = set()
        self._arrived: set[Tensor] = set()
        self._held = 0

    def check(self, steps: Sequence[PagedStep]) -> None:
        """Raises DoesNotFit if there are steps that do not fit alone, for the one that needs most."""
        most = max(steps, key=_needed_bytes)
        if _needed_bytes(most) > self._cap:
            self._refuse(most, "touches and the workspace", _needed_bytes(most))

    def has_room(self, step: PagedStep) -> bool:
        """Whether the step fits beside what waits to be sent."""
        return _needed_bytes(step) + _bytes(self._leaving) <= self._cap

    @property
    def looks_ahead(self) -> int:
        """How many following steps matter."""
        return max(1, self._depth)

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors that are on the GPU."""
        return self._held

    @property
    def resident(self) -> tuple[Tensor, ...]:
        """Tensors that are on the GPU, least recently used first."""
        return tuple(self._resident)

    def make_ready(self, step: PagedStep, following: Sequence[PagedStep] = ()) -> list[Move]:
        """Bring in what the step touches and is not there, and evict until that and its workspace fit.

        What was prefetched for later steps is evicted last. Raises DoesNotFit if the step has no room.
        """
        if not self.has_room(step):
            waiting = _bytes(self._leaving)
            what = f"touches, the workspace, and {waiting} B that wait to be sent to other GPUs"
            self._refuse(step, what if waiting else "touches and the workspace", _needed_bytes(step) + waiting)
        promised = _touched((step, *following[: self._depth]))
        moves: list[Move] = []

        def make_room(size: int) -> None:
            for kept in (promised, step.touches):
                self._make_room(size, kept, moves)

        for tensor in step.touches:
            if tensor in self._resident:
                self._resident.move_to_end(tensor)
                continue
            make_room(tensor.bytes)
            self._take(tensor, step, moves)
        make_room(step.workspace_bytes)
        self._dirty.update(step.creates, step.changes)
        if step.sends is not None:
            self._leaving.add(step.sends)
        return moves

    def prefetch(self, step: PagedStep, following: Sequence[PagedStep], happened: Collection[Event]) -> list[Move]:
        """Bring in what later steps touch while ``step`` runs, without evicting what it or they touch.

        Only as far as that also fits beside all that the steps before need, so that none of them has to evict it again.
        It ends before a step that waits for what has not ``happened`` yet, and after one that leaves tensors out of
        date or must write them first.
        """
        ahead = following[: self._depth]
        promised = _touched((step, *ahead))
        moves: list[Move] = []
        together, workspace_bytes = {*step.touches, *self._leaving}, 0
        for before, later in pairwise((step, *ahead)):
            if before.stale or before.goes_out or any(event not in happened for event in later.waits_for):
                break
            workspace_bytes = max(workspace_bytes, before.workspace_bytes)
            for tensor in later.touches:
                if tensor in together or tensor in later.creates:
                    continue
                together.add(tensor)
                if _bytes(together) + workspace_bytes > self._cap:
                    return moves
                if tensor not in self._resident:
                    if not self._make_room(tensor.bytes + step.workspace_bytes, promised, moves):
                        return moves
                    self._take(tensor, later, moves)
            together.update(later.creates)
        return moves

    def settle(self, step: PagedStep, following: Sequence[PagedStep]) -> list[Move]:
        """Free what died with the step, then evict what neither the residency keeps nor later steps were promised."""
        moves: list[Move] = []
        for tensor in step.dies + step.stale:
            if tensor in self._resident:
                self._remove(tensor, Action.DROP, moves)
        for tensor in step.goes_out:
            self._evict(tensor, moves)
        match self._residency:
            case Residency.NONE:
                self._evict_all_but(_touched(following[: self._depth]).union(step.hands_on), moves)
            case Residency.NEXT:
                self._evict_all_but(_touched(following), moves)
            case Residency.LRU:
                pass
        return moves

    def release(self, tensor: Tensor) -> None:
        """Its receiver has taken what a step sent: it is freed without a copy."""
        self._leaving.remove(tensor)
        self._remove(tensor, Action.DROP, [])

    def flush(self) -> list[Move]:
        """Evict everything but what waits to be sent: a step ends with all state in the host."""
        moves: list[Move] = []
        self._evict_all_but((), moves)
        return moves

    def _refuse(self, step: PagedStep, what: str, needed: int) -> NoReturn:
        batch = f" of {step.samples[1] - step.samples[0]} sample(s)" if step.samples else ""
        whose = f"what its {step.kind.value}{batch} {what}"
        raise DoesNotFit(self._gpu, (step.layer, step.layer), whose, needed, self._cap)

    def _make_room(self, size: int, kept: Collection[Tensor], moves: list[Move]) -> bool:
        """Evict the least recently used, but for what is ``kept``, until so many bytes are free; or say that they are
        not."""
        while self._held + size > self._cap:
            evictable = (tensor for tensor in self._resident if not (tensor in kept or tensor in self._leaving))
            victim = next(evictable, None)
            if victim is None:
                return False
            self._evict(victim, moves)
        return True

    def _take(self, tensor: Tensor, step: PagedStep, moves: list[Move]) -> None:
        self._held += tensor.bytes
        self._resident[tensor] = None
        if tensor is step.receives and tensor not in self._arrived:
            self._arrived.add(tensor)
            self._dirty.add(tensor)
            moves.append(Move(Action.ARRIVE, tensor))
        elif tensor not in step.creates:
            moves.append(Move(Action.COME_IN, tensor))

    def _evict_all_but(self, kept: Collection[Tensor], moves: list[Move]) -> None:
        for tensor in [tensor for tensor in self._resident if not (tensor in kept or tensor in self._leaving)]:
            self._evict(tensor, moves)

    def _evict(self, tensor: Tensor, moves: list[Move]) -> None:
        written = self._writeback is Writeback.ALWAYS or tensor in self._dirty
        self._remove(tensor, Action.GO_OUT if written else Action.DROP, moves)

    def _remove(self, tensor: Tensor, action: Action, moves: list[Move]) -> None:
        del self._resident[tensor]
        self._dirty.discard(tensor)
        self._held -= tensor.bytes
        moves.append(Move(action, tensor))


def _touched(steps: Sequence[PagedStep]) -> set[Tensor]:
    return {tensor for step in steps for tensor in step.touches}


def _bytes(tensors: Collection[Tensor]) -> int:
    return sum(tensor.bytes for tensor in tensors)


def _needed_bytes(step: PagedStep) -> int:
    """What a step needs alone."""
    return _bytes(step.touches) + step.workspace_bytes
