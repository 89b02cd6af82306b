"""Arbitrary modules as layers: random residual graphs, what their forwards may do, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from executor.errors import ModelError
from executor.models.inputs import Inputs, call_model
from executor.models.layers import decompose
from tests.executor.models.families import check_equal, product_loss, through_layers

torch.set_num_threads(1)

WIDTH = 3


class Graph(nn.Module):
    """Blocks that each take a sum of some earlier values; ``plan`` has, by block, (earlier values, what is done)."""

    def __init__(self, plan: list[tuple[list[int], str]], shared: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in plan)
        if shared and len(plan) > 1:
            self.blocks[-1].weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.plan = plan

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        values = [x]
        positions = torch.arange(WIDTH, device=x.device)
        for block, (sources, how) in zip(self.blocks, self.plan, strict=True):
            value = block(sum(values[source] for source in sources))
            match how:
                case "mask":
                    value = value.masked_fill(mask[:, None], 0.5)
                case "scale":
                    value = value * self.scale + self.shift
                case "in place":
                    value.mul_(2).add_(positions)
                case "rows":
                    value = value.view(x.shape[0] * WIDTH).view(x.shape[0], WIDTH)
                case "split":
                    first, *others = value.chunk(WIDTH, 1)
                    value = torch.cat([*others, first], 1)
                case "detach":
                    with torch.no_grad():
                        factor = value.abs().mean(1, keepdim=True)
                    value = value / (factor + 1)
            values.append(value.tanh())
        return values[-1] + self.scale


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    plan = []
    for index in range(draw(st.integers(1, 6))):
        sources = draw(st.lists(st.integers(0, index), min_size=1, max_size=3))
        how = draw(st.sampled_from(["", "mask", "scale", "in place", "rows", "split", "detach"]))
        plan.append((sources, how))
    # Every block must reach the result: the last one adds up what nobody else used.
    used = {source for sources, _ in plan for source in sources}
    plan[-1] = (sorted({*plan[-1][0], *(set(range(len(plan))) - used)}), plan[-1][1])
    torch.manual_seed(draw(st.integers(0, 100)))
    return Graph(plan, draw(st.booleans())).double()


def batch(samples: int = 2) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator)
    return Inputs.of({"x": x, "mask": x[:, 0] > 0})


@given(graphs(), st.integers(1, 5))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_residual_graphs_are_cut_without_changing_them(model: Graph, samples: int) -> None:
    layers = check_equal(model, batch())
    assert len(layers) == len(model.plan) + 1
    torch.testing.assert_close(
        through_layers(layers, batch(samples)), call_model(model, batch(samples)), rtol=0, atol=1e-10
    )


def of(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module with two linear blocks, ``a`` and ``b``, and this forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, x: Tensor) -> Any:
            return forward(self, x, *self.blocks)

    torch.manual_seed(0)
    return Model().double()


def x(samples: int = 2) -> Inputs:
    return Inputs.of(batch(samples).tensors[1])


class TestAccepts:
    def test_a_module_without_parts_is_one_layer(self) -> None:
        layers = check_equal(nn.Linear(WIDTH, 2).double(), x())
        assert [layer.name for layer in layers.layers] == ["Linear", "loss"]

    def test_children_are_layers_where_there_are_no_lists(self) -> None:
        class Two(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.drop, self.second = nn.Linear(WIDTH, 4), nn.Dropout(0.0), nn.Linear(4, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = self.second(self.drop(self.first(x))) + x
                return result

        layers = check_equal(Two().double(), x())
        assert [layer.name for layer in layers.layers] == ["first", "second", "loss"]

    def test_a_block_called_twice_is_two_layers_with_tied_weights(self) -> None:
        layers = check_equal(of(lambda self, x, a, b: b(a(x).tanh()) + a(x)), x())
        assert {group.name: group.layers for group in layers.tied} == {
            "blocks.0.weight": (0, 2),
            "blocks.0.bias": (0, 2),
        }

    def test_keyword_arguments_tuples_and_dictionaries_between_blocks(self) -> None:
        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)

            def forward(self, state: dict[str, Any], *, scale: float) -> dict[str, Any]:
                hidden, (count, skip) = state["hidden"], state["rest"]
                return {"hidden": self.inner(hidden) * scale, "rest": (count + 1, skip + hidden)}

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(Block() for _ in range(3))

            def forward(self, x: Tensor) -> Tensor:
                state: dict[str, Any] = {"hidden": x, "rest": (0, x * 0)}
                for block in self.blocks:
                    state = block(state, scale=0.5)
                count, skip = state["rest"]
                result: Tensor = state["hidden"] + skip / count
                return result

        check_equal(Model().double(), x())

    def test_samples_in_another_dimension(self) -> None:
        layers = check_equal(of(lambda self, x, a, b: b((x + a(x)).t().contiguous().t()) + x.t().t()), x())
        assert through_layers(layers, x(5)).shape == (5, WIDTH)

    def test_values_passing_with_samples_in_the_second_dimension(self) -> None:
        check_equal(of(lambda self, x, a, b: b(a(x)) + (h := a(x).t(), b(x))[0].t()), x())

    def test_a_constant_tensor_that_is_no_buffer(self) -> None:
        model = of(lambda self, x, a, b: b(a(x) * self.factor))
        model.factor = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
        layers = check_equal(model, x()).layers
        assert [layer.buffer_bytes for layer in layers] == [8 * WIDTH, 0, 0]

    def test_statistics_over_the_samples_stay_with_their_microbatch(self) -> None:
        check_equal(of(lambda self, x, a, b: b(a(x)) - a(x).mean(0)), x())

    def test_looking_at_values_that_no_batch_changes(self) -> None:
        def forward(self: Any, x: Tensor, a: nn.Module, b: nn.Module) -> Any:
            factor = 2.0 if bool((torch.arange(3) > 1).any()) else 0.0
            return b(a(x) * factor)

        check_equal(of(forward), x())

    def test_blocks_may_look_at_values(self) -> None:
        """What a block does inside is run anew for every batch."""

        class Choosy(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor) -> Tensor:
                result: Tensor = torch.where((x.abs() > 1).any(1, keepdim=True), self.inner(x), -self.inner(x))
                return result

        check_equal(of(lambda self, x, a, b: b(self.choosy(a(x))), choosy=Choosy()), x())


class _Doubled(torch.autograd.Function):
    """Doubles, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 3


