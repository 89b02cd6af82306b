"""What the user changes between steps: values are taken over, what a schedule was made for must stay.

Torch counts the changes of a tensor in place (``_version``), and a tensor that got other memory (``x.data = other``)
lies elsewhere. Changes through ``x.data`` itself are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ModelError, OptimizerError


@dataclass(frozen=True, eq=False)
class _Seen:
    """A value, and how often it had been changed in place when it was seen. Keeps it, so that no other takes its id."""

    value: Any
    version: int

    @staticmethod
    def of(value: Any) -> _Seen:
        return _Seen(value, value._version if isinstance(value, Tensor) else 0)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen):
            return NotImplemented
        same = self.value is other.value or (not isinstance(self.value, Tensor) and self.value == other.value)
        return same and self.version == other.version


class Changes:
    """Between :meth:`note`, after a step, and :meth:`check` and :meth:`values`, before the next one."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        self._modes = _modes(model)
        self._trained = _trained(model)
        self._tensors = dict(_tensors(model))
        self._places = {name: tensor.data for name, tensor in self._tensors.items()}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self.note()

    def note(self) -> None:
        """Everything is as it should be now."""
        self._versions = {name: tensor._version for name, tensor in self._tensors.items()}
        self._state = _state(self._optimizer)

    def check(self) -> None:
        """Raises ModelError or OptimizerError for changes that no schedule can follow. A tensor whose memory was
        replaced moves back to its place, with its new values."""
        now = dict(_tensors(self._model))
        for name, tensor in self._tensors.items():
            if now.get(name) is not tensor:
                raise ModelError(
                    f"{name} of the model is another tensor than when training was planned; assign values in place "
                    "(copy_), or make a new Trainer"
                )
            self._put_back(name, tensor)
        if added := now.keys() - self._tensors.keys():
            raise ModelError(f"the model has {', '.join(sorted(added))} since training was planned; make a new Trainer")
        for what, before, after in (
            ("training", self._modes, _modes(self._model)),
            ("requires_grad", self._trained, _trained(self._model)),
        ):
            if before != after:
                name = next(name for name in before if before[name] != after.get(name))
                raise ModelError(
                    f"{name or 'the model'} has {what}={after.get(name)} now and had {before[name]} when training was "
                    f"planned; set it back ({'model.train()' if what == 'training' else 'requires_grad_'}), or make a "
                    "new Trainer"
                )
        groups = [group["params"] for group in self._optimizer.param_groups]
        if not _same(groups, self._groups):
            raise OptimizerError(
                f"{type(self._optimizer).__name__} has other parameters or groups than when training was planned; make "
                "a new Trainer"
            )

    def values(self) -> list[str]:
        """Names of what has other values: of the model's tensors, and ``optimizer state``."""
        changed = [name for name, tensor in self._tensors.items() if tensor._version != self._versions[name]]
        return changed + (["optimizer state"] if _state(self._optimizer) != self._state else [])

    def _put_back(self, name: str, tensor: Tensor) -> None:
        place = self._places[name]
        if tensor.data_ptr() == place.data_ptr() and tensor.device == place.device:
            return
        if (tensor.shape, tensor.dtype, tensor.device) != (place.shape, place.dtype, place.device):
            raise ModelError(
                f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device} now and was {place.dtype} "
                f"{list(place.shape)} on {place.device} when training was planned; move it back, or make a new Trainer"
            )
        place.copy_(tensor.data)
        tensor.data = place
        self._versions[name] = -1


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _modes(model: nn.Module) -> dict[str, bool]:
    return {name: module.training for name, module in model.named_modules()}


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def _state(optimizer: Optimizer) -> dict[Any, dict[str, _Seen]]:
    return {
        parameter: {name: _Seen.of(value) for name, value in state.items()}
        for parameter, state in optimizer.state.items()
    }


def _same(groups: list[list[nn.Parameter]], others: list[list[nn.Parameter]]) -> bool:
    return [[id(each) for each in group] for group in groups] == [[id(each) for each in group] for group in others]
