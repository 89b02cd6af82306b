"""What a model is called with, one tensor or several, and what is taken from what it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError, WorkloadError


@dataclass(frozen=True, eq=False)
class Inputs:
    """A batch's inputs, samples first. With ``names`` (sorted) they are keyword arguments, otherwise positional."""

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...] | None = None

    @staticmethod
    def of(given: object) -> Inputs:
        """From a tensor, a tuple or list of tensors, or a mapping of names to tensors. Raises WorkloadError."""
        match given:
            case Inputs():
                return given
            case Tensor():
                return Inputs((given,))
            case tuple() | list() if given and all(isinstance(item, Tensor) for item in given):
                return Inputs(tuple(given))
            case _ if hasattr(given, "items") and hasattr(given, "keys"):
                named = dict(sorted(given.items()))
                if named and all(isinstance(item, Tensor) and isinstance(key, str) for key, item in named.items()):
                    return Inputs(tuple(named.values()), tuple(named))
        raise WorkloadError(
            f"the batch's inputs are {_describe(given)}; they must be a tensor, a tuple of tensors, or a dictionary of "
            "names and tensors"
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with other tensors."""
        return replace(self, tensors=tuple(function(tensor) for tensor in self.tensors))

    @property
    def labelled(self) -> Sequence[tuple[str, Tensor]]:
        """What to call each tensor in messages, and the tensor."""
        if self.names is not None:
            return list(zip(self.names, self.tensors, strict=True))
        if len(self.tensors) == 1:
            return [("inputs", self.tensors[0])]
        return [(f"inputs[{at}]", tensor) for at, tensor in enumerate(self.tensors)]

    @property
    def sample(self) -> str:
        """What one sample is, in words: ``1024 tokens``, or types and shapes."""
        return " and ".join(map(_sample, self.tensors))

    @property
    def shapes(self) -> str:
        """Shapes, for messages."""
        return ", ".join(f"{tuple(tensor.shape)}" for tensor in self.tensors)


def call_model(model: nn.Module, inputs: Inputs) -> Any:
    """What the model returns for these inputs."""
    if inputs.names is None:
        return model(*inputs.tensors)
    return model(**dict(zip(inputs.names, inputs.tensors, strict=True)))


def logits_of(output: Any) -> Tensor:
    """The tensor that the loss takes: what the model returns, or its ``logits``. Raises ModelError."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"the model returns {_describe(output)}; it must return a tensor, or an object whose logits are one"
        )
    return logits


def _describe(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__


def _sample(tensor: Tensor) -> str:
    shape = tuple(tensor.shape[1:])
    if tensor.dtype is torch.int64 and len(shape) == 1:
        return f"{shape[0]} tokens"
    return f"{str(tensor.dtype).removeprefix('torch.')} {' x '.join(map(str, shape)) or 'number'}"
