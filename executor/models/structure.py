"""What a module is, apart from the values of its tensors: equal for modules that do the same work."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import Tensor, nn

from .program import Call, Port

_INNER = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
"""What torch keeps of a module's tensors and parts; compared on their own."""

_POSITION = {"layer_idx"}
"""How transformers numbers blocks: it tells them apart without changing what they do."""


def structure(module: nn.Module) -> Hashable:
    """Classes, names and plain options of all its modules, and shape, dtype and ``requires_grad`` of all its tensors.

    Whatever else a module holds must be the same object in both, hooks included, so that in doubt modules differ.
    """
    return tuple((name, _module_key(part)) for name, part in module.named_modules())


def _module_key(module: nn.Module) -> Hashable:
    own = {**module._parameters, **module._buffers}
    tensors = tuple((name, _tensor_key(tensor)) for name, tensor in sorted(own.items()))
    options = {name: value for name, value in vars(module).items() if name not in _INNER | _POSITION}
    return type(module), tensors, tuple((name, _option_key(value)) for name, value in sorted(options.items()))


def _tensor_key(tensor: Tensor | None) -> Hashable:
    return None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _option_key(value: Any) -> Hashable:
    match value:
        case None | bool() | int() | float() | str():
            return type(value), value
        case tuple() | list() | set() | frozenset():
            return type(value), tuple(_option_key(item) for item in value)
        case dict():
            return dict, tuple((str(key), _option_key(item)) for key, item in value.items())
        case Call() | Port():
            return value
        case _:
            return id(value)
