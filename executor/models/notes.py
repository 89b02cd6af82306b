"""What one run of a model's forward did, as calls and values with numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from ..errors import ModelError
from .program import PLAIN, Call, Held, Here, Value, template, tensors_in


class NotedValue(NamedTuple):
    """A value of a run: its form, whether autograd follows it, and where it was made (for messages).

    ``call``: the index of the call that makes it, None for an input.
    """

    shape: torch.Size
    dtype: torch.dtype
    gradient: bool
    call: int | None
    place: str


class State(NamedTuple):
    """What may change of a tensor: how often it was worked on in place, and whether autograd follows it."""

    version: int
    gradient: bool

    @staticmethod
    def of(tensor: Tensor) -> State:
        """As it is now."""
        return State(tensor._version, tensor.requires_grad)


class Begun:
    """A call that is about to be made."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.tensors = [(tensor, State.of(tensor)) for tensor in tensors_in((args, kwargs))]
        self.recorded = torch.is_grad_enabled()

    def changed(self) -> dict[int, Tensor]:
        """Arguments that have been changed since, by id."""
        return {id(tensor): tensor for tensor, state in self.tensors if state != State.of(tensor)}


class Notes:
    """What a run for one number of samples did.

    Of values that depend on no sample and no parameter, the true ones are computed beside the stand-ins, for a forward
    may look at them.
    """

    def __init__(self, model: nn.Module, held: Mapping[int, str], constants: Mapping[str, Tensor]) -> None:
        self.calls: list[Call] = []
        self.places: list[str] = []
        self.infos: list[NotedValue] = []
        self.inputs: tuple[int, ...] = ()
        self.output = -1
        self.constants = dict(constants)
        self._held = dict(held)
        self._numbers: dict[int, int] = {}  # by id of a tensor
        self._versions: list[int] = []
        self._kept: list[Tensor] = []  # so that ids stay theirs
        same_for_all = {**dict(model.named_buffers()), **constants}
        self._true: dict[Value | Held, Tensor] = {
            Held(name): tensor for name, tensor in same_for_all.items() if not tensor.is_meta
        }

    def note(self, target: Callable[..., Any] | str, begun: Begun, result: Any, place: str) -> None:
        """A call that was made at ``place``, and what it returned."""
        out, changed = tensors_in(result), begun.changed()
        args, kwargs = self._form(begun.args, begun, place), self._form(begun.kwargs, begun, place)
        index = len(self.calls)
        changes = []
        for tensor in changed.values():
            if id(tensor) not in self._numbers:
                raise ModelError(
                    f"at {place} the model changes a parameter or buffer outside its layers; leave it as it is"
                )
            before = self._numbers[id(tensor)]
            changes.append((before, self.new(tensor, index, place)))
        results = tuple(
            self._numbers[id(tensor)] if id(tensor) in changed else self.new(tensor, index, place) for tensor in out
        )
        call = Call(target, args, kwargs, results, tuple(changes), begun.recorded)
        self.calls.append(call)
        self.places.append(place)
        if not call.draws and not isinstance(target, str):
            self._follow(call, target)

    def truth(self, tensor: Tensor) -> Tensor | None:
        """The true value of a stand-in, if it is the same for all batches."""
        if id(tensor) in self._held:
            return self._true.get(Held(self._held[id(tensor)]))
        return self._true.get(Value(self._numbers.get(id(tensor), -1)))

    def prune(self) -> None:
        """Drop calls whose results lead nowhere, and number what is left as it comes."""
        needed = {self.output, *self.inputs}
        kept = []
        for index in range(len(self.calls) - 1, -1, -1):
            call = self.calls[index]
            if needed.intersection(call.made()):
                kept.append(index)
                needed |= {leaf.number for leaf in call.uses() if isinstance(leaf, Value)}
                needed |= {before for before, _ in call.changes}
        kept.reverse()
        touched = [number for index in kept for number in self.calls[index].made()]
        new = {old: number for number, old in enumerate(dict.fromkeys((*self.inputs, *touched)))}
        position = {old: index for index, old in enumerate(kept)}

        def leaf(form: Any) -> Any:
            return Value(new[form.number]) if isinstance(form, Value) else form

        self.calls = [self.calls[index].rewritten(leaf) for index in kept]
        self.places = [self.places[index] for index in kept]
        infos = [self.infos[old] for old in new]
        self.infos = [info._replace(call=None if info.call is None else position[info.call]) for info in infos]
        self.inputs, self.output = tuple(new[number] for number in self.inputs), new[self.output]

    def _follow(self, call: Call, target: Callable[..., Any]) -> None:
        """Compute the true results of a call whose tensors all have true values."""
        stand_ins = [leaf for leaf in call.uses() if isinstance(leaf, Value | Held)]
        if not all(leaf in self._true for leaf in stand_ins):
            return
        values = {leaf.number: self._true[leaf] for leaf in stand_ins if isinstance(leaf, Value)}

        def leaf(form: Any) -> Any:
            match form:
                case Held():
                    return self._true[form]
                case Here():
                    return torch.device("cpu")
                case _:
                    return form

        with torch.no_grad(), unset_fake_temporarily():
            call.run(target, values, leaf)
        self._true.update({Value(number): tensor for number, tensor in values.items()})

    def _form(self, arguments: Any, begun: Begun, place: str) -> Any:
        """The template of arguments."""
        states = {id(tensor): state for tensor, state in begun.tensors}

        def leaf(item: Any) -> Any:
            match item:
                case Tensor():
                    return self._reference(item, states.get(id(item), State.of(item)), place)
                case torch.device():
                    return Here()
                case _ if item is None or item is Ellipsis or isinstance(item, PLAIN):
                    return item
                case _:
                    raise ModelError(
                        f"at {place} the model passes on a {type(item).__module__}.{type(item).__qualname__}; "
                        "between its layers only tensors and plain values can pass"
                    )

        return template(arguments, leaf)

    def _reference(self, tensor: Tensor, state: State, place: str) -> Value | Held:
        if id(tensor) in self._held:
            return Held(self._held[id(tensor)])
        if id(tensor) in self._numbers or tensor.is_meta or isinstance(tensor, FakeTensor):
            return Value(self.number(tensor, state, place))
        name = f"constant {len(self.constants)}"
        self.constants[name] = self._true[Held(name)] = tensor.detach()
        self._held[id(tensor)] = name
        self._kept.append(tensor)
        return Held(name)

    def number(self, tensor: Tensor, state: State, place: str) -> int:
        """The number of a value. Raises ModelError if it has none, or is not what it was when it was made."""
        number = self._numbers.get(id(tensor))
        if number is None:
            raise ModelError(
                f"at {place} the model uses a tensor that was made out of sight (inside torch.vmap or a library, say); "
                "move that into a module of its own"
            )
        made = self.infos[number]
        if state.version != self._versions[number]:
            raise ModelError(
                f"at {place} the model uses a value, made by {made.place}, that was changed in place through a view; "
                "change values by their own name, or not in place"
            )
        if state.gradient != made.gradient:
            raise ModelError(
                f"at {place} the model uses a value, made by {made.place}, whose gradient is computed in a way of its "
                "own (torch.autograd.Function); call that inside a module"
            )
        return number

    def new(self, tensor: Tensor, call: int | None, place: str) -> int:
        """A number for a value that was made or changed."""
        number = len(self.infos)
        self.infos.append(NotedValue(tensor.shape, tensor.dtype, tensor.requires_grad, call, place))
        self._numbers[id(tensor)] = number
        self._versions.append(tensor._version)
        self._kept.append(tensor)
        return number
