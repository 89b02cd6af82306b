"""A piece of a model's forward as a program: calls of torch's functions and of the model's own modules.

Values are numbered. Arguments are templates: plain Python values in which :class:`Value`, :class:`Held`, :class:`Size`
and :class:`Here` stand for what is known only when the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Value:
    """A tensor that reached the program or that one of its calls made."""

    number: int


@dataclass(frozen=True)
class Held:
    """A parameter, buffer or constant of the layer, by its name there."""

    name: str


@dataclass(frozen=True)
class Size:
    """An integer that follows the number of samples: ``times * samples + plus``."""

    times: int
    plus: int


@dataclass(frozen=True)
class Here:
    """The device on which the program runs."""


@dataclass(frozen=True)
class Made:
    """A list, slice, dictionary or named tuple of templates (of a dictionary, of keys and values in turn)."""

    kind: type
    parts: tuple[Any, ...]


PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.layout, torch.memory_format, torch.Generator)
"""Types of constants, besides None and Ellipsis; also subclasses, such as enumerations of integers."""


def template(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """The template of an argument. ``leaf`` turns tensors, and whatever else is no container, into their stand-ins."""
    match value:
        case slice():
            return Made(slice, tuple(template(part, leaf) for part in (value.start, value.stop, value.step)))
        case dict() if type(value) is dict:
            return Made(dict, tuple(template(part, leaf) for item in value.items() for part in item))
        case list() if type(value) is list:
            return Made(list, tuple(template(part, leaf) for part in value))
        case tuple() if type(value) in (tuple, torch.Size):
            return tuple(template(part, leaf) for part in value)
        case tuple() if hasattr(value, "_fields"):
            return Made(type(value), tuple(template(part, leaf) for part in value))
        case _:
            return leaf(value)


def filled(form: Any, leaf: Callable[[Any], Any]) -> Any:
    """The argument of a template. ``leaf`` turns stand-ins into what they stand for."""
    match form:
        case Made(kind, parts):
            values = [filled(part, leaf) for part in parts]
            if kind is dict:
                return dict(zip(values[::2], values[1::2], strict=True))
            return values if kind is list else kind(*values)
        case tuple():
            return tuple(filled(part, leaf) for part in form)
        case _:
            return leaf(form)


def mapped(form: Any, leaf: Callable[[Any], Any]) -> Any:
    """A template with other leaves."""
    match form:
        case Made(kind, parts):
            return Made(kind, tuple(mapped(part, leaf) for part in parts))
        case tuple():
            return tuple(mapped(part, leaf) for part in form)
        case _:
            return leaf(form)


def leaves(form: Any) -> Iterator[Any]:
    """The leaves of a template, in order."""
    match form:
        case Made(_, parts):
            yield from leaves(parts)
        case tuple():
            for part in form:
                yield from leaves(part)
        case _:
            yield form


_DRAWING = ("dropout", "alpha_dropout", "feature_", "rand", "bernoulli", "multinomial", "normal", "uniform_", "random_",
            "exponential_", "geometric_", "cauchy_", "log_normal_", "poisson", "gumbel_softmax", "rrelu")  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One step: ``target`` is a function, or the name of a module of the layer.

    ``results`` numbers the tensors in what it returns, ``changes`` pairs values that it works on in place with the
    numbers that they have afterwards. ``recorded``: whether autograd records it, where anything is recorded.
    """

    target: Callable[..., Any] | str
    args: Any
    kwargs: Any
    results: tuple[int, ...]
    changes: tuple[tuple[int, int], ...] = ()
    recorded: bool = True

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def draws(self) -> bool:
        """Whether it is a function that draws random numbers, as far as its name tells."""
        name = getattr(self.target, "__name__", "")
        return name.startswith(_DRAWING) and not isinstance(self.target, str)

    def uses(self) -> Iterator[Any]:
        """The leaves of its arguments."""
        yield from leaves(self.args)
        yield from leaves(self.kwargs)

    def made(self) -> Iterator[int]:
        """The values that it makes."""
        for _, after in self.changes:
            yield after
        yield from self.results

    def rewritten(self, leaf: Callable[[Any], Any], targets: Mapping[str, str] | None = None) -> Call:
        """The same with other leaves, which number its values too, and other names of modules."""

        def number(old: int) -> int:
            new: int = leaf(Value(old)).number
            return new

        return replace(
            self,
            target=targets[self.target] if targets is not None and isinstance(self.target, str) else self.target,
            args=mapped(self.args, leaf),
            kwargs=mapped(self.kwargs, leaf),
            results=tuple(number(old) for old in self.results),
            changes=tuple((number(before), number(after)) for before, after in self.changes),
        )

    def run(self, target: Callable[..., Any], values: dict[int, Tensor], leaf: Callable[[Any], Any]) -> None:
        """Call ``target``, and note in ``values`` what came of it."""

        def full(form: Any) -> Any:
            return values[form.number] if isinstance(form, Value) else leaf(form)

        with nullcontext() if self.recorded else torch.no_grad():
            result = target(*filled(self.args, full), **filled(self.kwargs, full))
        for before, after in self.changes:
            values[after] = values[before]
        if self.results:
            values.update(zip(self.results, tensors_in(result), strict=True))


