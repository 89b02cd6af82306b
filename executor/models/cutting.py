"""A transcript cut into layers that pass values on.

Every block begins a layer; behind the first block, so does every other unit with parameters. What lies between joins
the layer in front of it. A value that a later layer needs passes through all layers in between, unless it can be had
there without: computed again, if what it is computed from is smaller and no gradient is concerned, or held as a
constant, if it is the same for all batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import Unit
from .program import Call, Held, Here, Port, ProgramLayer, Size, Value
from .transcript import SAMPLES, Transcript


@dataclass(frozen=True, eq=False)
class Piece:
    """A layer: its name and kind, the module to call, and for each tensor that reaches it, whether it gets a
    gradient."""

    name: str
    kind: str
    module: nn.Module
    input_gradients: tuple[bool, ...]


def cut(model: nn.Module, units: Sequence[Unit], transcript: Transcript) -> list[Piece]:
    """The layers of a model whose forward was written down. They hold its own modules and parameters.

    Raises ModelError for a value that would have to pass between layers and cannot.
    """
    return _Cutter(model, units, transcript).layers()


@dataclass
class _Layer:
    """A layer on its way: indices of its calls, and the values that it needs from layers in front."""

    calls: list[int]
    needs: set[int]


class _Cutter:
    def __init__(self, model: nn.Module, units: Sequence[Unit], transcript: Transcript) -> None:
        self._model, self._transcript = model, transcript
        self._calls, self._values = transcript.calls, transcript.values
        self._unit = {unit.name: unit for unit in units}
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._tensors = {
            **transcript.constants,
            **dict(model.named_buffers(remove_duplicate=False)),
            **self._parameters,
        }
        self._roots: dict[int, frozenset[int] | None] = {}
        self._constants: dict[int, Tensor | None] = {}

    def layers(self) -> list[Piece]:
        groups = self._groups()
        while True:
            layers = [self._layer(group, is_last=group is groups[-1]) for group in groups]
            passing = self._passing(layers)
            empty = next((at for at in range(1, len(groups)) if not passing[at]), None)
            if empty is None:
                break
            groups[empty - 1 : empty + 1] = [groups[empty - 1] + groups[empty]]
        return [self._cut(layer, passing[at], passing[at + 1]) for at, layer in enumerate(layers)]

    # Which call belongs to which layer

    def _groups(self) -> list[list[int]]:
        """Indices of the calls that are made once, by layer."""
        groups: list[list[int]] = [[]]
        weighs, behind_block = False, False  # whether the last layer has parameters; whether a block has come
        for index, call in enumerate(self._calls):
            if self._is_repeatable(call) or all(self._constant(number) is not None for number in call.made()):
                continue
            unit = self._unit[call.target] if isinstance(call.target, str) else None
            begins = unit is not None and (unit.is_block or (behind_block and _weighs(unit.module)))
            if begins and weighs:
                groups.append([])
                weighs = False
            groups[-1].append(index)
            weighs = weighs or self._uses_parameters(call)
            behind_block = behind_block or (unit is not None and unit.is_block)
        return groups

    def _is_repeatable(self, call: Call) -> bool:
        """Whether later layers compute it again rather than pass on its results."""
        return all(self._roots_of(number) is not None for number in call.made())

    def _roots_of(self, number: int) -> frozenset[int] | None:
        """The values from which this one is computed again; None if it is not."""
        if number not in self._roots:
            self._roots[number] = self._find_roots(number)
        return self._roots[number]

    def _find_roots(self, number: int) -> frozenset[int] | None:
        index = self._values[number].call
        if index is None:
            return None
        call = self._calls[index]
        made = tuple(call.made())
        if isinstance(call.target, str) or call.draws or self._uses_parameters(call):
            return None
        if any(self._values[other].gradient for other in made):
            return None
        roots: set[int] = set()
        for used in _used(call):
            of_used = self._roots_of(used)
            roots |= {used} if of_used is None else of_used
        smaller = sum(map(self._bytes, roots)) <= sum(map(self._bytes, made))
        return frozenset(roots) if smaller else None

    def _bytes(self, number: int) -> int:
        """Of a value for one sample; nothing if it is held."""
        if self._constant(number) is not None:
            return 0
        value = self._values[number]
        return prod(value.shapes[SAMPLES.index(1)]) * value.dtype.itemsize

    def _uses_parameters(self, call: Call) -> bool:
        if isinstance(call.target, str) and _weighs(self._unit[call.target].module):
            return True
        return any(isinstance(leaf, Held) and leaf.name in self._parameters for leaf in call.uses())

    # What a layer needs

    def _layer(self, group: Sequence[int], *, is_last: bool) -> _Layer:
        """The calls of a layer with those that it repeats."""
        calls, needs = set(group), set[int]()
        made = {number for index in group for number in self._calls[index].made()}
        todo = [number for index in group for number in _used(self._calls[index])]
        if is_last:
            todo.append(self._transcript.output)
        while todo:
            number = todo.pop()
            if number in made or number in needs:
                continue
            if self._roots_of(number) is not None:
                index = self._values[number].call
                assert index is not None
                calls.add(index)
                made |= set(self._calls[index].made())
                todo += _used(self._calls[index])
            elif self._constant(number) is None:
                needs.add(number)
        return _Layer(sorted(calls), needs)

    def _passing(self, layers: Sequence[_Layer]) -> list[list[int]]:
        """The values that reach each layer, and those that leave the last one."""
        passing = [set[int](), *(set[int]() for _ in layers[1:]), {self._transcript.output}]
        born = {number: at for at, layer in enumerate(layers) for i in layer.calls for number in self._calls[i].made()}
        for at, layer in enumerate(layers):
            for number in layer.needs:
                for boundary in range(born[number] + 1 if number in born else 0, at + 1):
                    passing[boundary].add(number)
        between = [sorted(numbers, key=self._order) for numbers in passing[1:]]
        return [list(self._transcript.inputs), *between]

    def _order(self, number: int) -> tuple[bool, int]:
        """What has a gradient first, so that layers that are alike receive alike."""
        return not self._values[number].gradient, number

    # Constants

    def _constant(self, number: int) -> Tensor | None:
        """The value of what a unit makes and is the same for all batches; None if it is not."""
        if number not in self._constants:
            self._constants[number] = self._find_constant(number)
        return self._constants[number]

    def _find_constant(self, number: int) -> Tensor | None:
        value = self._values[number]
        if value.call is None or value.gradient or any(shape != value.shapes[0] for shape in value.shapes):
            return None
        call = self._calls[value.call]
        if not isinstance(call.target, str) or call.changes or self._uses_parameters(call):
            return None
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            zeros, ones = (self._evaluated(number, fill) for fill in (0, 1))
        if zeros.is_meta or torch.equal(zeros, ones):
            return zeros
        return None

    def _evaluated(self, number: int, fill: int) -> Tensor:
        """A value computed from batches full of ``fill``."""
        values: dict[int, Tensor] = {}
        device = torch.device("meta" if any(tensor.is_meta for tensor in self._tensors.values()) else "cpu")

        def leaf(form: Any) -> Any:
            match form:
                case Held(name):
                    return self._tensors[name]
                case Size(times, plus):
                    return times * SAMPLES[0] + plus
                case Here():
                    return device
                case _:
                    return form

        def find(wanted: int) -> None:
            value = self._values[wanted]
            if wanted in values:
                return
            if wanted != number and (value.call is None or self._roots_of(wanted) is None):
                values[wanted] = torch.full(value.shapes[0], fill, dtype=value.dtype, device=device)
                return
            assert value.call is not None
            call = self._calls[value.call]
            for used in _used(call):
                find(used)
            call.run(self._target(call), values, leaf)

        find(number)
        return values[number]

    def _target(self, call: Call) -> Callable[..., Any]:
        return self._unit[call.target].module if isinstance(call.target, str) else call.target

    # Modules

    def _cut(self, layer: _Layer, ins: Sequence[int], outs: Sequence[int]) -> Piece:
        used = [self._calls[index] for index in layer.calls]
        modules = {call.target: self._unit[call.target] for call in used if isinstance(call.target, str)}
        places = {name: str(at) for at, name in enumerate(modules)}
        held: dict[str, Tensor] = {}
        local: dict[Held | Value, Held | Value] = {}

        def leaf(form: Any) -> Any:
            if isinstance(form, Held | Value) and form not in local:
                tensor = self._tensors[form.name] if isinstance(form, Held) else self._constant(form.number)
                if tensor is None or (isinstance(form, Value) and form.number in known):
                    local[form] = Value(len(local))
                else:
                    local[form] = Held(f"held_{len(held)}")
                    held[f"held_{len(held)}"] = tensor
            return local.get(form, form) if isinstance(form, Held | Value) else form

        known = {*ins, *(number for call in used for number in call.made())}
        in_ports = [self._port(number, leaf) for number in ins]
        calls = [call.rewritten(leaf, places) for call in used]
        return Piece(
            *self._title(list(modules.values())),
            ProgramLayer(
                [unit.module for unit in modules.values()],
                held,
                calls,
                in_ports,
                [self._port(number, leaf) for number in outs],
                inplace=any(call.changes for call in used),
            ),
            tuple(self._values[number].gradient for number in ins),
        )

    def _port(self, number: int, leaf: Callable[[Any], Any]) -> Port:
        return Port(leaf(Value(number)).number, self._values[number].samples)

    def _title(self, units: Sequence[Unit]) -> tuple[str, str]:
        """Name and kind of a layer: those of its block, or of all that has parameters."""
        main = [unit for unit in units if unit.is_block] or [unit for unit in units if _weighs(unit.module)]
        named = main or list(units) or [Unit("", self._model, is_block=True)]
        return ", ".join(unit.name or type(unit.module).__name__ for unit in named), type(named[0].module).__name__


def _used(call: Call) -> Iterator[int]:
    for leaf in call.uses():
        if isinstance(leaf, Value):
            yield leaf.number
    for before, _ in call.changes:
        yield before


def _weighs(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
