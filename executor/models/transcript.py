"""What a model's forward does around its units, written down while it runs.

A copy of the model runs on stand-ins that have shapes and no values, for several numbers of samples: what differs
between the runs follows the number of samples. Whatever the forward does that depends on more than shapes is refused,
as a recording would repeat it for every batch.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from ..errors import ModelError
from .blocks import Unit
from .inputs import Inputs, call_model, logits_of
from .program import PLAIN, Call, Held, Here, Made, Size, Value, template, tensors_in

SAMPLES = (2, 3, 1)
"""How many samples the runs take. (One is a case of its own: dimensions of 1 are squeezed and broadcast.)"""

_READS_VALUES = frozenset(
    ("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "item", "tolist", "numpy",
     "__array__", "__format__", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select")
)  # fmt: skip


@dataclass(frozen=True)
class ValueInfo:
    """A value of a recording: its shape for each number of :data:`SAMPLES`, and where it was made (for messages).

    ``gradient``: autograd follows it. ``call``: the index of the call that makes it, None for an input.
    """

    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    gradient: bool
    call: int | None
    place: str

    @property
    def samples(self) -> int | None:
        """The dimension that is the samples; None if its shape does not follow their number.

        Raises ModelError if more than one does, or one does in another way than being their number.
        """
        if len({len(shape) for shape in self.shapes}) == 1:
            sizes = list(zip(*self.shapes, strict=True))  # by dimension
            varying = [dimension for dimension, of in enumerate(sizes) if len(set(of)) > 1]
            if not varying:
                return None
            if len(varying) == 1 and sizes[varying[0]] == SAMPLES:
                return varying[0]
        shapes = ", ".join(f"{tuple(shape)} for {n}" for shape, n in zip(self.shapes, SAMPLES, strict=True))
        raise ModelError(
            f"a value made by {self.place} is needed in a later layer, but none of its dimensions is the number of "
            f"samples ({shapes} sample(s)), so it cannot be cut into microbatches; keep the samples a dimension"
        )


@dataclass(frozen=True)
class Transcript:
    """A model's forward: ``calls`` in order, whose string targets name modules of the model, and its ``values``.

    ``inputs`` and ``output`` number the values that come in and the logits. ``constants`` are tensors that the model
    holds without registering them.
    """

    calls: tuple[Call, ...]
    places: tuple[str, ...]
    values: tuple[ValueInfo, ...]
    inputs: tuple[int, ...]
    output: int
    constants: dict[str, Tensor]


def transcribe(model: nn.Module, units: Sequence[Unit], inputs: Inputs) -> Transcript:
    """Record ``model`` on stand-ins like ``inputs``. The model itself is neither changed nor run.

    Raises ModelError with the place for a forward that a recording would not repeat faithfully.
    """
    try:
        runs = [_run(model, units, inputs, samples, nullcontext(), "meta") for samples in SAMPLES]
    except ModelError:
        # Libraries that would look at values take another way when they see that they are traced.
        runs = [_run(model, units, inputs, samples, FakeTensorMode(), "cpu") for samples in SAMPLES]
    first = runs[0]
    calls = []
    for index, same in enumerate(zip_longest(*(run.calls for run in runs))):
        place = first.places[index] if index < len(first.calls) else "its end"
        for call, samples in zip(same, SAMPLES, strict=True):
            if same[0] is None or call is None or not _alike(same[0], call):
                raise ModelError(
                    f"the model's forward does something else for {SAMPLES[0]} samples than for {samples}, at {place}; "
                    "microbatches differ in size, so it must not look at how many samples there are"
                )
        args = _merged([call.args for call in same], place)
        calls.append(replace(same[0], args=args, kwargs=_merged([call.kwargs for call in same], place)))
    values = tuple(
        replace(info, shapes=tuple(run.infos[number].shapes[0] for run in runs))
        for number, info in enumerate(first.infos)
    )
    return Transcript(tuple(calls), tuple(first.places), values, first.inputs, first.output, first.constants)


def _alike(call: Call, other: Call) -> bool:
    return (call.target, call.results, call.changes, call.recorded) == (
        other.target,
        other.results,
        other.changes,
        other.recorded,
    )


def _merged(forms: Sequence[Any], place: str) -> Any:
    """One template from those of the runs: integers that differ follow the number of samples."""
    first = forms[0]
    match first:
        case Made(kind, parts) if all(isinstance(f, Made) and len(f.parts) == len(parts) for f in forms):
            return Made(kind, tuple(_merged(same, place) for same in zip(*(f.parts for f in forms), strict=True)))
        case tuple() if all(isinstance(f, tuple) and len(f) == len(first) for f in forms):
            return tuple(_merged(same, place) for same in zip(*forms, strict=True))
    if all(type(form) is type(first) and form == first for form in forms):
        return first
    if all(type(form) is int for form in forms):
        times, rest = divmod(forms[1] - forms[0], SAMPLES[1] - SAMPLES[0])
        size = Size(times, forms[0] - times * SAMPLES[0])
        if not rest and all(size.times * n + size.plus == form for n, form in zip(SAMPLES, forms, strict=True)):
            return size
    raise ModelError(
        f"at {place} the model's forward uses {', '.join(map(repr, forms))} for {SAMPLES} samples; a recording cannot "
        "tell what it would use for others"
    )


def _run(
    model: nn.Module,
    units: Sequence[Unit],
    inputs: Inputs,
    samples: int,
    mode: AbstractContextManager[Any],
    device: str,
) -> _Run:
    """Run the model on stand-ins that ``mode`` makes on ``device``."""
    with mode, torch.enable_grad():
        stand_ins = _StandIns(model, device)
        run = _Run(model, stand_ins.names)
        given = inputs.map(lambda tensor: torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device=device))
        run.inputs = tuple(run.new(tensor, None, "the batch") for tensor in given.tensors)
        with _Mode(run) as watching:
            for unit in {id(unit.module): unit for unit in units}.values():
                watching.watch(stand_ins.model.get_submodule(unit.name), unit.name)
            try:
                logits = logits_of(call_model(stand_ins.model, given))
            except ModelError:
                raise
            except Exception as error:
                raise ModelError(
                    f"{type(model).__qualname__} fails on inputs of shape {given.shapes} without values, at "
                    f"{_place(error)}: {type(error).__name__}: {error}"
                ) from error
        run.output = run.number(logits, _seen(logits), "its output")
    run.prune()
    return run


class _Run:
    """What a run for one number of samples did.

    Of values that depend on no sample and no parameter, the true ones are computed beside the stand-ins, for a forward
    may look at them.
    """

    def __init__(self, model: nn.Module, held: Mapping[int, str]) -> None:
        self.calls: list[Call] = []
        self.places: list[str] = []
        self.infos: list[ValueInfo] = []
        self.inputs: tuple[int, ...] = ()
        self.output = -1
        self.constants: dict[str, Tensor] = {}
        self._held = dict(held)
        self._numbers: dict[int, int] = {}  # by id of a tensor
        self._versions: list[int] = []
        self._kept: list[Tensor] = []  # so that ids stay theirs
        self._true: dict[Value | Held, Tensor] = {
            Held(name): buffer for name, buffer in model.named_buffers() if not buffer.is_meta
        }

    def note(self, target: Callable[..., Any] | str, begun: _Begun, result: Any) -> None:
        """A call that was made, and what it returned."""
        out = tensors_in(result)
        changed = {id(tensor): tensor for tensor, seen in begun.tensors if seen != _seen(tensor)}
        if not out and not changed:
            return
        args, kwargs = self._form(begun.args, begun), self._form(begun.kwargs, begun)
        index = len(self.calls)
        changes = []
        for tensor in changed.values():
            if id(tensor) not in self._numbers:
                raise ModelError(
                    f"at {begun.place} the model changes a parameter or buffer outside its layers; leave it as it is"
                )
            before = self._numbers[id(tensor)]
            changes.append((before, self.new(tensor, index, begun.place)))
        results = tuple(
            self._numbers[id(tensor)] if id(tensor) in changed else self.new(tensor, index, begun.place)
            for tensor in out
        )
        call = Call(target, args, kwargs, results, tuple(changes), begun.recorded)
        self.calls.append(call)
        self.places.append(begun.place)
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
        self.infos = [replace(info, call=None if info.call is None else position[info.call]) for info in infos]
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

    def _form(self, arguments: Any, call: _Begun) -> Any:
        """The template of arguments."""
        seen = {id(tensor): state for tensor, state in call.tensors}

        def leaf(item: Any) -> Any:
            match item:
                case Tensor():
                    return self._reference(item, seen.get(id(item), _seen(item)), call.place)
                case torch.device():
                    return Here()
                case _ if item is None or item is Ellipsis or isinstance(item, PLAIN):
                    return item
                case _:
                    raise ModelError(
                        f"at {call.place} the model passes on a {type(item).__module__}.{type(item).__qualname__}; "
                        "between its layers only tensors and plain values can pass"
                    )

        return template(arguments, leaf)

    def _reference(self, tensor: Tensor, seen: _Seen, place: str) -> Value | Held:
        if id(tensor) in self._held:
            return Held(self._held[id(tensor)])
        if id(tensor) in self._numbers or tensor.is_meta or isinstance(tensor, FakeTensor):
            return Value(self.number(tensor, seen, place))
        name = f"constant_{len(self.constants)}"
        self.constants[name] = self._true[Held(name)] = tensor.detach()
        self._held[id(tensor)] = name
        self._kept.append(tensor)
        return Held(name)

    def number(self, tensor: Tensor, seen: _Seen, place: str) -> int:
        """The number of a value. Raises ModelError if it has none, or is not what it was when it was made."""
        number = self._numbers.get(id(tensor))
        if number is None:
            raise ModelError(
                f"at {place} the model uses a tensor that was made out of sight (inside torch.vmap or a library, say); "
                "move that into a module of its own"
            )
        made = self.infos[number]
        if seen.version != self._versions[number]:
            raise ModelError(
                f"at {place} the model uses a value, made by {made.place}, that was changed in place through a view; "
                "change values by their own name, or not in place"
            )
        if seen.gradient != made.gradient:
            raise ModelError(
                f"at {place} the model uses a value, made by {made.place}, whose gradient is computed in a way of its "
                "own (torch.autograd.Function); call that inside a module"
            )
        return number

    def new(self, tensor: Tensor, call: int | None, place: str) -> int:
        """A number for a value that was made or changed."""
        number = len(self.infos)
        self.infos.append(ValueInfo((tensor.shape,), tensor.dtype, tensor.requires_grad, call, place))
        self._numbers[id(tensor)] = number
        self._versions.append(tensor._version)
        self._kept.append(tensor)
        return number


class _StandIns:
    """A copy of a model whose tensors have shapes and no values; ``names`` are those of its tensors, by id."""

    def __init__(self, model: nn.Module, device: str) -> None:
        memo: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        for name, parameter in model.named_parameters():
            made = nn.Parameter(_like(parameter, device), requires_grad=parameter.requires_grad)
            memo[id(parameter)], self.names[id(made)] = made, name
        for name, buffer in model.named_buffers():
            memo[id(buffer)] = _like(buffer, device)
            self.names[id(memo[id(buffer)])] = name
        self.model = copy.deepcopy(model, memo)
        for part in self.model.modules():
            config: Any = getattr(part, "config", None)
            if hasattr(config, "use_cache"):
                config.use_cache = False  # transformers' caches are for generating text, and pass from block to block


def _like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


class _Seen(NamedTuple):
    """A tensor's state when a call received it."""

    version: int
    gradient: bool


