"""Values made of numbers, texts, lists, dictionaries and tensors, as JSON beside files of tensors.

What JSON cannot say is a dictionary of one key that starts with ``$``: a tensor by its name, a tuple, a dictionary with
other keys than texts, a Counter, a number that is not finite. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .tensor_files import TensorTable, unwritable

Find = Callable[[str], Tensor]
"""A tensor by its name."""


class CannotBeStored(ValueError):
    """A value of a type that has no form in JSON; says where it lies and what it is."""


def encode(value: Any, name: str, tensors: TensorTable) -> Any:
    """The value for JSON; its tensors go to ``tensors``, under names that begin with ``name``.

    Raises CannotBeStored for anything but None, bool, int, float, str, list, tuple, dict, Counter and Tensor with
    values.
    """
    match value:
        case None | bool():
            return value
        case int():  # subclasses become what they are made of
            return int(value) if value.bit_length() < 64 else {"$int": str(int(value))}
        case str():
            return str(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": str(float(value))}
        case Tensor():
            if problem := unwritable(value):
                raise CannotBeStored(f"{name} {problem}")
            return {"$tensor": tensors.add(name, value)}
        case list():
            return [encode(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
        case tuple():
            return {"$tuple": encode(list(value), name, tensors)}
        case Counter():
            return {"$counter": _pairs(value, name, tensors)}
        case dict() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, f"{name}/{key}", tensors) for key, item in value.items()}
        case dict():
            return {"$dict": _pairs(value, name, tensors)}
        case _:
            raise CannotBeStored(
                f"{name} is a {type(value).__qualname__}; only numbers, texts, None, lists, tuples, dictionaries and "
                "tensors can be stored"
            )


def decode(value: Any, find: Find) -> Any:
    """The value that :func:`encode` was given; ``find`` finds its tensors."""
    match value:
        case list():
            return [decode(item, find) for item in value]
        case {"$tensor": name}:
            return find(name)
        case {"$int": text}:
            return int(text)
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(decode(items, find))
        case {"$counter": pairs}:
            return Counter(dict(decode(pairs, find)))
        case {"$dict": pairs}:
            return dict(decode(pairs, find))
        case dict():
            return {key: decode(item, find) for key, item in value.items()}
        case _:
            return value


def _pairs(value: Mapping[Any, Any], name: str, tensors: TensorTable) -> list[Any]:
    return [[encode(key, name, tensors), encode(item, f"{name}/{key}", tensors)] for key, item in value.items()]
