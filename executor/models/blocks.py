"""Which parts of a model stay whole: the blocks that it repeats, and the modules beside them.

A model keeps its blocks in lists (``nn.ModuleList``, ``nn.Sequential``). The outermost lists count; where every element
of one is a stage, which is nothing but a list of blocks itself, the stages' lists do. A model without lists is cut into
its children.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that is called as a whole. ``is_block``: it is an element of a list."""

    name: str
    module: nn.Module
    is_block: bool


def units(model: nn.Module) -> list[Unit]:
    """The units of a model, in the order of its modules; a model without parts is one itself."""
    if not any(True for _ in model.children()):
        return [Unit("", model, is_block=True)]
    if not _holds_list(model):
        return [Unit(name, child, is_block=_has_parameters(child)) for name, child in model.named_children()]
    whole = frozenset(getattr(model, "_no_split_modules", None) or ())
    return list(_units(model, "", whole))


def _units(module: nn.Module, name: str, whole: frozenset[str]) -> Iterator[Unit]:
    is_list = _is_list(module)
    stages = is_list and all(_is_stage(child, whole) for child in module.children())
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if stages or (_holds_list(child) and not is_list and type(child).__name__ not in whole):
            yield from _units(child, path, whole)
        else:
            yield Unit(path, child, is_block=is_list and _has_parameters(child))


def is_plain_sequential(module: nn.Module) -> bool:
    """Whether it calls its children one after the other, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _is_list(module: nn.Module) -> bool:
    return (isinstance(module, nn.ModuleList) or is_plain_sequential(module)) and _has_parameters(module)


def _holds_list(module: nn.Module) -> bool:
    return any(_is_list(part) for part in module.modules())


def _is_stage(module: nn.Module, whole: frozenset[str]) -> bool:
    """Whether it is nothing but lists of modules that have parts themselves."""
    if type(module).__name__ in whole or _is_list(module) or not _has_parameters(module):
        return False
    return all(_is_list(child) for child in module.children()) and any(
        all(any(True for _ in block.children()) for block in child.children()) for child in module.children()
    )


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
