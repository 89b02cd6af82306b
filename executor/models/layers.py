"""A torch model as a list of layers, the loss last.

A layer is a module that turns what reaches it, one tensor or several, into what passes on, samples first; the loss
layer turns (logits, labels) into a scalar. :func:`decompose` finds the layers without changing the model, whose own
modules they call: an ``nn.Sequential`` has a layer per child, and of any other model the forward is written down
(``transcript.py``) and cut between its blocks (``blocks.py``, ``cutting.py``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.rnn import RNNBase

from ..errors import ModelError
from .blocks import is_plain_sequential, units
from .cutting import Piece, cut
from .inputs import Inputs
from .losses import Items, LossFunction, added, as_summed
from .program import ProgramLayer
from .transcript import transcribe

LOSS_PREFIX = "loss_fn"
"""Where buffers of a loss module (class weights, say) appear among qualified names."""


class NamedParameter(NamedTuple):
    """A parameter, and its name in the user's model (of a shared one, the first name)."""

    qualified: str
    tensor: nn.Parameter


class NamedBuffer(NamedTuple):
    """A buffer, and its name in the user's model."""

    qualified: str
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class LayerSpec:
    """One layer: ``module(*x)`` returns a tensor or a tuple of tensors; the loss layer's is ``module(logits, labels)``.

    ``input_gradients``: for each tensor of x, whether it gets a gradient (if its dtype has one). ``parameters`` and
    ``buffers`` are keyed by their name inside ``module``, each tensor once. ``random``: the layer holds dropout or the
    like, in training mode. ``changes_buffers``: its forward writes its buffers (BatchNorm).
    """

    name: str
    kind: str
    module: nn.Module
    parameters: Mapping[str, NamedParameter]
    buffers: Mapping[str, NamedBuffer]
    random: bool
    changes_buffers: bool
    input_gradients: tuple[bool, ...] = (True,)

    @cached_property
    def trainable(self) -> Mapping[str, NamedParameter]:
        """The parameters that get a gradient (``requires_grad``)."""
        return {local: named for local, named in self.parameters.items() if named.tensor.requires_grad}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters, shared ones included."""
        return sum(named.tensor.nbytes for named in self.parameters.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients of all trainable parameters, shared ones included."""
        return sum(named.tensor.nbytes for named in self.trainable.values())

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(named.tensor.nbytes for named in self.buffers.values())

    @property
    def cut_sensitive(self) -> bool:
        """Whether the result depends on chance, or on which samples share a microbatch (batch statistics)."""
        return self.random or self.changes_buffers or any(_mixes_samples(part) for part in self.module.modules())

    def skeleton(self) -> nn.Module:
        """A copy of the module whose parameters and buffers have shapes but no memory (device ``meta``).

        Call it with ``torch.func.functional_call``. One module must not be called from two threads, as binding
        replaces its attributes for the time of the call: each device takes a skeleton of its own.
        """
        memo: dict[int, Any] = {}
        for named in self.parameters.values():
            shape_only = torch.empty_like(named.tensor, device="meta")
            memo[id(named.tensor)] = nn.Parameter(shape_only, requires_grad=named.tensor.requires_grad)
        for named_buffer in self.buffers.values():
            memo[id(named_buffer.tensor)] = torch.empty_like(named_buffer.tensor, device="meta")
        return copy.deepcopy(self.module, memo)


def takes_gradient(layer: LayerSpec, x: Sequence[Tensor]) -> list[Tensor]:
    """Those of the tensors that reach a layer that get a gradient there."""
    of = zip(x, layer.input_gradients, strict=True)
    return [tensor for tensor, wanted in of if wanted and (tensor.is_floating_point() or tensor.is_complex())]


@dataclass(frozen=True, eq=False)
class TiedGroup:
    """A parameter that several layers use. The first of ``layers`` owns it: its update changes it."""

    name: str
    parameter: nn.Parameter
    layers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class LayerModel:
    """A model as layers; the last one is the loss. ``tied`` groups are named after their parameter in the model.
    Of a loss that is a sum over items, ``items`` counts them."""

    model: nn.Module
    loss_fn: LossFunction
    layers: tuple[LayerSpec, ...]
    tied: tuple[TiedGroup, ...] = field(default=())
    items: Items | None = None

    def owned(self, layer: int) -> Mapping[str, NamedParameter]:
        """The trainable parameters that this layer's update changes: each belongs to the first layer that uses it."""
        borrowed = {group.name for group in self.tied if group.layers[0] != layer}
        return {local: p for local, p in self.layers[layer].trainable.items() if p.qualified not in borrowed}

    def __len__(self) -> int:
        return len(self.layers)


