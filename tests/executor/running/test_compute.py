from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.errors import ModelError
from executor.models.layers import LayerModel
from executor.running.compute import Chance, GpuModel, LayerTensors, layer_seed, untouched
from tests.executor import made


class Bench:
    """A model's layers on the CPU, with gradients to add to."""

    def __init__(self, model: nn.Sequential, loss_fn: made.LossFunction = made.mse) -> None:
        self.model = model
        self.layers: LayerModel = made.split(model, loss_fn)
        self.gpu = GpuModel(self.layers)
        self.tensors = {
            index: LayerTensors(
                weights={
                    name: named.tensor.detach().clone().requires_grad_(named.tensor.requires_grad)
                    for name, named in layer.parameters.items()
                },
                buffers={name: named.tensor.clone() for name, named in layer.buffers.items()},
                gradients={name: torch.zeros_like(named.tensor) for name, named in layer.trainable.items()},
            )
            for index, layer in enumerate(self.layers.layers)
        }

    def forward(self, layers: range, *inputs: Tensor, first_sample: int = 0, step: int = 0) -> dict[int, Tensor]:
        out: dict[int, Tensor] = {}
        self.gpu.forward(
            layers, inputs, self.tensors, chance(step, first_sample), lambda at, x: out.update({at: only(x)})
        )
        return out

    def backward(
        self, layers: range, *inputs: Tensor, gradient: Tensor | float, first_time: bool = False
    ) -> tuple[Tensor | None, Tensor | None]:
        given = [gradient] if isinstance(gradient, Tensor) else gradient
        gradients, loss = self.gpu.backward(layers, inputs, given, self.tensors, chance(), first_time=first_time)
        return only(gradients or [None]), loss

    def gradient(self, layer: int, name: str) -> Tensor:
        return self.tensors[layer].gradients[name]


def only(values: Sequence[Any]) -> Any:
    (value,) = values
    return value


def chance(step: int = 0, first_sample: int = 0) -> Chance:
    return Chance(torch.default_generator, 5, step, first_sample)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_forward_emits_every_boundary_and_the_loss(x: Tensor) -> None:
    model = made.mlp((6, 4, 2))
    bench, target = Bench(model), torch.randn(3, 2, dtype=torch.float64)
    out = bench.forward(range(1, 5), model[0](x).detach(), target)
    assert sorted(out) == [2, 3, 4, 5]
    assert torch.equal(out[4], model(x))
    assert torch.equal(out[5], made.mse(model(x), target))
    assert not any(tensor.requires_grad for tensor in out.values())


def test_backward_of_the_loss_counts_with_its_share(x: Tensor) -> None:
    model = made.mlp((6, 4, 2))
    bench, target = Bench(model), torch.randn(3, 2, dtype=torch.float64)
    expected = made.mse(model(x), target)
    (0.25 * expected).backward()
    gradient, loss = bench.backward(range(5), x, target, gradient=0.25, first_time=True)
    assert loss is not None
    assert torch.equal(loss, expected.detach())
    for index in (0, 2):
        for name, parameter in model[index].named_parameters():
            assert torch.equal(bench.gradient(index, name), parameter.grad)
    assert gradient is not None


def test_packs_pass_gradients_on_and_accumulate(x: Tensor) -> None:
    model = made.mlp((6, 4, 2))
    bench, target = Bench(model), torch.randn(3, 2, dtype=torch.float64)
    middle = bench.forward(range(2), x)[2]
    for _ in range(2):
        passed, _ = bench.backward(range(2, 5), middle, target, gradient=1.0)
        assert passed is not None
        into, _ = bench.backward(range(2), x, gradient=passed)
    leaf = x.clone().requires_grad_()
    made.mse(model(leaf), target).backward()
    assert torch.equal(into, leaf.grad)
    assert torch.allclose(bench.gradient(0, "weight"), 2 * model[0].weight.grad, rtol=1e-14)
    assert torch.allclose(bench.gradient(2, "bias"), 2 * model[2].bias.grad, rtol=1e-14)


