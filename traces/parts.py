"""What a backward in two parts costs where a trace does not say: stated models, marked as such.

First the gradient of a layer's input is made, later those of its parameters. In a linear layer both are a product of
matrices of the same shapes, so each takes half of the backward; a layer without trained parameters has no second part.
"""

from __future__ import annotations

from collections.abc import Mapping

from .schema import Layer, Phase, SizeRow


def modelled_parts_ns(layer: Layer, backward_ns: int) -> Mapping[Phase, int]:
    """Half of the backward each, or all of it for the input."""
    of_weights = backward_ns // 2 if layer.gradient_bytes else 0
    return {Phase.BACKWARD_INPUT: backward_ns - of_weights, Phase.BACKWARD_WEIGHT: of_weights}


def modelled_held_bytes(layer: Layer, row: SizeRow) -> int:
    """Saved bytes, and as many gradients: operators with parameters save their inputs, and the operators behind them
    save their outputs, whose gradients are held."""
    return 2 * row.saved_bytes if layer.gradient_bytes else row.saved_bytes


def modelled_parts_workspace_bytes(row: SizeRow) -> int:
    """The peak of forward and backward together: nothing that is alive beside what is held can be more."""
    return row.saved_bytes + row.workspace_bytes
