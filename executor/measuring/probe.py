"""A first run of a model, layer by layer: what reaches each layer, which are alike, and whether all keep the rules.

The rules are those of every later run: dense tensors between layers, batch dimension first; a scalar loss; every
trained parameter takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from traces.errors import HarmonyError

from ..errors import ModelError
from ..models.layers import LayerModel, LayerSpec, takes_gradient
from ..running.compute import Chance, GpuModel, LayerTensors, Tensors
from .likeness import likeness

TensorsOf = Callable[[int], LayerTensors]
"""A layer's tensors on the device, by its index."""


@dataclass(frozen=True)
class Found:
    """What a first run found of layers that are alike.

    ``layers``: their indices. ``inputs``: x (of the loss, labels too) for a few samples. ``output``: what came out;
    ``gradients``: what of it takes a gradient. ``random``: another seed gave another output. ``saves_output``: their
    backward needs it.
    """

    layers: tuple[int, ...]
    inputs: Tensors
    output: Tensors
    gradients: Tensors
    random: bool
    is_loss: bool
    saves_output: bool

    def inputs_for(self, samples: int) -> tuple[Tensor, ...]:
        """Inputs for as many samples as wanted, the few repeated."""
        return tuple(_repeat(tensor, samples) for tensor in self.inputs)

    def output_gradient_for(self, samples: int) -> list[Tensor] | float:
        """Gradients in the shapes of the output; of a loss, 1."""
        return 1.0 if self.is_loss else [_repeat(torch.ones_like(value), samples) for value in self.gradients]


def _repeat(tensor: Tensor, samples: int) -> Tensor:
    return tensor[torch.arange(samples, device=tensor.device) % len(tensor)]


@contextmanager
def blamed(layer: LayerSpec, inputs: Sequence[Tensor]) -> Iterator[None]:
    """What the layer's code raises while it works on these inputs becomes a ModelError that names both."""
    try:
        yield
    except HarmonyError:
        raise
    except Exception as error:
        raise ModelError(
            f"layer {layer.name} ({layer.kind}) fails on an input of "
            f"{', '.join(f'shape {tuple(x.shape)} and {x.dtype}' for x in inputs[: len(layer.input_gradients)])}: "
            f"{type(error).__name__}: {error}"
        ) from error


def probe(
    model: LayerModel, inputs: Tensors, labels: Tensor, tensors_of: TensorsOf, generator: torch.Generator
) -> list[Found]:
    """Run a model on a small batch: of layers that are alike, the first one, forward (twice) and backward.

    Returns what was found, in order of first layers. Raises ModelError naming the layer that breaks a rule. On the meta
    device, what takes values to find is left: there a layer is random if it says so, and the loss is taken for a mean.
    """
    gpu, sums = GpuModel(model), model.items is not None
    found: dict[Hashable, Found] = {}
    x = inputs
    for index, layer in enumerate(model.layers):
        key = likeness(layer, x), _owned(model, index)
        if key in found:
            known = found[key]
            found[key] = replace(known, layers=(*known.layers, index))
        else:
            behind = model.layers[index + 1] if index < len(model) - 1 else None
            args = x if behind is not None else (*x, labels)
            found[key] = _First(gpu, index, layer, behind, args, tensors_of(index), generator, sums).run()
        x = found[key].output
    return list(found.values())


def _owned(model: LayerModel, layer: int) -> Hashable:
    """Which parameters the layer's update changes, and how many layers contribute to each."""
    users = {group.name: len(group.layers) for group in model.tied}
    return tuple((name, users.get(named.qualified, 1)) for name, named in model.owned(layer).items())