def test_gradients_are_added_in_place(x: Tensor) -> None:
    """They lie in an arena; autograd must neither replace nor keep them."""
    bench = Bench(made.mlp((6, 4)))
    where = bench.gradient(0, "weight").data_ptr()
    bench.backward(range(2), x, gradient=torch.ones(3, 4, dtype=torch.float64))
    assert bench.gradient(0, "weight").data_ptr() == where
    assert bench.gradient(0, "weight").any()
    assert bench.tensors[0].weights["weight"].grad is None


def test_integer_inputs_have_no_gradient() -> None:
    model = nn.Sequential(nn.Embedding(7, 4))
    bench = Bench(model)
    gradient, loss = bench.backward(range(1), torch.tensor([1, 2]), gradient=torch.ones(2, 4))
    assert gradient is None
    assert loss is None
    assert bench.gradient(0, "weight")[1].tolist() == [1.0] * 4


def test_frozen_layers_pass_gradients_on_and_get_none(x: Tensor) -> None:
    model = made.mlp((6, 4, 2))
    model[0].requires_grad_(False)
    bench = Bench(model)
    gradient, _ = bench.backward(range(1), x, gradient=torch.ones(3, 4, dtype=torch.float64))
    assert gradient is not None
    assert gradient.any()
    assert bench.tensors[0].gradients == {}


def test_nothing_to_differentiate() -> None:
    bench = Bench(nn.Sequential(nn.Embedding(7, 4).requires_grad_(False)))
    assert bench.backward(range(1), torch.tensor([1, 2]), gradient=torch.ones(2, 4)) == (None, None)


def test_the_output_of_a_pack_does_not_outlive_its_use() -> None:
    """The planned peak counts it only as long as the last layer's backward needs it."""
    outputs: list[weakref.ref[torch.UntypedStorage]] = []
    alive = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            gc.collect()
            alive.append(outputs[0]() is not None)
            return gradients[0]

    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Watch.apply(x)
            return result

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1  # needs nothing in backward
            outputs.append(weakref.ref(y.untyped_storage()))
            return y

    bench = Bench(nn.Sequential(First(), Last()))
    bench.backward(range(2), torch.ones(2, 3), gradient=torch.ones(2, 3))
    assert alive == [False]


class TestChance:
    def test_a_repeated_forward_has_the_same_mask(self, x: Tensor) -> None:
        bench = Bench(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
        first = bench.forward(range(2), x)
        torch.rand(3)
        assert torch.equal(bench.forward(range(2), x)[2], first[2])
        gradient, _ = bench.backward(range(2), x, gradient=torch.ones_like(x))
        assert gradient is not None
        assert torch.equal(gradient * x, first[2])

    def test_masks_do_not_depend_on_the_pack(self, x: Tensor) -> None:
        bench = Bench(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
        whole = bench.forward(range(2), x)[2]
        assert torch.equal(bench.forward(range(1, 2), bench.forward(range(1), x)[1])[2], whole)

    def test_masks_differ_by_layer_step_and_sample(self) -> None:
        bench, ones = Bench(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5))), torch.ones(100)
        masks = [bench.forward(range(1), ones)[1], bench.forward(range(1, 2), ones)[2]]
        masks += [bench.forward(range(1), ones, step=1)[1], bench.forward(range(1), ones, first_sample=3)[1]]
        assert not any(torch.equal(a, b) for a in masks for b in masks if a is not b)

    def test_the_users_generator_stays_as_it_is(self, x: Tensor) -> None:
        bench = Bench(nn.Sequential(nn.Dropout(0.5)))
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        bench.forward(range(1), x)
        bench.backward(range(1), x, gradient=torch.ones_like(x))
        assert torch.equal(torch.rand(4), expected)

    def test_it_stays_when_a_layer_fails(self) -> None:
        torch.manual_seed(3)
        state = torch.default_generator.get_state()

        def fail() -> None:
            with untouched(torch.default_generator):
                torch.rand(1)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert torch.equal(torch.default_generator.get_state(), state)

    def test_seeds_are_fixed_for_good(self) -> None:
        """A resumed run must draw the same masks with another version of this code."""
        assert layer_seed(0, 0, 0, 0) == 3434107503531660146
        assert 0 <= layer_seed(2**40, 10**6, 999, 10**6) < 2**63


