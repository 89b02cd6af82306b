"""What the host store holds throughout a step."""

from __future__ import annotations

from traces.costs import Costs


def store_bytes(costs: Costs, minibatch: int, copies: int) -> int:
    """Bytes of ``copies`` copies of all state (weights, gradients, optimizer state, buffers), and the minibatch's data.

    A tied weight lies in a copy once; each layer that uses it has its own partial gradient.
    """
    last = costs.layer_count - 1
    state = (
        costs.weight_bytes(0, last)
        - _tied_again(costs)
        + costs.gradient_bytes(0, last)
        + costs.optimizer_state_bytes(0, last)
        + costs.buffer_bytes(0, last)
    )
    return copies * state + _data_bytes(costs, minibatch)


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