def _adds_through_a_view(self: Any, x: Tensor, a: nn.Module, b: nn.Module) -> Any:
    hidden = a(x)
    first = hidden[:, 0]
    first.add_(1)
    return b(hidden)


def _counts(self: Any, x: Tensor, a: nn.Module, b: nn.Module) -> Any:
    self.count.add_(1)
    return b(a(x))


class TestRefuses:
    @pytest.mark.parametrize(
        ("forward", "expected"),
        [
            (lambda self, x, a, b: b(a(x)) if x.sum() > 0 else a(x), r"test_cutting.py:\d+ .*values \(__bool__\)"),
            (lambda self, x, a, b: b(a(x)) * x.max().item(), r"looks at a tensor's values \(item\)"),
            (lambda self, x, a, b: b(a(x)) if len(x) > 2 else a(x), "something else for 2 samples than for 3"),
            (lambda self, x, a, b: b(a(x)) / (len(x) ** 2), r"uses 4, 9, 1 for \(2, 3, 1\) samples"),
            (lambda self, x, a, b: b(a(x).view(-1)[: len(x) * WIDTH].view(-1, WIDTH)) + b(x), None),
            (lambda self, x, a, b: b(_Doubled.apply(a(x))), r"way of its own \(torch.autograd.Function\)"),
            (_adds_through_a_view, "changed in place through a view"),
            (lambda self, x, a, b: b(a(x).data), r"uses the \.data of a tensor"),
            (lambda self, x, a, b: torch.vmap(lambda row: row * 2)(b(a(x))), "made out of sight"),
            (lambda self, x, a, b: {"hidden": b(a(x))}, "the model returns dict; it must return a tensor"),
            (lambda self, x, a, b: b(a(x)[:, :2]), r"fails on inputs of shape \(2, 3\).*test_cutting.py:\d+"),
        ],
    )
    def test_with_the_place(self, forward: Callable[..., Any], expected: str | None) -> None:
        if expected is None:
            check_equal(of(forward), x())
            return
        with pytest.raises(ModelError, match=expected):
            decompose(of(forward), product_loss, x())

    def test_a_value_whose_samples_cannot_be_told_apart(self) -> None:
        model = of(lambda self, x, a, b: b(a(x)) + a(x).flatten().view_as(x) * 0 + self.last(a(x).flatten(), b(x)))
        model.last = _Rows()
        with pytest.raises(ModelError, match="none of its dimensions is the number of samples"):
            decompose(model.double(), product_loss, x())

    def test_changes_of_buffers_outside_layers(self) -> None:
        model = of(_counts)
        model.register_buffer("count", torch.zeros(1))
        with pytest.raises(ModelError, match="changes a parameter or buffer outside its layers"):
            decompose(model, product_loss, x())

    def test_objects_that_pass_between_layers(self) -> None:
        class Notebook:
            pages: list[Tensor]

        class Writes(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: Tensor, notebook: Notebook) -> Tensor:
                result: Tensor = self.inner(x)
                return result

        model = of(lambda self, x, a, b: self.writes(b(a(x)), Notebook()), writes=Writes())
        with pytest.raises(ModelError, match=r"writes \(Writes\) the model passes on a .*Notebook; .* only tensors"):
            decompose(model.double(), product_loss, x())

    def test_hooks_outside_layers(self) -> None:
        model = of(lambda self, x, a, b: b(a(x)))
        model.register_forward_hook(lambda module, args, output: 2 * output)
        with pytest.raises(ModelError, match="the model itself has hooks"):
            decompose(model, product_loss, x())


class _Rows(nn.Module):
    """Takes all elements of a batch in one row."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, row: Tensor, like: Tensor) -> Tensor:
        result: Tensor = self.inner(row[:, None]).view_as(like)
        return result
