"""Backwards in two parts: the same gradients as in one, nothing done twice, and memory as planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from executor.errors import TaskFailed, WorkspaceOverrun
from executor.running.parts import input_part
from executor.running.run import run
from sim.builders import build
from sim.plan import Policy, UpdateOn
from sim.schedule import TaskKind
from tests.executor import made
from tests.executor.trained import (
    CHAIN_PACKS,
    GPT2_PACKS,
    adam,
    chain,
    cut_of,
    differences,
    gpt2,
    gradient_step,
    harmony,
    normalised_chain,
    plainly,
    tied_chain,
    trace_of,
    train,
    train_in_pieces,
)

WIDTH = 4


class Block(nn.Module):
    """A residual block with two norms and three products; one of its parameters scales the way around them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.second(torch.nn.functional.gelu(self.first(self.norm(x))))
        return x * self.scale + inner * torch.sigmoid(self.gate(x))


class Twice(nn.Module):
    """Uses one weight before and after itself, and another one beside itself."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.row(torch.tanh(self.row(x)))
        return y + self.side(x) * self.side(2 * x)


class Shifted(nn.Module):
    """A parameter that the input does not pass by."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix = nn.Parameter(torch.rand(1, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x) + self.mix(self.table)


class Apart(nn.Module):
    """Its output does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(torch.ones_like(x))
        return y


def frozen_inside() -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    return model[0].requires_grad_(False) and model


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linears in a row": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)),
    "block": Block,
    "blocks": lambda: nn.Sequential(Block(), nn.Dropout(0.5), Block()),
    "used twice": Twice,
    "beside the input": Shifted,
    "apart from the input": Apart,
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True),
    "frozen inside": frozen_inside,
    "identity": nn.Identity,
    "views": lambda: nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Unflatten(1, (2, WIDTH)), nn.Flatten(1)),
    "in place": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
    "convolution and norm": lambda: nn.Sequential(
        nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 3, 2), nn.BatchNorm1d(3), nn.Flatten()
    ),
}


class Products(TorchDispatchMode):
    """Counts products of matrices and convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "convolution_backward", "native_layer_norm_backward"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def shaped(name: str) -> Tensor:
    torch.manual_seed(1)
    shape = (3, 2, WIDTH) if name == "attention" else (3, WIDTH)
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def in_one(module: nn.Module, x: Tensor) -> tuple[Tensor | None, dict[str, Tensor | None], Counter[str]]:
    torch.manual_seed(2)
    y = module(x)
    with Products() as products:
        y.backward(torch.cos(y.detach()))
    return x.grad, {name: p.grad for name, p in module.named_parameters()}, products.counts


def in_two(module: nn.Module, x: Tensor) -> tuple[Tensor | None, dict[str, Tensor | None], Counter[str]]:
    torch.manual_seed(2)
    y = module(x)
    leaves = {(0, name): p for name, p in module.named_parameters() if p.requires_grad}
    gradients = {key: torch.zeros_like(p) for key, p in leaves.items()}
    with Products() as products:
        (gradient,), weight_part = input_part([get_gradient_edge(y)], [x], [torch.cos(y.detach())], leaves)
        assert not any(each.any() for each in gradients.values())
        weight_part.add_to(gradients)
    assert all(p.grad is None for p in leaves.values())
    return gradient, {name: gradients[0, name] for _, name in gradients}, products.counts


@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_of_one_backward(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().double()
    gradient, gradients, _ = in_two(module, shaped(name))
    expected, expected_gradients, _ = in_one(module, shaped(name))
    if expected is None:
        assert gradient is None
    else:
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)
    for key, each in gradients.items():
        torch.testing.assert_close(each, expected_gradients[key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in ("used twice", "convolution and norm")])
def test_no_product_is_done_twice(name: str) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().double()
    products, expected = (each(module, shaped(name))[2] for each in (in_two, in_one))
    products.pop("native_layer_norm_backward", None), expected.pop("native_layer_norm_backward", None)
    assert products == expected


