"""An optimizer's state by the names of its parameters, whatever the order of its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer

from .plain_values import CannotBeStored, Find, decode, encode
from .tensor_files import TensorTable

_NOT_OPTIONS = {"params", "param_names"}
"""What of a group names its parameters."""


class GroupRecord(msgspec.Struct, frozen=True):
    """A group: the names of its parameters and its options (see ``plain_values.py``)."""

    parameters: list[str]
    options: dict[str, Any]


class OptimizerRecord(msgspec.Struct, frozen=True):
    """An optimizer's class, groups, and state by parameter (see ``plain_values.py``)."""

    kind: str
    groups: list[GroupRecord]
    state: dict[str, Any]


class DifferentOptimizer(ValueError):
    """A record is of another optimizer; says where they differ."""


class Restored:
    """An optimizer's past, matched with an ``optimizer`` and ready to be given to it.

    Raises DifferentOptimizer for another class, or groups with other parameters; with ``in_order`` also for groups in
    another order, as schedulers count them.
    """

    def __init__(
        self, record: OptimizerRecord, optimizer: Optimizer, model: nn.Module, find: Find, *, in_order: bool
    ) -> None:
        if record.kind != kind_of(optimizer):
            raise DifferentOptimizer(f"has the state of {record.kind}, this optimizer is {kind_of(optimizer)}")
        self._optimizer = optimizer
        groups = _groups(optimizer, model)
        saved = {frozenset(group.parameters): group for group in record.groups}
        for number, names in enumerate(groups):
            if frozenset(names) not in saved:
                raise DifferentOptimizer(_difference(number, names, record.groups))
        if len(groups) != len(record.groups):
            raise DifferentOptimizer(f"has {len(record.groups)} groups of parameters, this optimizer {len(groups)}")
        if in_order and [set(names) for names in groups] != [set(group.parameters) for group in record.groups]:
            raise DifferentOptimizer(
                "has the optimizer's groups in another order, and schedulers count them by their order: make the "
                "groups in the order they had"
            )
        self._options = [decode(saved[frozenset(names)].options, find) for names in groups]
        parameters = dict(model.named_parameters())
        self._state: dict[Tensor, Any] = {parameters[name]: decode(state, find) for name, state in record.state.items()}

    def apply(self) -> None:
        """Give it to the optimizer: what it kept before is forgotten."""
        for group, options in zip(self._optimizer.param_groups, self._options, strict=True):
            group.update(options)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def record_optimizer(optimizer: Optimizer, model: nn.Module, tensors: TensorTable) -> OptimizerRecord:
    """What there is to save; its tensors go to ``tensors``. Raises CannotBeStored, as ``plain_values.encode``."""
    groups = [
        GroupRecord(
            parameters=names,
            options={
                key: encode(value, f"group {number}/{key}", tensors)
                for key, value in group.items()
                if key not in _NOT_OPTIONS
            },
        )
        for number, (names, group) in enumerate(zip(_groups(optimizer, model), optimizer.param_groups, strict=True))
    ]
    state = {
        name: encode(dict(optimizer.state[parameter]), name, tensors)
        for name, parameter in model.named_parameters()
        if optimizer.state.get(parameter)
    }
    return OptimizerRecord(kind_of(optimizer), groups, state)


def kind_of(value: object) -> str:
    """A class by its full name."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _groups(optimizer: Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of each group's parameters."""
    names: Mapping[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups):
        strangers = [parameter for parameter in group["params"] if parameter not in names]
        if strangers:
            raise CannotBeStored(
                f"group {number} of the optimizer has a tensor of shape {tuple(strangers[0].shape)} that is no "
                "parameter of the model"
            )
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _difference(number: int, names: Sequence[str], saved: Sequence[GroupRecord]) -> str:
    nearest = max(saved, key=lambda group: len(set(names) & set(group.parameters)), default=GroupRecord([], {}))
    name = min(set(names) ^ set(nearest.parameters), default="")
    has, lacks = ("this optimizer", "the checkpoint") if name in names else ("the checkpoint", "this optimizer")
    return (
        f"has the optimizer's groups with other parameters: of group {number}, {has} has {name} and {lacks} does not; "
        "make the groups as they were"
    )
