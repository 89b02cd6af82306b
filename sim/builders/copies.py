"""Copies of a Harmony plan's tensors: between a GPU and the host, and from GPU to GPU."""

from __future__ import annotations

from collections.abc import Sequence

from ..schedule import Lane, TaskKind
from .draft import Draft
from .needs import Need, Needs
from .order import Group, Step


class Copies:
    """Adds copies to a draft. What one allocates on a GPU is allocated beside the group that this GPU is at."""

    def __init__(self, draft: Draft, needs: Needs, steps: Sequence[Step]) -> None:
        self._draft, self._needs = draft, needs
        self._at = {step.gpu: step.group.index for step in reversed(steps)}  # GPU -> group, at first its first one

    def come_to(self, step: Step) -> None:
        """The GPU of the step has come to it."""
        self._at[step.gpu] = step.group.index

    def bring_in(
        self,
        gpu: int,
        need: Need,
        buffer: int,
        microbatch: int | None = None,
        sources: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> int:
        """Copy a tensor from the host (``sources``: the dynamic host memory it lies in) to a GPU; the copy's index."""
        return self._draft.add(
            TaskKind.SWAP_IN, (gpu, Lane.SWAP_IN), need.run, samples=need.samples, microbatch=microbatch,
            tensor_kind=need.kind, size=self._needs.bytes(need), reads=sources, writes=[buffer], after=after,
            group=self._at[gpu], shard=need.shard,
        )  # fmt: skip

    def send_home(
        self, group: Group, need: Need, buffer: int, *, writes: Sequence[int] = (), after: Sequence[int] = ()
    ) -> int:
        """Copy a tensor of some layers of a group out to its home, or to a copy of that; the copy's index."""
        return self._draft.add(
            TaskKind.SWAP_OUT, (group.gpu, Lane.SWAP_OUT), need.run, tensor_kind=need.kind,
            size=self._needs.bytes(need), reads=[buffer], writes=writes, after=after, group=group.index,
            shard=need.shard,
        )  # fmt: skip

    def pass_on(self, receiver: int | None, need: Need, buffer: int, microbatch: int) -> int:
        """Copy x(l) or g(l) from its GPU to another one (None: to the host), if it is not there; the buffer there."""
        source = self._draft.buffers[buffer].gpu
        if source == receiver:
            return buffer
        if receiver is None:
            lane, kind = Lane.SWAP_OUT, TaskKind.SWAP_OUT
        else:
            lane, kind = Lane.P2P_OUT, TaskKind.P2P
        size = self._needs.bytes(need)
        target = self._draft.buffer(receiver, need.kind, need.run, size, need.samples)
        self._draft.add(
            kind, (source, lane), need.run, samples=need.samples, microbatch=microbatch, tensor_kind=need.kind,
            size=size, peer=receiver, reads=[buffer], writes=[target],
            group=None if receiver is None else self._at[receiver],
        )  # fmt: skip
        return target
