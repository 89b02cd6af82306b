"""What the host store holds throughout a step."""

from __future__ import annotations

from traces.costs import Costs

from ..schedule import TensorKind


def store_bytes(costs: Costs, minibatch: int, copies: int) -> int:
    """All of :func:`store_by_kind`."""
    return sum(store_by_kind(costs, minibatch, copies).values())


def store_by_kind(costs: Costs, minibatch: int, copies: int, minibatches: int = 1) -> dict[TensorKind, int]:
    """Bytes of ``copies`` copies of all state (weights, buffers, gradients, optimizer state), and the data of
    so many minibatches of ``minibatch`` samples.

    A tied weight lies in a copy once; each layer that uses it has its own partial gradient.
    """
    last = costs.layer_count - 1
    return {
        TensorKind.WEIGHT: copies * (costs.weight_bytes(0, last) - _tied_again(costs)),
        TensorKind.BUFFER: copies * costs.buffer_bytes(0, last),
        TensorKind.GRADIENT: copies * costs.gradient_bytes(0, last),
        TensorKind.OPTIMIZER_STATE: copies * costs.optimizer_state_bytes(0, last),
        TensorKind.DATA: minibatches * _data_bytes(costs, minibatch),
    }


def _tied_again(costs: Costs) -> int:
    """Bytes of tied weights that ``weight_bytes`` counts for layers other than their owner."""
    groups = costs.trace.tied_groups
    return sum(
        tied.weight_bytes
        for index, layer in enumerate(costs.trace.layers)
        for tied in layer.tied
        if groups[tied.group][0] != index
    )


def _data_bytes(costs: Costs, minibatch: int) -> int:
    """Inputs of layer 0 and labels. Inputs have the same size per sample, so they scale from any profiled size."""
    profiled = costs.largest_microbatch()
    inputs = -(-costs.input_bytes(0, profiled) * minibatch // profiled)
    return inputs + costs.label_bytes(minibatch)
