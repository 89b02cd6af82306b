"""The mathematics of forward and backward tasks on one GPU.

Each GPU has a skeleton of every layer's module, without memory. For a call the layer's tensors on the GPU are bound to
it, and unbound afterwards. A graph of autograd lives only inside one backward task, while all that it saved of the
GPU's buffers is held there; or in the two tasks of a backward in two parts (``parts.py``); or it is a
:class:`~executor.running.recording.Recording`, which holds no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..errors import ModelError
from ..models.layers import LayerModel, LayerSpec, takes_gradient
from .parts import WeightPart, input_part
from .recording import Recording, SavedTensors, add_gradients, edges_of

Tensors = tuple[Tensor, ...]
"""What passes from one layer to the next."""


@dataclass(frozen=True)
class LayerTensors:
    """A layer's tensors on a GPU, by their name in the layer's module. ``weights`` that are trained are leaves of
    autograd; ``gradients`` are what backward adds to."""

    weights: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class Chance:
    """Where random layers draw from: reseeded for every layer by (seed, step, layer, first sample of the microbatch),
    so that neither packs, GPUs, order nor recompute change a mask."""

    generator: torch.Generator
    seed: int
    step: int
    first_sample: int

    def reseed(self, layer: int) -> None:
        """To be called before the layer runs."""
        self.generator.manual_seed(layer_seed(self.seed, self.step, layer, self.first_sample))


def layer_seed(seed: int, step: int, layer: int, first_sample: int) -> int:
    """The seed of a layer's forward (63 bits)."""
    text = f"{seed} {step} {layer} {first_sample}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest()) >> 1


@contextmanager
def untouched(generator: torch.Generator) -> Iterator[None]:
    """Put the generator's state back afterwards."""
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


