"""The operators that a piece of work runs, forward and backward, with their arithmetic and their memory traffic.

Work on the meta device runs every operator without values, so a model of any size can be counted. FLOPs are torch's
own counts (a multiplication and an addition are two), halved for causal attention; bytes are those that an operator
reads and writes once each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


class Kind(Enum):
    """What limits an operator. ``ELEMENTWISE`` and ``REDUCTION`` (softmax, normalisation) are limited by memory."""

    MATMUL = "matmul"
    BATCHED_MATMUL = "batched_matmul"
    ATTENTION = "attention"
    CONVOLUTION = "convolution"
    CONVOLUTION_BACKWARD = "convolution_backward"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"


class Stage(Enum):
    """When an operator runs: in a forward without recording, in one with it, or in the backward."""

    FORWARD = "forward"
    RECORDING = "recording"
    BACKWARD = "backward"


class Operator(NamedTuple):
    """An operator that ran: a kernel or a few on a GPU."""

    name: str
    kind: Kind
    stage: Stage
    flops: int
    bytes: int


_KINDS: dict[Any, Kind] = {
    aten.mm: Kind.MATMUL,
    aten.addmm: Kind.MATMUL,
    aten.bmm: Kind.BATCHED_MATMUL,
    aten.baddbmm: Kind.BATCHED_MATMUL,
    aten.convolution: Kind.CONVOLUTION,
    aten.convolution_backward: Kind.CONVOLUTION_BACKWARD,
    aten._scaled_dot_product_efficient_attention: Kind.ATTENTION,
    aten._scaled_dot_product_efficient_attention_backward: Kind.ATTENTION,
    aten._scaled_dot_product_flash_attention: Kind.ATTENTION,
    aten._scaled_dot_product_flash_attention_backward: Kind.ATTENTION,
}

_REDUCTIONS = {
    aten._softmax, aten._softmax_backward_data, aten._safe_softmax,
    aten._log_softmax, aten._log_softmax_backward_data,
    aten.native_layer_norm, aten.native_layer_norm_backward,
    aten.native_batch_norm, aten.native_batch_norm_backward,
    aten.native_group_norm, aten.native_group_norm_backward,
    aten._fused_rms_norm, aten._fused_rms_norm_backward,
}  # fmt: skip

_GATHERS = {aten.embedding, aten.index, aten.index_select, aten.gather, aten.nll_loss_forward}
"""They read of their first argument no more than they return."""

_SCATTERS = {aten.embedding_dense_backward, aten.nll_loss_backward}
"""They write far more than they read."""

_NO_KERNELS = {
    aten.detach, aten.alias, aten._unsafe_view, aten.lift_fresh, aten._reshape_alias,
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
}  # fmt: skip
"""They only look at memory in another way, or reserve it."""


class OperatorCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Notes every operator that runs while this mode is active in the calling thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, and note it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if not func.is_view and packet not in _NO_KERNELS:
            flops = flop_registry[packet](*args, **kwargs, out_val=result) if packet in flop_registry else 0
            if _is_causal(func, args, kwargs):
                flops //= 2
            kind = _KINDS.get(packet, Kind.REDUCTION if packet in _REDUCTIONS else Kind.ELEMENTWISE)
            name = packet.__name__
            self.operators.append(Operator(name, kind, _stage(), flops, _traffic_bytes(packet, (args, kwargs), result)))
        return result


def operators_of(work: Callable[[], object]) -> list[Operator]:
    """Do the work; returns the operators that it ran, in order."""
    counter = OperatorCounter()
    with counter:
        work()
    return counter.operators


def _is_causal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it is attention that leaves out what comes later."""
    names = [argument.name for argument in func._schema.arguments]
    return "is_causal" in names and bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal"))


def _stage() -> Stage:
    if torch._C._current_graph_task_id() != -1:
        return Stage.BACKWARD
    return Stage.RECORDING if torch.is_grad_enabled() else Stage.FORWARD


def _traffic_bytes(packet: Any, given: Any, result: Any) -> int:
    reads, writes = list(map(_own_bytes, _tensors(given))), list(map(_own_bytes, _tensors(result)))
    if packet in _GATHERS and reads:
        reads[0] = min(reads[0], sum(writes))
    elif packet in _SCATTERS:
        reads = [min(reads)]
    return sum(reads) + sum(writes)


def _tensors(values: Any) -> Iterable[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _own_bytes(tensor: Tensor) -> int:
    """Of its elements, those in different places: an expanded dimension is read from one."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * tensor.element_size()