class _Loss(nn.Module):
    """The loss function as a module, so that every layer is one. Holds a loss module under :data:`LOSS_PREFIX`. Of a
    loss over items it is the sum."""

    def __init__(self, loss_fn: LossFunction) -> None:
        super().__init__()
        summed = as_summed(loss_fn)
        self._sums = summed is not None
        setattr(self, LOSS_PREFIX, loss_fn if summed is None else summed.total)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar."""
        loss: Tensor = getattr(self, LOSS_PREFIX)(logits, labels)
        return added(loss) if self._sums else loss


def decompose(model: nn.Module, loss_fn: LossFunction, inputs: Inputs | None = None) -> LayerModel:
    """Split ``model`` into layers and append the loss.

    ``inputs`` are some batch's, of which only shapes and dtypes count; an ``nn.Sequential`` needs none. ``random`` and
    ``changes_buffers`` are judged by each module's current mode (train or eval). The model is not changed, and shares
    its modules and parameters with the result.

    Raises ModelError, with the place, for a model that cannot be cut; if a trained parameter or a hook of the model
    lies outside the layers; if the loss has parameters; if layers share a buffer that a forward changes.
    """
    summed = as_summed(loss_fn)
    alone = loss_fn if summed is None else summed.total
    if isinstance(alone, nn.Module) and any(True for _ in alone.parameters()):
        raise ModelError(
            f"the loss {_class_name(alone)} has parameters; make them part of the model, as its last layer"
        )
    _check_checkpointing(model)
    pieces = [*_pieces(model, inputs), Piece("loss", "loss", _Loss(loss_fn), (True,))]
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    layers = tuple(_spec(names, piece) for piece in pieces)
    _check_accounted(model, layers)
    _check_hooks(model, layers)
    _check_buffers(layers)
    return LayerModel(model, loss_fn, layers, _tied(layers), None if summed is None else summed.items)


def _pieces(model: nn.Module, inputs: Inputs | None) -> list[Piece]:
    if is_plain_sequential(model):
        # Not named_children(), which leaves out a module's second place.
        children = [(name, child) for name, child in model._modules.items() if child is not None]
        if not children:
            raise ModelError("the nn.Sequential is empty; give it at least one layer")
        return [Piece(name, type(child).__name__, child, (True,)) for name, child in children]
    if inputs is None:
        raise ModelError(f"{_class_name(model)} is no nn.Sequential; to cut it into layers takes a batch of its inputs")
    parts = units(model)
    return cut(model, parts, transcribe(model, parts, inputs))


def _class_name(module: object) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _spec(names: Mapping[int, str], piece: Piece) -> LayerSpec:
    """``names`` are those of the model's tensors, by id."""
    module = piece.module
    parameters = {
        local: NamedParameter(names.get(id(parameter), local), parameter)
        for local, parameter in module.named_parameters()
    }
    buffers = {local: NamedBuffer(names.get(id(buffer), local), buffer) for local, buffer in module.named_buffers()}
    return LayerSpec(
        name=piece.name,
        kind=piece.kind,
        module=module,
        parameters=parameters,
        buffers=buffers,
        random=any(_is_random(part) for part in module.modules()),
        changes_buffers=any(_changes_buffers(part) for part in module.modules()),
        input_gradients=piece.input_gradients,
    )


def _is_random(part: nn.Module) -> bool:
    """True if the module draws random numbers in its present mode, as far as its class tells."""
    if isinstance(part, ProgramLayer):
        return any(call.draws for call in part.calls)
    if not part.training:
        return False
    match part:
        case _DropoutNd():
            return part.p > 0
        case nn.MultiheadAttention() | RNNBase():
            return part.dropout > 0
        case nn.RReLU() | nn.FractionalMaxPool2d() | nn.FractionalMaxPool3d():
            return True
        case _:
            return False


def _changes_buffers(part: nn.Module) -> bool:
    return part.training and isinstance(part, _NormBase) and part.track_running_stats


def _mixes_samples(part: nn.Module) -> bool:
    return isinstance(part, _BatchNorm) and (part.training or part.running_mean is None)


def _tied(layers: Sequence[LayerSpec]) -> tuple[TiedGroup, ...]:
    users: dict[str, list[int]] = {}
    parameters: dict[str, nn.Parameter] = {}
    for index, layer in enumerate(layers):
        for named in layer.parameters.values():
            users.setdefault(named.qualified, []).append(index)
            parameters[named.qualified] = named.tensor
    return tuple(
        TiedGroup(name, parameters[name], tuple(members)) for name, members in users.items() if len(members) > 1
    )


def _check_checkpointing(model: nn.Module) -> None:
    if any(getattr(part, "gradient_checkpointing", False) for part in model.modules()):
        raise ModelError(
            f"{_class_name(model)}: gradient checkpointing is on; switch it off, as schedules recompute by themselves"
        )


def _check_accounted(model: nn.Module, layers: Sequence[LayerSpec]) -> None:
    """Every trained parameter of the model lies in some layer."""
    held = {id(named.tensor) for layer in layers for named in layer.parameters.values()}
    missing = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in held]
    if missing:
        raise ModelError(
            f"{_class_name(model)}: parameters outside its layers: {', '.join(missing[:5])}"
            f"{f' and {len(missing) - 5} more' if len(missing) > 5 else ''}; nothing that reaches the loss uses them: "
            "remove them, or freeze them (requires_grad_(False))"
        )


def _check_hooks(model: nn.Module, layers: Sequence[LayerSpec]) -> None:
    """No module above the layers has forward or backward hooks: nobody calls it, so they would be skipped."""
    called = {id(part) for layer in layers for part in layer.module.modules()}
    for name, module in model.named_modules():
        if id(module) in called:
            continue
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
            raise ModelError(
                f"{_class_name(model)}: {name or 'the model itself'} has hooks, which would not run, as its layers are "
                "called one by one; attach them to modules inside the layers"
            )


def _check_buffers(layers: Sequence[LayerSpec]) -> None:
    """A buffer that a forward changes belongs to one layer: with two, the order of their forwards would count."""
    user: dict[int, LayerSpec] = {}
    for layer in layers:
        for named in layer.buffers.values():
            other = user.setdefault(id(named.tensor), layer)
            if other is not layer and (other.changes_buffers or layer.changes_buffers):
                raise ModelError(
                    f"layers {other.name} and {layer.name} share the buffer {named.qualified}, which their forward "
                    "changes; give each a buffer of its own"
                )
