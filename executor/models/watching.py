"""A model's forward watched while it runs on stand-ins, which have shapes and no values."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ..errors import ModelError
from .blocks import Unit
from .inputs import Inputs, call_model, logits_of
from .notes import Begun, Notes, State
from .program import tensors_in
from .structure import structure

_READS_VALUES = frozenset(
    ("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "item", "tolist", "numpy",
     "__array__", "__format__", "is_nonzero", "equal", "allclose", "nonzero", "argwhere", "masked_select")
)  # fmt: skip

_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a property to mypy, of which torch shows the getter


def watch(
    model: nn.Module,
    units: Sequence[Unit],
    inputs: Inputs,
    samples: Sequence[int],
    mode: AbstractContextManager[Any],
    device: str,
) -> list[Notes]:
    """Run the model on stand-ins that ``mode`` makes on ``device``, once for each number of samples."""
    with mode, torch.enable_grad():
        stand_ins = _StandIns(model, device)
        watching = _Mode()
        for unit in {id(unit.module): unit for unit in units}.values():
            watching.add(stand_ins.model.get_submodule(unit.name), unit)
        return [_run(model, stand_ins, inputs, number, watching, device) for number in samples]


def _run(model: nn.Module, stand_ins: _StandIns, inputs: Inputs, samples: int, watching: _Mode, device: str) -> Notes:
    notes = watching.notes = Notes(model, stand_ins.names, stand_ins.constants)
    given = inputs.map(lambda tensor: torch.empty((samples, *tensor.shape[1:]), dtype=tensor.dtype, device=device))
    notes.inputs = tuple(notes.new(tensor, None, "the batch") for tensor in given.tensors)
    try:
        with watching:
            logits = logits_of(call_model(stand_ins.model, given))
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__qualname__} fails on inputs of shape {given.shapes} without values, at "
            f"{_place(error)}: {type(error).__name__}: {error}"
        ) from error
    notes.output = notes.number(logits, State.of(logits), "its output")
    notes.prune()
    return notes


class _StandIns:
    """A copy of a model whose tensors have shapes and no values; ``names`` are those of its tensors, by id.

    ``constants`` are tensors that the model holds as plain attributes.
    """

    def __init__(self, model: nn.Module, device: str) -> None:
        memo: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        self.constants: dict[str, Tensor] = {}
        for part in model.modules():
            for tensor in vars(part).values():
                if isinstance(tensor, Tensor) and id(tensor) not in memo:
                    name = f"constant {len(self.constants)}"
                    memo[id(tensor)] = _like(tensor, device)
                    self.names[id(memo[id(tensor)])], self.constants[name] = name, tensor.detach()
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


class _Mode(TorchFunctionMode):
    """Notes every call of torch, but none from inside a unit, which is one call itself."""

    notes: Notes

    def __init__(self) -> None:
        super().__init__()
        self._inside: list[Begun] = []
        self._known: dict[Hashable, _Shape] = {}

    def add(self, module: nn.Module, unit: Unit) -> None:
        """Treat a module, the copy of a unit's, as a unit."""
        name, kind, forward = unit.name, structure(unit.module), module.forward

        def enter(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside.append(Begun(args, kwargs))

        def run(*args: Any, **kwargs: Any) -> Any:
            """The forward, unless that of a unit of the same structure was run on the same shapes before."""
            shape = _shape_of((args, kwargs))
            if not all(isinstance(leaf, Hashable) for leaf in shape.leaves):
                return forward(*args, **kwargs)
            key = kind, tuple(shape.leaves), str(shape.spec)
            if key in self._known:
                return self._known[key].made()
            begun = self._inside[-1]
            result = forward(*args, **kwargs)
            if _is_new(result, begun):
                self._known[key] = _shape_of(result)
            return result

        def leave(part: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            begun = self._inside.pop()
            if not self._inside:
                self.notes.note(name, begun, result, f"{name or 'the model'} ({type(part).__name__})")

        module.forward = run
        module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
        module.register_forward_hook(leave)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let torch do it, and note it."""
        kwargs = kwargs or {}
        if self._inside:
            return func(*args, **kwargs)
        if func == _DATA:
            raise ModelError(
                f"at {_caller()} the model uses the .data of a tensor outside its layers, which hides changes; use "
                "detach(), or move that into a module of its own"
            )
        if getattr(func, "__name__", "") in _READS_VALUES:
            truths = [self.notes.truth(tensor) for tensor in tensors_in(args)]
            if all(truth is not None for truth in truths):
                with unset_fake_temporarily():
                    return func(*truths, *args[len(truths) :], **kwargs)
            raise ModelError(
                f"at {_caller()} the model looks at a tensor's values ({func.__name__}) outside its layers; what it "
                "does next may differ from batch to batch: move that into a module of its own"
            )
        begun = Begun(args, kwargs)
        result = func(*args, **kwargs)
        if tensors_in(result) or begun.changed():
            self.notes.note(func, begun, result, _caller())
        return result


class _Like(NamedTuple):
    """A tensor's form."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    gradient: bool

    def made(self) -> Tensor:
        """A tensor of this form, which is no leaf of autograd."""
        tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return tensor.requires_grad_().clone() if self.gradient else tensor


class _Shape(NamedTuple):
    """A structure of tensors and other values, the tensors without values."""

    leaves: list[Any]
    spec: TreeSpec

    def made(self) -> Any:
        """The structure with new tensors."""
        return tree_unflatten([leaf.made() if isinstance(leaf, _Like) else leaf for leaf in self.leaves], self.spec)


def _shape_of(values: Any) -> _Shape:
    leaves, spec = tree_flatten(values)
    forms = [_form_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return _Shape(forms, spec)


def _form_of(tensor: Tensor) -> _Like:
    return _Like(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


def _is_new(result: Any, begun: Begun) -> bool:
    """Whether nothing in a result is an argument, or a view of one, and no argument was changed."""
    given = {id(tensor) for tensor, _ in begun.tensors}
    out = tensors_in(result)
    return not begun.changed() and not any(id(tensor) in given or id(tensor._base) in given for tensor in out)


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