def tensors_in(result: Any) -> list[Tensor]:
    """The tensors in what a call returned, in order."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class Port:
    """How a value passes from layer to layer, where the first dimension is the samples.

    ``samples``: which dimension of the value that is; None if it has none: it is repeated for every sample then.
    """

    number: int
    samples: int | None

    def out(self, value: Tensor, samples: int) -> Tensor:
        """The value as it passes."""
        if self.samples is None:
            return value.unsqueeze(0).expand(samples, *value.shape)
        return value.movedim(self.samples, 0) if self.samples else value

    def into(self, passed: Tensor) -> Tensor:
        """The value that passed. (Gradients of the repetitions add up, and only the first one is used.)"""
        if self.samples is None:
            return passed[0]
        return passed.movedim(0, self.samples) if self.samples else passed


class ProgramLayer(nn.Module):
    """A layer that runs calls: some of the model's modules with what the model does around them.

    Called with what passes in, samples first, it returns what passes on: a tensor, or several as a tuple.
    ``inplace``: some call may change what passed in.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        held: Mapping[str, Tensor],
        calls: Sequence[Call],
        ins: Sequence[Port],
        outs: Sequence[Port],
        *,
        inplace: bool,
    ) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)
        for name, tensor in held.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.calls, self.ins, self.outs = tuple(calls), tuple(ins), tuple(outs)
        self.inplace = inplace
        self._last_used = _last_used(calls, outs)

    def forward(self, *passed: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Run the calls."""
        samples, device = len(passed[0]), passed[0].device

        def leaf(form: Any) -> Any:
            match form:
                case Held(name):
                    return getattr(self, name)
                case Size(times, plus):
                    return times * samples + plus
                case Here():
                    return device
                case _:
                    return form

        values = {port.number: port.into(tensor) for port, tensor in zip(self.ins, passed, strict=True)}
        for call, dead in zip(self.calls, self._last_used, strict=True):
            target = self.get_submodule(call.target) if isinstance(call.target, str) else call.target
            call.run(target, values, leaf)
            for number in dead:
                del values[number]
        out = tuple(port.out(values[port.number], samples) for port in self.outs)
        return out if len(out) > 1 else out[0]


def _last_used(calls: Sequence[Call], outs: Sequence[Port]) -> tuple[tuple[int, ...], ...]:
    """After each call, the values that nobody needs any more, whose memory can go."""
    alive = {port.number for port in outs}
    dead = []
    for call in reversed(calls):
        touched = {leaf.number for leaf in call.uses() if isinstance(leaf, Value)} | set(call.results)
        touched |= {number for change in call.changes for number in change}
        dead.append(tuple(sorted(touched - alive)))
        alive |= touched
    return tuple(reversed(dead))