def _seen(tensor: Tensor) -> _Seen:
    return _Seen(tensor._version, tensor.requires_grad)


class _Begun:
    """A call that is about to be made."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> None:
        self.args, self.kwargs, self.place = args, kwargs, place
        self.tensors = [(tensor, _seen(tensor)) for tensor in tensors_in((args, kwargs))]
        self.recorded = torch.is_grad_enabled()


class _Mode(TorchFunctionMode):
    """Shows every call of torch to a run, but none from inside a unit, which is one call itself."""

    def __init__(self, run: _Run) -> None:
        super().__init__()
        self._run = run
        self._inside: list[_Begun] = []

    def watch(self, module: nn.Module, name: str) -> None:
        """Treat a module as a unit."""

        def enter(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside.append(_Begun(args, kwargs, f"{name or 'the model'} ({type(part).__name__})"))

        def leave(part: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            begun = self._inside.pop()
            if not self._inside:
                self._run.note(name, begun, result)

        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let torch do it, and note it."""
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _READS_VALUES:
            truths = [self._run.truth(tensor) for tensor in tensors_in(args)]
            if all(truth is not None for truth in truths):
                with unset_fake_temporarily():
                    return func(*truths, *args[len(truths) :], **kwargs)
            raise ModelError(
                f"at {_caller()} the model looks at a tensor's values ({func.__name__}) outside its layers; what it "
                "does next may differ from batch to batch: move that into a module of its own"
            )
        begun = _Begun(args, kwargs, _caller())
        result = func(*args, **kwargs)
        self._run.note(func, begun, result)
        return result


_OUT_OF_SIGHT = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def _caller() -> str:
    """File and line of the model's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OUT_OF_SIGHT):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _place(error: Exception) -> str:
    """File and line of the model's code that raised it."""
    found = "an unknown place"
    for frame, line in walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(_OUT_OF_SIGHT):
            found = f"{frame.f_code.co_filename}:{line}"
    return found
