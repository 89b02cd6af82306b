"""Tasks of a paged plan: the steps of each GPU, the copies its pager decides on, and what GPUs send each other.

Every stay of a tensor on a GPU is a buffer of its own. Tensors without a place in the host store get a host buffer
when they first go out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..schedule import Lane, TaskKind, TensorKind
from .draft import Draft
from .paging import Action, Event, Home, Move, PagedStep, Pager, Tensor


class StoreOrder:
    """The latest copies out of a host store and into it: later ones of the same place wait for them."""

    def __init__(self) -> None:
        self._reads: dict[Home, dict[int, int]] = {}  # by GPU, since the last write
        self._writes: dict[Home, int] = {}

    def before_read(self, home: Home) -> list[int]:
        """What a copy from the store waits for."""
        return [self._writes[home]] if home in self._writes else []

    def before_write(self, home: Home) -> list[int]:
        """What a copy to the store waits for."""
        return [*self.before_read(home), *self._reads.get(home, {}).values()]

    def add_read(self, home: Home, gpu: int, entry: int) -> None:
        """Note a copy from the store."""
        self._reads.setdefault(home, {})[gpu] = entry  # a lane's copies are in order

    def add_write(self, home: Home, entry: int) -> None:
        """Note a copy to the store."""
        self._writes[home] = entry
        self._reads.pop(home, None)


class PagedGpu:
    """One GPU that plays its steps in order, and where its tensors are meanwhile. ``store`` is the one its state is in;
    ``sent`` holds what waits for its receiver, of all GPUs of the schedule."""

    def __init__(
        self,
        draft: Draft,
        gpu: int,
        pager: Pager,
        steps: Sequence[PagedStep],
        store: StoreOrder,
        sent: dict[Event, tuple[PagedGpu, Tensor]],
    ) -> None:
        pager.check(steps)
        self._draft, self._gpu, self._pager = draft, gpu, pager
        self._steps, self._store, self._sent = steps, store, sent
        self._played = 0
        self._buffers: dict[Tensor, int] = {}  # of the tensors on the GPU
        self._host_buffers: dict[Tensor, int] = {}  # of tensors without a home that went out at least once
        self.complete: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether all its steps are played."""
        return self._played == len(self._steps)

    def can_play(self, happened: set[Event]) -> bool:
        """Whether there is a next step, and all that it waits for has happened."""
        return not self.done and self.complete is None and happened.issuperset(self._steps[self._played].waits_for)

    @property
    def has_room(self) -> bool:
        """Whether the next step fits beside what other GPUs have not taken yet."""
        return self._pager.has_room(self._steps[self._played])

    def play(self, happened: set[Event]) -> PagedStep:
        """Add the next step, the copies before it and, unless it leaves a ``complete`` gradient, those after it.

        With a complete gradient the caller reduces it over the GPUs, then calls :meth:`settle`. Raises DoesNotFit if it
        has no room.
        """
        step = self._steps[self._played]
        following = self._following
        self._make(self._pager.make_ready(step, following))
        self._make(self._pager.prefetch(step, following, happened))
        self._add_step(step)
        if step.sends is not None and step.sends.passage is not None:
            self._sent[step.sends.passage] = (self, step.sends)
        self.complete = step.completes
        if self.complete is None:
            self.settle()
        return step

    def settle(self) -> None:
        """Add the copies after the step; after the last one everything goes out."""
        step = self._steps[self._played]
        following = self._following
        self._played += 1
        self.complete = None
        self._make(self._pager.settle(step, following))
        if self.done:
            self._make(self._pager.flush())

    def buffer_of(self, tensor: Tensor) -> int:
        """The buffer of a tensor that is on the GPU."""
        return self._buffers[tensor]

    @property
    def _following(self) -> Sequence[PagedStep]:
        after = self._played + 1
        return self._steps[after : after + self._pager.looks_ahead]

    def _add_step(self, step: PagedStep) -> None:
        layers = (step.layer, step.layer)
        reads = [self._buffers[tensor] for tensor in step.touches if tensor not in step.creates]
        for tensor in step.creates:
            self._buffers[tensor] = self._buffer(self._gpu, tensor)
        writes = [self._buffers[tensor] for tensor in step.changes + step.creates]
        if step.workspace_bytes:
            workspace = self._draft.buffer(self._gpu, TensorKind.WORKSPACE, layers, step.workspace_bytes, step.samples)
            writes.append(workspace)
        self._draft.add(
            step.kind,
            (self._gpu, Lane.COMPUTE),
            layers,
            samples=step.samples,
            microbatch=step.microbatch,
            reads=reads,
            writes=writes,
            recompute=step.recompute,
        )

    def _make(self, moves: Sequence[Move]) -> None:
        for action, tensor in moves:
            match action:
                case Action.COME_IN:
                    self._copy_in(tensor)
                case Action.ARRIVE:
                    self._receive(tensor)
                case Action.GO_OUT:
                    self._copy_out(tensor, self._buffers.pop(tensor))
                case Action.DROP:
                    del self._buffers[tensor]

    def _copy_in(self, tensor: Tensor) -> None:
        buffer = self._buffers[tensor] = self._buffer(self._gpu, tensor)
        if tensor.home is None:
            self._swap(TaskKind.SWAP_IN, Lane.SWAP_IN, tensor, reads=[self._host_buffers[tensor]], writes=[buffer])
        else:
            after = self._store.before_read(tensor.home)
            copy = self._swap(TaskKind.SWAP_IN, Lane.SWAP_IN, tensor, writes=[buffer], after=after)
            self._store.add_read(tensor.home, self._gpu, copy)

    def _copy_out(self, tensor: Tensor, buffer: int) -> None:
        if tensor.home is None:
            if tensor not in self._host_buffers:
                self._host_buffers[tensor] = self._buffer(None, tensor)
            self._swap(TaskKind.SWAP_OUT, Lane.SWAP_OUT, tensor, reads=[buffer], writes=[self._host_buffers[tensor]])
        else:
            after = self._store.before_write(tensor.home)
            copy = self._swap(TaskKind.SWAP_OUT, Lane.SWAP_OUT, tensor, reads=[buffer], after=after)
            self._store.add_write(tensor.home, copy)

    def _receive(self, tensor: Tensor) -> None:
        """Take what another GPU sent, which holds it no longer then."""
        assert tensor.passage is not None
        sender, theirs = self._sent.pop(tensor.passage)
        buffer = self._buffers[tensor] = self._buffer(self._gpu, tensor)
        self._draft.add(
            TaskKind.P2P,
            (sender._gpu, Lane.P2P_OUT),
            (tensor.layer, tensor.layer),
            samples=tensor.samples,
            microbatch=tensor.microbatch,
            tensor_kind=theirs.kind,
            size=tensor.bytes,
            peer=self._gpu,
            reads=[sender._buffers.pop(theirs)],
            writes=[buffer],
        )
        sender._pager.release(theirs)

    def _swap(
        self,
        kind: TaskKind,
        lane: Lane,
        tensor: Tensor,
        *,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> int:
        return self._draft.add(
            kind,
            (self._gpu, lane),
            (tensor.layer, tensor.layer),
            samples=tensor.samples,
            microbatch=tensor.microbatch,
            tensor_kind=tensor.kind,
            size=tensor.bytes,
            is_saved=tensor.is_saved,
            reads=reads,
            writes=writes,
            after=after,
        )

    def _buffer(self, gpu: int | None, tensor: Tensor) -> int:
        return self._draft.buffer(
            gpu, tensor.kind, (tensor.layer, tensor.layer), tensor.bytes, tensor.samples, is_saved=tensor.is_saved
        )


def play_together(draft: Draft, gpus: Sequence[PagedGpu]) -> None:
    """Add the steps of all GPUs in one order: list scheduling with unit times, GPUs ascending.

    What a step waits for of other GPUs must have happened in an earlier round. A GPU without room for its next step,
    as too much waits to be sent, lets the others go on; a step is refused if that does not help. A GPU with a complete
    gradient waits until all have theirs; then comes the all-reduce, and all go on together.
    """
    happened: set[Event] = set()
    while not all(gpu.done for gpu in gpus):
        ready = [gpu for gpu in gpus if gpu.can_play(happened)]
        assert ready, "every GPU waits for another one"
        played = [gpu.play(happened) for gpu in ready if gpu.has_room]
        if not played:
            ready[0].play(happened)
        happened.update(event for step in played for event in step.causes)
        gradients = [gpu.complete for gpu in gpus if gpu.complete is not None]
        if len(gradients) == len(gpus):
            if len(gpus) > 1:
                _add_all_reduce(draft, gradients[0], [gpu.buffer_of(g) for gpu, g in zip(gpus, gradients, strict=True)])
            for gpu in gpus:
                gpu.settle()


def _add_all_reduce(draft: Draft, gradient: Tensor, buffers: Sequence[int]) -> None:
    """A ring all-reduce over N GPUs, each of which sends 2(N - 1)/N of the gradient."""
    draft.add(
        TaskKind.ALLREDUCE,
        (None, Lane.COLLECTIVE),
        (gradient.layer, gradient.layer),
        tensor_kind=gradient.kind,
        size=2 * (len(buffers) - 1) * gradient.bytes,
        reads=buffers,
        writes=buffers,
    )
