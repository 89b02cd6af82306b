"""Any torch optimizer, one pack at a time, on the host or on a GPU.

The user's optimizer never steps itself. Its class steps a *shadow*: the same class and options, over the tensors at
hand. On the host these are the parameters themselves, and the shadow shares the optimizer's state. On a GPU they are
views of the pack's weights and state there; of the state, tensors in the parameter's own shape move with the
schedule, and the rest (a step count, say) stays here.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from ..errors import OptimizerError
from .layout import StateEntries

_ELEMENTWISE = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Adagrad,
    optim.Adadelta, optim.ASGD, optim.Rprop,
)  # fmt: skip
"""Optimizers of torch that update every element by itself, so that pieces of tensors come out as whole ones would."""

OptimizerFactory = Callable[[Any], Optimizer]
"""parameters → optimizer."""

State = dict[str, Any]
"""What an optimizer keeps for a parameter."""


class Moved(NamedTuple):
    """A parameter, or a shard of one (flat), that is updated on a GPU: the parameter itself, and where its tensors lie
    there."""

    parameter: nn.Parameter
    weight: Tensor
    gradient: Tensor
    state: Mapping[str, Tensor]


class PackOptimizer:
    """Updates some of an optimizer's parameters at a time. Raises OptimizerError if the optimizer does not allow it."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._group_of: dict[nn.Parameter, int] = {}
        for index, group in enumerate(optimizer.param_groups):
            self._group_of.update((parameter, index) for parameter in group["params"])
            for parameter in group["params"][:1]:
                self._state_of(parameter)

    def updates(self, parameter: nn.Parameter) -> bool:
        """Whether it is one of the optimizer's."""
        return parameter in self._group_of

    def over(self, copies: Mapping[nn.Parameter, nn.Parameter]) -> PackOptimizer:
        """The same, without any state, over copies (by copy) of its parameters."""
        groups: dict[int, list[Tensor]] = {}
        for each, original in copies.items():
            groups.setdefault(self._group_of[original], []).append(each)
        return PackOptimizer(self._shadow(groups, defaultdict(dict)))

    def check_shards(self) -> None:
        """Raises OptimizerError unless each element is updated by itself, as updates of shards need."""
        if type(self.optimizer) not in _ELEMENTWISE:
            known = ", ".join(each.__name__ for each in _ELEMENTWISE)
            raise OptimizerError(
                f"{self._name} is not known to update every element by itself, and with reduce=scatter and update=gpu "
                f"each GPU updates a piece of every tensor; those that do are {known}: use one of them, or plan with "
                "--update cpu or --reduce ring"
            )

    def state_entries(self, parameter: nn.Parameter) -> StateEntries:
        """What the optimizer keeps for a parameter in the parameter's own shape.

        Raises OptimizerError if it also keeps other tensors of several elements: no schedule moves those.
        """
        shape, state = self._state_of(parameter)
        entries: dict[str, torch.dtype] = {}
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == shape:
                entries[name] = value.dtype
            elif isinstance(value, Tensor) and value.numel() > 1:
                raise OptimizerError(
                    f"{self._name} keeps {name!r} of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(shape)}; schedules move only state in the parameter's shape: update on the CPU"
                )
        return entries

    def _state_of(self, parameter: nn.Parameter) -> tuple[torch.Size, State]:
        """A shape, and what the optimizer keeps for a parameter of that shape: this one's state if there is any yet,
        else found out by updating a tiny parameter."""
        if parameter not in self._group_of:
            return torch.Size(), {}
        if parameter.ndim and self.optimizer.state.get(parameter):
            return parameter.shape, self.optimizer.state[parameter]
        tiny = torch.zeros([3] * max(parameter.ndim, 1), dtype=parameter.dtype)
        tiny.grad = torch.ones_like(tiny)
        shadow = self._shadow({self._group_of[parameter]: [tiny]}, defaultdict(dict))
        try:
            shadow.step()
        except Exception as error:
            raise OptimizerError(
                f"{self._name} cannot update a parameter of {parameter.ndim} dimension(s) by itself, as the schedule "
                f"asks: {type(error).__name__}: {error}"
            ) from error
        return tiny.shape, shadow.state[tiny]

    @property
    def _name(self) -> str:
        return type(self.optimizer).__name__

    def update_on_host(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Update parameters in place, with the optimizer's own state."""
        groups: dict[int, list[Tensor]] = {}
        for parameter, gradient in gradients.items():
            if parameter in self._group_of:
                groups.setdefault(self._group_of[parameter], []).append(parameter)
                parameter.grad = gradient
        try:
            self._shadow(groups, self.optimizer.state).step()
        finally:
            for parameter in gradients:
                parameter.grad = None

    def update_on_gpu(self, moved: Sequence[Moved], states: dict[nn.Parameter, State]) -> None:
        """Update ``moved`` where they lie. ``states`` holds, for each updated before, what does not move.

        On its first update a parameter has no state yet; what the optimizer makes is copied to its place.
        """
        groups: dict[int, list[Tensor]] = {}
        state: defaultdict[Tensor, State] = defaultdict(dict)
        updated = [item for item in moved if item.parameter in self._group_of]
        for item in updated:
            item.weight.grad = item.gradient
            groups.setdefault(self._group_of[item.parameter], []).append(item.weight)
            if item.parameter in states:
                kept = {name: self._placed(value, item) for name, value in states[item.parameter].items()}
                state[item.weight] = {**kept, **item.state}
        shadow = self._shadow(groups, state)
        try:
            shadow.step()
        finally:
            for item in updated:
                item.weight.grad = None
        for item in updated:
            left = dict(shadow.state[item.weight])
            for name, place in item.state.items():
                value = left.pop(name)
                if value is not place:
                    place.copy_(value)
            states[item.parameter] = left

    def _placed(self, value: Any, item: Moved) -> Any:
        """State that does not move, where the optimizer wants it: on the host, but for fused and capturable ones."""
        group = self.optimizer.param_groups[self._group_of[item.parameter]]
        wanted = item.weight.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
        return value.to(wanted) if isinstance(value, Tensor) else value

    def _shadow(self, parameters: Mapping[int, Sequence[Tensor]], state: Any) -> Optimizer:
        """The optimizer over these parameters (by group) and this state, without its hooks and its history."""
        # Not by the constructor, whose arguments differ from class to class.
        shadow: Optimizer = object.__new__(type(self.optimizer))
        shadow.__dict__.update(vars(self.optimizer))
        shadow.__dict__.pop("step", None)  # a learning rate scheduler's wrapper, which counts steps of its own
        shadow._optimizer_step_pre_hooks = OrderedDict()
        shadow._optimizer_step_post_hooks = OrderedDict()
        shadow.state = state
        shadow.param_groups = [
            {**self.optimizer.param_groups[index], "params": list(tensors)} for index, tensors in parameters.items()
        ]
        return shadow
