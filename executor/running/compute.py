"""The mathematics of forward and backward tasks on one GPU.

Each GPU has a skeleton of every layer's module, without memory. For a call the layer's tensors on the GPU are bound to
it, and unbound afterwards. A graph of autograd lives only inside one backward task, while all that it saved of the
GPU's buffers is held there; or it is a :class:`~executor.running.recording.Recording`, which holds no memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from ..errors import ModelError
from ..models.layers import LayerModel, LayerSpec
from .recording import Memory, Recording, SavedTensors, add_gradients


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
        self._layers = [_Skeleton(layer) for layer in model.layers]

    def forward(
        self,
        layers: range,
        inputs: Sequence[Tensor],
        tensors: Mapping[int, LayerTensors],
        chance: Chance,
        emit: Callable[[int, Tensor], None],
    ) -> None:
        """Run layers without recording. ``emit(l, x)`` is called with every x(l) that comes out, the loss included.

        ``inputs`` are x of the first layer and, if the last one is the loss, the labels.
        """
        with torch.no_grad(), untouched(chance.generator):
            x = self._own_input(layers[0], inputs[0])
            for layer in layers:
                x = self._call(layer, (x, *self._labels(layer, inputs)), tensors, chance, keep_buffers=True)
                emit(layer + 1, x)

    def record(
        self,
        layers: range,
        inputs: Sequence[Tensor],
        tensors: Mapping[int, LayerTensors],
        chance: Chance,
        emit: Callable[[int, Tensor], None],
        memory: Memory,
    ) -> Recording:
        """Run layers with recording, as :meth:`forward` does without; what autograd saves goes into ``memory``."""
        x = _leaf(inputs[0])
        saved = SavedTensors(memory)
        with torch.enable_grad(), saved.hooks(), untouched(chance.generator):
            y = self._own_input(layers[0], x)
            for layer in layers:
                y = self._call(layer, (y, *self._labels(layer, inputs)), tensors, chance, keep_buffers=True)
                emit(layer + 1, y.detach())
        leaves = {(layer, name): weight for layer in layers for name, weight in tensors[layer].weights.items()}
        return Recording(saved, x, y, leaves)

    def saves_output(self, layer: int, inputs: Sequence[Tensor], tensors: LayerTensors, chance: Chance) -> bool:
        """Whether autograd keeps a layer's output for its backward."""
        kept: list[Tensor] = []

        def note(tensor: Tensor) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor), untouched(chance.generator):
            x = self._own_input(layer, _leaf(inputs[0]))
            y = self._call(layer, (x, *self._labels(layer, inputs)), {layer: tensors}, chance, keep_buffers=False)
        return any(tensor.untyped_storage()._cdata == y.untyped_storage()._cdata for tensor in kept)

    def backward(
        self,
        layers: range,
        inputs: Sequence[Tensor],
        output_gradient: Tensor | float,
        tensors: Mapping[int, LayerTensors],
        chance: Chance,
        *,
        first_time: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run layers with recording, and back: adds to the layers' gradients.

        ``output_gradient`` is that of the last layer's output; of the loss, the factor that it counts with. Only when
        it is the ``first_time`` that these samples pass the layers do module buffers change. Returns the gradient of
        x (None if x takes no part, or is of a dtype without gradients) and the loss (None if the last layer is not).
        """
        x = _leaf(inputs[0])
        with torch.enable_grad(), untouched(chance.generator):
            y = self._own_input(layers[0], x)
            for layer in layers:
                y = self._call(layer, (y, *self._labels(layer, inputs)), tensors, chance, keep_buffers=first_time)
        loss = None
        if not isinstance(output_gradient, Tensor):
            loss = y.detach()
            output_gradient = torch.full_like(loss, output_gradient)
        if not y.requires_grad:
            return None, loss
        # The output must not outlive its use in backward, so nothing here may hold it.
        edge = get_gradient_edge(y)
        del y
        leaves = [
            (tensors[layer].weights[name], gradient)
            for layer in layers
            for name, gradient in tensors[layer].gradients.items()
        ]
        add_gradients(edge, output_gradient, leaves)
        return x.grad, loss

    def _labels(self, layer: int, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        return inputs[1:] if layer == len(self._layers) - 1 else ()

    def _own_input(self, layer: int, x: Tensor) -> Tensor:
        """A layer that works in place must not change what came from another task."""
        return x.clone() if self._layers[layer].works_in_place else x

    def _call(
        self,
        layer: int,
        inputs: Sequence[Tensor],
        tensors: Mapping[int, LayerTensors],
        chance: Chance,
        *,
        keep_buffers: bool,
    ) -> Tensor:
        chance.reseed(layer)
        return self._layers[layer].call(inputs, tensors[layer], keep_buffers)


class _Skeleton:
    """A layer's module without memory, and the places in it to which tensors are bound."""

    def __init__(self, layer: LayerSpec) -> None:
        self._layer = layer
        self._module = layer.skeleton()
        self._unbound_weights = dict[str, Tensor](self._module.named_parameters())
        self._unbound_buffers = dict[str, Tensor](self._module.named_buffers())
        self._weights = _places(self._module, "_parameters", self._unbound_weights)
        self._buffers = _places(self._module, "_buffers", self._unbound_buffers)
        self.works_in_place = any(getattr(part, "inplace", False) for part in self._module.modules())

    def call(self, inputs: Sequence[Tensor], tensors: LayerTensors, keep_buffers: bool) -> Tensor:
        """Run the module on these tensors. With ``keep_buffers`` what it writes to its buffers stays.

        Raises ModelError if it changes buffers though its class is not known to, or returns anything but a tensor.
        """
        changes = self._layer.changes_buffers
        buffers = tensors.buffers
        if changes and not keep_buffers:
            buffers = {name: buffer.clone() for name, buffer in buffers.items()}
        versions = {name: (id(buffer), buffer._version) for name, buffer in buffers.items()}
        try:
            _bind(self._weights, tensors.weights)
            _bind(self._buffers, buffers)
            output = self._module(*inputs)
            after = {name: held[key] for name, ((held, key), *_) in self._buffers.items()}
        finally:
            _bind(self._weights, self._unbound_weights)
            _bind(self._buffers, self._unbound_buffers)
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
        if not isinstance(output, Tensor):
            raise ModelError(f"layer {self._layer.name} returned {type(output).__name__}; it must return one tensor")
        return output


def _leaf(x: Tensor) -> Tensor:
    """A leaf of autograd with the same memory."""
    leaf = x.data
    return leaf.requires_grad_() if leaf.is_floating_point() or leaf.is_complex() else leaf


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
