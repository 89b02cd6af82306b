"""Graphs of autograd that outlive their forward task: what autograd saves lies in planned buffers, not in its own.

    forward task   every tensor that autograd saves becomes a place: in a buffer of the task (weights, inputs), where it
                   is already, or in the ``saved`` buffer, into which it is copied
    in between     the buffers may leave the GPU and come in again elsewhere; the graph holds no memory
    backward task  each place is looked up in the buffers that the task has then

A ``saved`` buffer that does not move in between is only a reservation: what would be copied into it stays where it is.

Needs no recompute: the graph is the one that the forward made.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from ..errors import DifferentModel, ModelError
from .layout import typed


class Region(Enum):
    """A piece of a task's memory in which saved tensors may lie; ``SAVED`` is for those that lie nowhere else."""

    WEIGHTS = "weights"
    BUFFERS = "buffers"
    INPUT = "input"
    LABELS = "labels"
    SAVED = "saved"


Memory = Mapping[Hashable, Tensor]
"""The bytes (uint8 [n]) of each region, where they are now. Any name will do but for :attr:`Region.SAVED`."""


LeafKey = tuple[int, str]
"""A layer, and the name of a parameter in its module."""


class _Place(NamedTuple):
    """Where a saved tensor lies: bytes from the start of a region, and its form there."""

    region: Hashable
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


class _Room:
    """Free bytes of the ``saved`` region, without gaps: wide elements from the bottom and narrow ones (masks) from the
    top, so that hardly a tensor is out of line. One that is will be copied before it is used."""

    def __init__(self, size: int) -> None:
        self._bottom, self._top = 0, size

    def take(self, size: int, item_bytes: int) -> int | None:
        """Place for ``size`` bytes; None if there is none."""
        if self._bottom + size > self._top:
            return None
        if item_bytes < 4:
            self._top -= size
            return self._top
        self._bottom += size
        return self._bottom - size


class _Kept(NamedTuple):
    """A saved tensor that stays where it is, and its version then."""

    tensor: Tensor
    version: int


class SavedTensors:
    """What autograd saves while :meth:`hooks` are on; ``memory`` is where the task's buffers are at the moment. Without
    a region ``SAVED``, up to ``kept_bytes`` of what lies in no region stay where they are."""

    def __init__(self, memory: Memory, kept_bytes: int = 0) -> None:
        self.memory = memory
        self._moves = Region.SAVED in memory
        self._room_bytes = memory[Region.SAVED].nbytes if self._moves else kept_bytes
        self._room = _Room(self._room_bytes)
        self._copies: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def hooks(self) -> AbstractContextManager[Any]:
        """While this context lasts, autograd saves here; what it saved then stays here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> _Place | _Kept:
        if not tensor.numel():
            return _kept(tensor)
        storage = tensor.untyped_storage()
        for region, block in self.memory.items():
            offset = tensor.data_ptr() - block.data_ptr()
            if storage._cdata == block.untyped_storage()._cdata and 0 <= offset < block.nbytes:
                return _place(region, offset, tensor)
        offset = self._offset(storage, tensor)
        return _place(Region.SAVED, offset + _bytes_before(tensor), tensor) if self._moves else _kept(tensor)

    def _offset(self, storage: torch.UntypedStorage, tensor: Tensor) -> int:
        """Where a storage has its place in the region; it is copied there, if it is to move."""
        known = self._copies.get(storage._cdata)
        if known and known[0]() is not None:  # the address may be another storage's by now
            return known[1]
        offset = self._room.take(storage.nbytes(), tensor.element_size())
        if offset is None:
            raise DifferentModel(
                f"autograd saves more than the {self._room_bytes} B that the schedule keeps for it; profile this model "
                "with these batches and plan again"
            )
        if self._moves:
            everything = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.memory[Region.SAVED][offset : offset + storage.nbytes()].copy_(everything)
        self._copies[storage._cdata] = weakref.ref(storage), offset
        return offset

    def _unpack(self, packed: _Place | _Kept) -> Tensor:
        if isinstance(packed, _Kept):
            if packed.tensor._version != packed.version:
                raise ModelError(
                    f"a layer changed a tensor of shape {list(packed.tensor.shape)} in place that backward needs; "
                    "autograd would refuse that too: let the layer make a new one"
                )
            return packed.tensor
        region, offset, dtype, shape, stride = packed
        extent = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
        bytes = self.memory[region][offset : offset + extent * dtype.itemsize]
        if bytes.storage_offset() % dtype.itemsize:
            bytes = bytes.clone()
        return typed(bytes, dtype, (extent,)).as_strided(shape, stride)


class Recording:
    """A forward that was recorded: its graph, and the leaves whose gradients backward makes.

    ``x`` and ``outputs`` are those of the tensors that came in and went out that get a gradient.
    """

    def __init__(
        self,
        saved: SavedTensors,
        x: Sequence[Tensor],
        outputs: Sequence[Tensor],
        leaves: Mapping[tuple[int, str], Tensor],
    ) -> None:
        self._saved, self._x, self._leaves = saved, x, leaves
        self._like = [output.detach().new_empty(0) for output in outputs]
        self._edges = edges_of(outputs)

    def check(self) -> None:
        """Raises ModelError for a function that keeps tensors out of the hooks' sight: their memory may be reused."""
        _check_nodes([edge.node for edge in self._edges if edge is not None])

    def backward(
        self, memory: Memory, output_gradient: Sequence[Tensor] | float, gradients: Mapping[LeafKey, Tensor]
    ) -> list[Tensor | None]:
        """Go back through the graph, with the task's buffers where they are now; adds to ``gradients``, which are named
        as the leaves are. ``output_gradient``: of the loss, the factor that it counts with. Returns the gradients of x
        (None for what had no part in the output)."""
        self._saved.memory = memory
        if isinstance(output_gradient, int | float):
            output_gradient = [like.new_full((), output_gradient) for like in self._like]
        add_gradients(self._edges, output_gradient, [(self._leaves[key], each) for key, each in gradients.items()])
        return [value.grad for value in self._x]


def edges_of(outputs: Sequence[Tensor]) -> list[GradientEdge | None]:
    """Where backward begins for each output; None for one that does without."""
    return [get_gradient_edge(output) if output.requires_grad else None for output in outputs]


def add_gradients(
    edges: Sequence[GradientEdge | None],
    output_gradients: Sequence[Tensor],
    leaves: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Run backward from ``edges``; what belongs to a leaf is added to the tensor that comes with it."""
    begun = [(edge, each) for edge, each in zip(edges, output_gradients, strict=True) if edge is not None]
    if not begun:
        return
    for leaf, gradient in leaves:
        leaf.grad = gradient
    try:
        torch.autograd.backward([edge for edge, _ in begun], [each for _, each in begun])
    finally:
        for leaf, _ in leaves:
            leaf.grad = None


def _kept(tensor: Tensor) -> _Kept:
    # Detached, as an output that its own function saves would keep that alive.
    return _Kept(tensor.detach(), tensor._version)


def _place(region: Hashable, offset: int, tensor: Tensor) -> _Place:
    return _Place(region, offset, tensor.dtype, tensor.shape, tensor.stride())


def _bytes_before(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.element_size()


def _check_nodes(roots: Sequence[Node]) -> None:
    seen, waiting = set(roots), list(roots)
    while waiting:
        node = waiting.pop()
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(list(getattr(node, "__dict__", {}).values()))):
            raise ModelError(
                f"{node.name()} keeps a tensor as an attribute of its context; use ctx.save_for_backward, or plan with "
                "--recompute"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
