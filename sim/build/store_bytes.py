"""What the host holds throughout a step: the home of all state, and the minibatch itself."""

from __future__ import annotations

from traces.costs import Costs


def store_bytes(costs: Costs, minibatch: int, copies: int) -> int:
    """Bytes of ``copies`` homes (weights, gradients, optimizer state, module buffers) and of the minibatch's data.

    A tied weight is held once per home; each layer that uses it has its own partial gradient.
    """
    last = costs.layer_count - 1
    layers, groups = costs.trace.layers, costs.trace.tied_groups
    duplicates = sum(
        tied.weight_bytes for index, layer in enumerate(layers) for tied in layer.tied if groups[tied.group][0] != index
    )
    state = costs.weight_bytes(0, last) + costs.gradient_bytes(0, last) + costs.optimizer_state_bytes(0, last)
    home = state + costs.buffer_bytes(0, last) - duplicates
    smallest = costs.trace.sizes[0].microbatch
    per_sample = -(-costs.input_bytes(0, smallest) // smallest)
    return copies * home + minibatch * (per_sample + costs.label_bytes(1))