class GpuModel:
    """The layers of a model as one GPU runs them. One thread at a time."""

    def __init__(self, model: LayerModel) -> None:
        self._specs = model.layers
        self._layers = [_Skeleton(layer) for layer in model.layers]
        self._checked: set[range] = set()  # of recordings

    def forward(
        self,
        layers: range,
        inputs: Sequence[Tensor],
        tensors: Mapping[int, LayerTensors],
        chance: Chance,
        emit: Callable[[int, Tensors], None],
        *,
        first_time: bool = True,
    ) -> None:
        """Run layers without recording. ``emit(l, x)`` is called with every x(l) that comes out, the loss included.

        ``inputs`` are the tensors of x of the first layer and, if the last one is the loss, the labels. Only when it is
        the ``first_time`` that these samples pass the layers do module buffers change.
        """
        with torch.no_grad(), untouched(chance.generator):
            x = self._own_input(layers[0], self._values(layers[0], inputs))
            for layer in layers:
                x = self._call(layer, (*x, *self._labels(layer, inputs)), tensors, chance, keep_buffers=first_time)
                emit(layer + 1, x)

    def record(
        self,
        layers: range,
        inputs: Sequence[Tensor],
        tensors: Mapping[int, LayerTensors],
        chance: Chance,
        emit: Callable[[int, Tensors], None],
        saved: SavedTensors,
    ) -> Recording:
        """Run layers with recording, as :meth:`forward` does without; what autograd saves goes into ``saved``."""
        x, wanted = self._leaves(layers[0], inputs)
        with torch.enable_grad(), saved.hooks(), untouched(chance.generator):
            y = self._own_input(layers[0], x)
            for layer in layers:
                y = self._call(layer, (*y, *self._labels(layer, inputs)), tensors, chance, keep_buffers=True)
                emit(layer + 1, tuple(value.detach() for value in y))
        leaves = {(layer, name): weight for layer in layers for name, weight in tensors[layer].weights.items()}
        recording = Recording(saved, wanted, self.taking(layers[-1], y), leaves)
        if layers not in self._checked:  # what its functions keep does not change from one microbatch to the next
            recording.check()
            self._checked.add(layers)
        return recording

    def saves_output(self, layer: int, inputs: Sequence[Tensor], tensors: LayerTensors, chance: Chance) -> bool:
        """Whether autograd keeps a layer's output for its backward."""
        kept: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor), untouched(chance.generator):
            given = self._leaves(layer, inputs)[0]
            x = self._own_input(layer, given)
            y = self._call(layer, (*x, *self._labels(layer, inputs)), {layer: tensors}, chance, keep_buffers=False)
        made = {value.untyped_storage()._cdata for value in y} - {value.untyped_storage()._cdata for value in given}
        return any(tensor.untyped_storage()._cdata in made for tensor in kept)

    def backward(
        self,
        layers: range,
        inputs: Sequence[Tensor],
        output_gradient: Sequence[Tensor] | float,
        tensors: Mapping[int, LayerTensors],
        chance: Chance,
        *,
        first_time: bool,
    ) -> tuple[list[Tensor | None], Tensor | None]:
        """Run layers with recording, and back: adds to the layers' gradients.

        ``output_gradient`` are those of what the last layer passes on (of all that takes one there); of the loss, the
        factor that it counts with. Only when it is the ``first_time`` that these samples pass the layers do module
        buffers change. Returns the gradients of x (of all that takes one; None for what had no part in the output) and
        the loss (None if the last layer is not).
        """
        x, wanted = self._leaves(layers[0], inputs)
        with torch.enable_grad(), untouched(chance.generator):
            y = self._own_input(layers[0], x)
            for layer in layers:
                y = self._call(layer, (*y, *self._labels(layer, inputs)), tensors, chance, keep_buffers=first_time)
        loss, gradients_of_y = _begin(y, output_gradient)
        # The output must not outlive its use in backward, so nothing here may hold it.
        edges = edges_of(self.taking(layers[-1], y))
        del y
        leaves = [
            (tensors[layer].weights[name], gradient)
            for layer in layers
            for name, gradient in tensors[layer].gradients.items()
        ]
        add_gradients(edges, gradients_of_y, leaves)
        return [value.grad for value in wanted], loss

    def taking(self, layer: int, y: Tensors) -> Sequence[Tensor]:
        """What takes a gradient of all that a layer passes on."""
        return y if layer == len(self._specs) - 1 else takes_gradient(self._specs[layer + 1], y)

    def _leaves(self, first: int, inputs: Sequence[Tensor]) -> tuple[Tensors, list[Tensor]]:
        """X of the first layer as leaves of autograd with the same memory, and those of them that get a gradient."""
        x = tuple(value.data for value in self._values(first, inputs))
        wanted = takes_gradient(self._specs[first], x)
        for value in wanted:
            value.requires_grad_()
        return x, wanted

    def _values(self, first: int, inputs: Sequence[Tensor]) -> Tensors:
        return tuple(inputs[: len(self._specs[first].input_gradients)])

    def backward_input(
        self,
        layers: range,
        inputs: Sequence[Tensor],
        output_gradient: Sequence[Tensor] | float,
        tensors: Mapping[int, LayerTensors],
        chance: Chance,
        *,
        first_time: bool,
    ) -> tuple[list[Tensor | None], Tensor | None, WeightPart]:
        """The first part of :meth:`backward`, and the second one, which adds to the layers' gradients."""
        x, wanted = self._leaves(layers[0], inputs)
        passed: list[tuple[int, list[Tensor], Sequence[Tensor]]] = []
        with torch.enable_grad(), untouched(chance.generator):
            for layer in layers:
                args = *self._own_input(layer, x), *self._labels(layer, inputs)
                y = self._call_apart(layer, args, tensors[layer], chance, keep_buffers=first_time)
                passed.append((layer, wanted, self.taking(layer, y)))
                if layer != layers[-1]:
                    x, wanted = self._leaves(layer + 1, y)  # cuts the graph
        loss, gradients_of_y = _begin(y, output_gradient)
        gradients: list[Tensor | None] = list(gradients_of_y)
        del x, y
        weight_part = WeightPart()
        while passed:
            layer, wanted, taking = passed.pop()
            edges = edges_of(taking)
            del taking
            trained = {(layer, name): each for name, each in tensors[layer].weights.items() if each.requires_grad}
            gradients, rest = input_part(edges, wanted, gradients, trained)
            weight_part.extend(rest)
        return gradients, loss, weight_part

    def _labels(self, layer: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return inputs[-1:] if layer == len(self._layers) - 1 else ()

    def _own_input(self, layer: int, x: Tensors) -> Tensors:
        """A layer that works in place must not change what came from another task."""
        return tuple(value.clone() for value in x) if self._layers[layer].works_in_place else x

    def _call(
        self,
        layer: int,
        inputs: Sequence[Tensor],
        tensors: Mapping[int, LayerTensors],
        chance: Chance,
        *,
        keep_buffers: bool,
    ) -> Tensors:
        chance.reseed(layer)
        output = self._layers[layer].call(inputs, tensors[layer], keep_buffers)
        behind = layer + 1
        expected = len(self._specs[behind].input_gradients) if behind < len(self._specs) else 1
        if len(output) != expected:
            raise ModelError(
                f"layer {self._specs[layer].name} returned {len(output)} tensors; it must return "
                f"{'one tensor' if expected == 1 else f'{expected} tensors'}"
            )
        return output

    def _call_apart(
        self, layer: int, inputs: Sequence[Tensor], tensors: LayerTensors, chance: Chance, *, keep_buffers: bool
    ) -> Tensors:
        """As :meth:`_call`, for a graph that lives on when other microbatches change the layer's buffers."""
        if not self._layers[layer].changes_buffers:
            return self._call(layer, inputs, {layer: tensors}, chance, keep_buffers=keep_buffers)
        copies = {name: buffer.clone() for name, buffer in tensors.buffers.items()}
        output = self._call(layer, inputs, {layer: replace(tensors, buffers=copies)}, chance, keep_buffers=True)
        if keep_buffers:
            for name, buffer in copies.items():
                tensors.buffers[name].copy_(buffer)
        return output


class _Skeleton:
    """A layer's module without memory, and the places in it to which tensors are bound."""

    def __init__(self, layer: LayerSpec) -> None:
        self._layer = layer
        self.changes_buffers = layer.changes_buffers
        self._module = layer.skeleton()
        self._unbound_weights = dict[str, Tensor](self._module.named_parameters())
        self._unbound_buffers = dict[str, Tensor](self._module.named_buffers())
        self._weights = _places(self._module, "_parameters", self._unbound_weights)
        self._buffers = _places(self._module, "_buffers", self._unbound_buffers)
        self.works_in_place = any(getattr(part, "inplace", False) for part in self._module.modules())

    def call(self, inputs: Sequence[Tensor], tensors: LayerTensors, keep_buffers: bool) -> Tensors:
        """Run the module on these tensors. With ``keep_buffers`` what it writes to its buffers stays.

        Raises ModelError if it changes buffers though its class is not known to, or returns anything but tensors.
        """
        changes = self._layer.changes_buffers
        buffers = tensors.buffers
        before = {name: buffer.clone() for name, buffer in buffers.items()} if changes and not keep_buffers else {}
        versions = {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}
        try:
            _bind(self._weights, tensors.weights)
            _bind(self._buffers, buffers)
            output = self._module(*inputs)
            after = {name: held[key] for name, ((held, key), *_) in self._buffers.items()}
        finally:
            _bind(self._weights, self._unbound_weights)
            _bind(self._buffers, self._unbound_buffers)
            for name, buffer in before.items():
                buffers[name].data.copy_(buffer)  # unseen by autograd, which saved them but does not use them
        if changes and keep_buffers:
            with torch.no_grad():
                for name, buffer in after.items():
                    if buffer is not tensors.buffers[name]:
                        tensors.buffers[name].copy_(buffer)
        if not changes and versions != {name: (id(buffer), buffer._version) for name, buffer in after.items()}:
            raise ModelError(
                f"layer {self._layer.name} ({self._layer.kind}) changes its buffers, which only normalisation layers "
                "of torch in training mode may; a repeated forward would change them twice"
            )
        passed = output if isinstance(output, tuple) else (output,)
        if not all(isinstance(value, Tensor) for value in passed):
            raise ModelError(f"layer {self._layer.name} returned {type(output).__name__}; it must return a tensor")
        return passed


_Place = tuple[dict[str, Tensor], str]
"""A dictionary of a module, and the key in it."""


def _places(module: nn.Module, attribute: str, tensors: Mapping[str, Tensor]) -> dict[str, list[_Place]]:
    """All places of each tensor (a shared one has several), found by identity."""
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    places: dict[str, list[_Place]] = {name: [] for name in tensors}
    for part in module.modules():
        held: dict[str, Tensor] = getattr(part, attribute)
        for key, tensor in held.items():
            if tensor is not None:  # a parameter or buffer that the module does without
                places[name_of[id(tensor)]].append((held, key))
    return places


def _bind(places: Mapping[str, Sequence[_Place]], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        for held, key in places[name]:
            held[key] = tensor


def _begin(y: Tensors, output_gradient: Sequence[Tensor] | float) -> tuple[Tensor | None, Sequence[Tensor]]:
    """The loss, if that is what y is, and the gradient that backward begins with: of the loss, its factor."""
    if not isinstance(output_gradient, int | float):
        return None, output_gradient
    (loss,) = (value.detach() for value in y)
    return loss, [torch.full_like(loss, output_gradient)]
