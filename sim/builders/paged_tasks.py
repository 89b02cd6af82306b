"""Tasks of a paged plan: the steps of each GPU, the copies its pager decides on, and the GPUs' all-reduces.

Every stay of a tensor on a GPU is a buffer of its own. Tensors without a place in the host store get a host buffer
when they first go out.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..schedule import Lane, TaskKind, TensorKind
from .draft import Draft
from .paging import Action, Move, PagedStep, Pager, Tensor


class PagedGpu:
    """One GPU that plays its steps in order, and where its tensors are meanwhile."""

    def __init__(self, draft: Draft, gpu: int, pager: Pager, steps: Sequence[PagedStep]) -> None:
        self._draft, self._gpu, self._pager = draft, gpu, pager
        self._steps = steps
        self._played = 0
        self._buffers: dict[Tensor, int] = {}  # of the tensors on the GPU
        self._host_buffers: dict[Tensor, int] = {}  # of tensors without a home that went out at least once
        self._last_read: dict[int, int] = {}  # home -> latest copy from it, to it
        self._last_write: dict[int, int] = {}
        self.complete: Tensor | None = None

    @property
    def done(self) -> bool:
        """Whether all its steps are played."""
        return self._played == len(self._steps)

    def play(self) -> None:
        """Add the next step, the copies before it and, unless it leaves a ``complete`` gradient, those after it.

        With a complete gradient the caller reduces it over the GPUs, then calls :meth:`settle`.
        """
        step = self._steps[self._played]
        self._make(self._pager.make_ready(step))
        self._add_step(step)
        self.complete = step.completes
        if self.complete is None:
            self.settle()

    def settle(self) -> None:
        """Add the copies after the step; after the last one everything goes out."""
        step = self._steps[self._played]
        self._played += 1
        self.complete = None
        following = None if self.done else self._steps[self._played]
        self._make(self._pager.settle(step, following))
        if following is None:
            self._make(self._pager.flush())

    def buffer_of(self, tensor: Tensor) -> int:
        """The buffer of a tensor that is on the GPU."""
        return self._buffers[tensor]

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
        )

    def _make(self, moves: Sequence[Move]) -> None:
        for action, tensor in moves:
            match action:
                case Action.COME_IN:
                    self._copy_in(tensor)
                case Action.GO_OUT:
                    self._copy_out(tensor, self._buffers.pop(tensor))
                case Action.DROP:
                    del self._buffers[tensor]

    def _copy_in(self, tensor: Tensor) -> None:
        buffer = self._buffers[tensor] = self._buffer(self._gpu, tensor)
        if tensor.home is None:
            self._copy(TaskKind.SWAP_IN, Lane.SWAP_IN, tensor, reads=[self._host_buffers[tensor]], writes=[buffer])
        else:
            written = self._last_write.get(tensor.home)
            after = () if written is None else (written,)
            self._last_read[tensor.home] = self._copy(
                TaskKind.SWAP_IN, Lane.SWAP_IN, tensor, writes=[buffer], after=after
            )

    def _copy_out(self, tensor: Tensor, buffer: int) -> None:
        if tensor.home is None:
            if tensor not in self._host_buffers:
                self._host_buffers[tensor] = self._buffer(None, tensor)
            self._copy(TaskKind.SWAP_OUT, Lane.SWAP_OUT, tensor, reads=[buffer], writes=[self._host_buffers[tensor]])
        else:
            # Copies of one home tensor out of a GPU are in order by their lane.
            read = self._last_read.get(tensor.home)
            after = () if read is None else (read,)
            self._last_write[tensor.home] = self._copy(
                TaskKind.SWAP_OUT, Lane.SWAP_OUT, tensor, reads=[buffer], after=after
            )

    def _copy(
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
            reads=reads,
            writes=writes,
            after=after,
        )

    def _buffer(self, gpu: int | None, tensor: Tensor) -> int:
        return self._draft.buffer(gpu, tensor.kind, (tensor.layer, tensor.layer), tensor.bytes, tensor.samples)


def play_together(draft: Draft, gpus: Sequence[PagedGpu]) -> None:
    """Add the steps of GPUs that split a minibatch in one order: list scheduling with unit times, GPUs ascending.

    A GPU with a complete gradient waits until all have theirs; then comes the all-reduce, and all go on together.
    """
    while not all(gpu.done for gpu in gpus):
        for gpu in gpus:
            if not gpu.done and gpu.complete is None:
                gpu.play()
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