@dataclass(frozen=True)
class _First:
    """The first run of one layer."""

    gpu: GpuModel
    index: int
    layer: LayerSpec
    behind: LayerSpec | None  # None behind the loss
    args: Tensors
    tensors: LayerTensors
    generator: torch.Generator
    sums: bool  # whether the loss is a sum over items

    @property
    def _place(self) -> str:
        return f"layer {self.layer.name} ({self.layer.kind})"

    @property
    def _run(self) -> range:
        return range(self.index, self.index + 1)

    def run(self) -> Found:
        with blamed(self.layer, self.args):
            first, second = self._forward(self.args, seed=0), self._forward(self.args, seed=1)
            for value in first:
                self._check_output(value)
            random = self.layer.random if self._has_no_values else _differ(first, second)
            taking = tuple(takes_gradient(self.behind, first)) if self.behind is not None else first
            self._check_gradients(taking)
            if self._is_loss and not random and not self._has_no_values:
                self._check_mean(first[0])
            saves_output = self.gpu.saves_output(self.index, self.args, self.tensors, Chance(self.generator, 0, 0, 0))
        return Found((self.index,), self.args, first, taking, random, self._is_loss, saves_output)

    @property
    def _is_loss(self) -> bool:
        return self.behind is None

    @property
    def _has_no_values(self) -> bool:
        return self.args[0].is_meta

    def _forward(self, args: Tensors, seed: int) -> Tensors:
        outputs: list[Tensors] = []
        chance = Chance(self.generator, seed, 0, 0)
        self.gpu.forward(self._run, args, {self.index: self.tensors}, chance, lambda _, x: outputs.append(x))
        return outputs[0]

    def _check_mean(self, loss: Tensor) -> None:
        """A step weighs each microbatch's loss by its samples. A mean stays as it is when every sample comes twice, and
        a sum over items doubles."""
        (twice,) = self._forward(tuple(torch.cat((tensor, tensor)) for tensor in self.args), seed=0)
        once, twice = loss.double(), twice.double()
        expected = 2 * once if self.sums else once
        if not torch.isclose(expected, twice, rtol=0.05, atol=1e-6, equal_nan=True):
            raise ModelError(
                f"the loss of {len(self.args[0])} sample(s) is {once.item():.6g}, and of the same ones twice "
                f"{twice.item():.6g}; it must be the mean over the samples (such as reduction='mean')"
            )

    def _check_output(self, output: Tensor) -> None:
        shape, samples = tuple(output.shape), len(self.args[0])
        if output.layout is not torch.strided:
            raise ModelError(f"{self._place} returns a tensor of layout {output.layout}; it must be dense")
        if self._is_loss and shape:
            raise ModelError(f"the loss has shape {shape}; it must be a scalar, the mean over the samples")
        if not self._is_loss and (not shape or shape[0] != samples):
            raise ModelError(
                f"{self._place} makes shape {shape} of {samples} sample(s); the first dimension must be the samples, "
                "as microbatches are cut there"
            )

    def _check_gradients(self, output: Tensors) -> None:
        weights, trained = self.tensors.weights, list(self.tensors.gradients)
        reached: set[str] = set()
        hooks = [_note_gradient(weights[name], name, reached) for name in trained]
        gradient = 1.0 if self._is_loss else [torch.ones_like(value) for value in output]
        chance = Chance(self.generator, 0, 0, 0)
        tensors = {self.index: self.tensors}
        of_inputs, _ = self.gpu.backward(self._run, self.args, gradient, tensors, chance, first_time=False)
        for hook in hooks:
            hook()
        if self._is_loss and of_inputs == [None]:
            raise ModelError("the loss does not depend on the model's output: no gradient reaches it; do not detach it")
        unused = [self.layer.parameters[name].qualified for name in trained if name not in reached]
        if unused:
            raise ModelError(
                f"{self._place} does not use its parameter(s) {', '.join(unused[:5])}: no gradient reaches them; "
                "remove them, or freeze them (requires_grad_(False))"
            )


def _differ(first: Tensors, second: Tensors) -> bool:
    return not all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


def _note_gradient(weight: Tensor, name: str, reached: set[str]) -> Callable[[], None]:
    """Note when backward has added a gradient; returns what takes the note away."""
    handle = weight.register_post_accumulate_grad_hook(lambda _: reached.add(name))  # type: ignore[no-untyped-call]
    remove: Callable[[], None] = handle.remove
    return remove