class TestBuffers:
    @pytest.fixture
    def bench(self) -> Iterator[Bench]:
        return Bench(nn.Sequential(nn.BatchNorm1d(6, dtype=torch.float64)))

    def test_a_forward_changes_them(self, bench: Bench, x: Tensor) -> None:
        reference = copy.deepcopy(bench.model)
        reference(x)
        bench.forward(range(1), x)
        for name, buffer in reference[0].named_buffers():
            assert torch.equal(bench.tensors[0].buffers[name], buffer)

    @pytest.mark.parametrize("first_time", [True, False])
    def test_a_backward_changes_them_only_as_the_first_forward(self, bench: Bench, x: Tensor, first_time: bool) -> None:
        before = {name: buffer.clone() for name, buffer in bench.tensors[0].buffers.items()}
        bench.backward(range(1), x, gradient=torch.ones_like(x), first_time=first_time)
        same = [torch.equal(before[name], buffer) for name, buffer in bench.tensors[0].buffers.items()]
        assert same == [not first_time] * 3

    @pytest.mark.parametrize("in_place", [True, False])
    def test_changes_by_layers_not_known_to_make_any_are_refused(self, x: Tensor, in_place: bool) -> None:
        class Counts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(()))

            def forward(self, x: Tensor) -> Tensor:
                if in_place:
                    self.calls += 1
                else:
                    self.calls = self.calls + 1
                return x

        with pytest.raises(ModelError, match=r"layer 0 \(Counts\) changes its buffers"):
            Bench(nn.Sequential(Counts())).forward(range(1), x)


def test_a_layer_that_works_in_place_leaves_its_input(x: Tensor) -> None:
    bench, before = Bench(nn.Sequential(nn.ReLU(inplace=True))), x.clone()
    assert torch.equal(bench.forward(range(1), x)[1], before.relu())
    gradient, _ = bench.backward(range(1), x, gradient=torch.ones_like(x))
    assert torch.equal(x, before)
    assert gradient is not None
    assert torch.equal(gradient, (before > 0).double())


def test_a_parameter_used_twice_within_a_layer(x: Tensor) -> None:
    inner = nn.Linear(6, 6, dtype=torch.float64)
    model = nn.Sequential(nn.Sequential(inner, nn.Tanh(), inner))
    bench = Bench(model)
    bench.backward(range(1), x, gradient=torch.ones_like(x))
    model(x).sum().backward()
    assert torch.allclose(bench.gradient(0, "0.weight"), inner.weight.grad, rtol=1e-14)


def test_a_layer_that_returns_no_tensor_is_refused(x: Tensor) -> None:
    class Pair(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x

    with pytest.raises(ModelError, match="layer 0 returned 2 tensors; it must return one tensor"):
        Bench(nn.Sequential(Pair())).forward(range(1), x)


def test_the_model_itself_is_not_touched(x: Tensor) -> None:
    model = made.mlp((6, 4), dropout=0.5)
    parameters = {name: (parameter, parameter.clone()) for name, parameter in model.named_parameters()}
    bench = Bench(model)
    bench.tensors[0].weights["weight"].data.zero_()
    bench.backward(range(2), x, gradient=torch.ones(3, 4, dtype=torch.float64))
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name][0]
        assert torch.equal(parameter, parameters[name][1])
        assert parameter.grad is None
