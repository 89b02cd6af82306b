"""What the user changes between steps: values are taken over, what a schedule was made for must stay.

Torch counts the changes of a tensor in place (``_version``), and a tensor that got other memory (``x.data = other``)
lies elsewhere. Changes through ``x.data`` are not counted, so values are looked at too, in large tensors some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import ModelError, OptimizerError
from ..models.layers import LOSS_PREFIX
from ..models.losses import LossFunction

_LOOKED_AT = 1024
"""About so many values of each tensor."""


class Changes:
    """Between :meth:`note`, after a step, and :meth:`check` and :meth:`values`, before the next one."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction, optimizer: Optimizer) -> None:
        self._modules = {"": model, **({LOSS_PREFIX: loss_fn} if isinstance(loss_fn, nn.Module) else {})}
        self._optimizer = optimizer
        self._modes, self._trained, self._tensors = self._read_modes(), self._read_trained(), self._read_tensors()
        self._places = {name: tensor.data for name, tensor in self._tensors.items()}
        self._groups = self._read_groups()
        self.note()

    def note(self) -> None:
        """Everything is as it should be now."""
        self._moved: set[str] = set()
        self._versions = {name: tensor._version for name, tensor in self._tensors.items()}
        self._glances = {name: _glance(tensor) for name, tensor in self._tensors.items()}
        self._state = _state(self._optimizer)

    def check(self) -> None:
        """Raises ModelError or OptimizerError for changes that no schedule can follow. A tensor that got other memory
        moves back to its place, with its new values."""
        now = self._read_tensors()
        for name, tensor in self._tensors.items():
            if now.get(name) is not tensor:
                raise ModelError(
                    f"{name} of the model is another tensor than when training was planned; assign values in place "
                    "(copy_), or make a new Trainer"
                )
            self._put_back(name, tensor)
        if added := now.keys() - self._tensors.keys():
            raise ModelError(f"the model has {', '.join(sorted(added))} since training was planned; make a new Trainer")
        _check_same("training", self._modes, self._read_modes(), "train() or eval() of the model")
        _check_same("requires_grad", self._trained, self._read_trained(), "requires_grad_")
        if self._read_groups() != self._groups:
            raise OptimizerError(
                f"{type(self._optimizer).__name__} has other parameters or groups than when training was planned; make "
                "a new Trainer"
            )
        if self._optimizer._optimizer_step_pre_hooks or self._optimizer._optimizer_step_post_hooks:
            raise OptimizerError(
                f"{type(self._optimizer).__name__} has hooks of its steps, which would not run, as it updates layer by "
                "layer; remove them"
            )

    def values(self) -> list[str]:
        """Names of what has other values: of the model's tensors, and ``optimizer state``."""
        changed = [
            name
            for name, tensor in self._tensors.items()
            if name in self._moved
            or tensor._version != self._versions[name]
            or not torch.equal(_glance(tensor), self._glances[name])
        ]
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
        self._moved.add(name)

    def _read_tensors(self) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for prefix, module in self._modules.items():
            named.update(module.named_parameters(prefix))
            named.update(module.named_buffers(prefix))
        return named

    def _read_modes(self) -> dict[str, bool]:
        modules = self._modules.items()
        return {name: each.training for prefix, module in modules for name, each in module.named_modules(prefix=prefix)}

    def _read_trained(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._modules[""].named_parameters()}

    def _read_groups(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self._optimizer.param_groups]


class _Seen:
    """A value as it was seen. Keeps it, so that no other takes its id."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.version = value._version if isinstance(value, Tensor) else 0

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Seen):
            return NotImplemented
        if isinstance(self.value, Tensor) or isinstance(other.value, Tensor):
            return self.value is other.value and self.version == other.version
        return bool(self.value == other.value)


def _glance(tensor: Tensor) -> Tensor:
    """Bytes of some values (so that NaN equals itself)."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _LOOKED_AT)].clone().view(torch.uint8)


def _state(optimizer: Optimizer) -> dict[Any, dict[str, _Seen]]:
    return {
        parameter: {name: _Seen(value) for name, value in state.items()} for parameter, state in optimizer.state.items()
    }


def _check_same(what: str, before: Mapping[str, bool], after: Mapping[str, bool], setter: str) -> None:
    for name, was in before.items():
        if after.get(name) is not was:
            raise ModelError(
                f"{name or 'the model'} has {what}={after.get(name)} now and had {was} when training was planned; set "
                f"it back ({setter}), or make a new Trainer"
            )