class Several(nn.Module):
    """Takes three values and passes on four: one as it came, one of parameters alone, one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.rand(1, WIDTH))

    def forward(self, x: Tensor, skip: Tensor, unused: Tensor) -> tuple[Tensor, ...]:
        h = self.first(x)
        return self.second(torch.tanh(h)) + skip, skip, torch.exp(self.second(self.table)), h


@pytest.mark.parametrize("without", [None, 0, 1, 2, 3])
def test_of_several_values_each_gets_its_gradient(without: int | None) -> None:
    """Those behind an output that nobody uses have none from there."""
    torch.manual_seed(0)
    module = Several().double()
    leaves = {(0, name): p for name, p in module.named_parameters()}
    x = [torch.randn(3, WIDTH, dtype=torch.float64).requires_grad_() for _ in range(3)]
    outputs = module(*x)
    output_gradients = [None if at == without else torch.cos(y.detach()) for at, y in enumerate(outputs)]
    used = [(y, g) for y, g in zip(outputs, output_gradients, strict=True) if g is not None]
    expected = torch.autograd.grad(
        [y for y, _ in used], [*x, *leaves.values()], [g for _, g in used], allow_unused=True, retain_graph=True
    )
    gradients = {key: torch.zeros_like(p) for key, p in leaves.items()}
    found, weight_part = input_part([get_gradient_edge(y) for y in outputs], x, output_gradients, leaves)
    weight_part.add_to(gradients)
    for mine, theirs in zip([*found, *gradients.values()], expected, strict=True):
        if mine is None or theirs is None:
            assert theirs is None
            assert mine is None or not mine.any()
        else:
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_what_one_microbatch_holds_does_not_hear_of_another() -> None:
    torch.manual_seed(0)
    module = Block().double()
    leaves = {(0, name): p for name, p in module.named_parameters()}
    expected = {key: torch.zeros_like(p) for key, p in leaves.items()}
    gradients = {key: torch.zeros_like(p) for key, p in leaves.items()}
    parts = []
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        x = torch.randn(2, WIDTH, dtype=torch.float64).requires_grad_()
        y = module(x)
        _, part = input_part([get_gradient_edge(y)], [x], [torch.ones_like(y)], leaves)
        parts.append(part)
        for key, each in zip(leaves, torch.autograd.grad(module(x).sum(), list(leaves.values())), strict=True):
            expected[key] += each
    for part in parts:
        part.add_to(gradients)
    for key in leaves:
        torch.testing.assert_close(gradients[key], expected[key], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------- training


@pytest.mark.parametrize("apart", [1, 3])
@pytest.mark.parametrize("update", UpdateOn)
@pytest.mark.parametrize(
    ("make", "packs"),
    [(chain, CHAIN_PACKS), (gpt2, GPT2_PACKS), (tied_chain, (((0, 0), (1, 2)), ((0, 0), (1, 2), (3, 4))))],
    ids=["chain", "gpt2", "tied"],
)
def test_steps_of_adam_are_those_of_plain_training(make: Any, packs: Any, update: UpdateOn, apart: int) -> None:
    plan = harmony(Policy.HARMONY_PP, 2, (3, 3), packs, update=update, split_backward=apart)
    ran = train(make(), plan, steps=2, optimizer=adam, state_tensors=2)
    assert any(ran.schedule.copies(TaskKind.BACKWARD_WEIGHT))
    assert differences(ran.trained, plainly(make, 2, adam)) == {}


NORMALISED_PACKS = ((0, 0), (1, 2)), ((0, 0), (1, 2), (3, 6))


@pytest.mark.parametrize("packs", [NORMALISED_PACKS, (((0, 0),), ((0, 0), (1, 6)))], ids=["two", "fused"])
def test_batch_norm_and_dropout_are_those_of_the_same_microbatches(packs: Any) -> None:
    """Buffers change once, and not under graphs that wait for their second part."""
    plan = harmony(Policy.HARMONY_PP, 2, (2, 2), packs, split_backward=4)
    expected = train_in_pieces(normalised_chain(), cut_of(plan), steps=2)
    assert differences(train(normalised_chain(), plan, steps=2).trained, expected) == {}


def test_with_dropout_only_the_cut_counts() -> None:
    plan = harmony(Policy.HARMONY_PP, 2, (3, 3), GPT2_PACKS, split_backward=2)
    expected = train_in_pieces(gpt2(dropout=0.2), [[(0, 3), (3, 6), (6, 8)]])
    assert differences(train(gpt2(dropout=0.2), plan).trained, expected) == {}


@pytest.mark.parametrize(
    ("column", "task"), [("held_bytes", "backward_input"), ("parts_workspace_bytes", "backward_(input|weight)")]
)
def test_beyond_what_is_planned_to_be_held_or_worked_with_is_an_error(column: str, task: str) -> None:
    trace = trace_of(chain())
    trace = replace(trace, sizes=tuple(replace(row, **{column: 1}) for row in trace.sizes))
    plan = harmony(Policy.HARMONY_PP, 2, (4, 4), CHAIN_PACKS, split_backward=1)
    with pytest.raises(TaskFailed, match=rf": {task} .* failed: layers .* took .* reserves") as failed:
        run(build(plan, trace, made.machine(2)), chain(), made.machine(2), steps=1, optimizer=gradient_step)
    assert isinstance(failed.value.__cause__, WorkspaceOverrun)
