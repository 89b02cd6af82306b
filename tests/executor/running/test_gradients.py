"""The norm of a gradient that lies in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from executor.running.gradients import Gradients
from executor.running.layout import SlotKey
from tests.executor import made


def gradients_of(model: nn.Module, dtype: torch.dtype) -> list[dict[SlotKey, Tensor]]:
    """Random ones, by layer; layers that share a weight have different parts of its gradient."""
    generator = torch.Generator().manual_seed(0)
    return [
        {(name, ""): torch.randn(p.tensor.shape, generator=generator).to(dtype) for name, p in layer.trainable.items()}
        for layer in made.split(model).layers
    ]


@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_it_is_what_torch_says_of_the_whole_model(dtype: torch.dtype, close: float) -> None:
    """A tied parameter counts once, with the sum of its parts, a frozen one not; nothing changes."""
    model = made.tied(bias=True)
    model[3].requires_grad_(False)
    gradients = gradients_of(model, dtype)
    before = [{key: each.clone() for key, each in layer.items()} for layer in gradients]
    own = [gradients[layer]["bias", ""] for layer in range(3)]
    own += [gradients[1]["weight", ""], gradients[0]["weight", ""] + gradients[2]["weight", ""]]
    plain = [nn.Parameter(torch.zeros_like(gradient)) for gradient in own]
    for parameter, gradient in zip(plain, own, strict=True):
        parameter.grad = gradient
    expected = float(nn.utils.clip_grad_norm_(plain, float("inf")))
    found = Gradients(made.split(model)).norm(gradients.__getitem__, 1.0)
    assert found.value == pytest.approx(expected, rel=close)
    assert found.culprit is None
    assert Gradients(made.split(model)).norm(gradients.__getitem__, 4.0).value == pytest.approx(found.value / 4)
    assert all(torch.equal(each, before[at][key]) for at, layer in enumerate(gradients) for key, each in layer.items())


def test_a_parameter_of_more_than_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made.mlp()
    gradients = gradients_of(model, torch.float64)
    whole = Gradients(made.split(model)).norm(gradients.__getitem__, 1.0)
    monkeypatch.setattr("executor.running.gradients._PIECE", 7)
    assert Gradients(made.split(model)).norm(gradients.__getitem__, 1.0).value == pytest.approx(whole.value, rel=1e-14)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_first_parameter_that_is_not_finite_is_named(value: float) -> None:
    model = made.mlp()
    gradients = gradients_of(model, torch.float64)
    for layer in (4, 2):
        gradients[layer]["bias", ""][1] = value
    found = Gradients(made.split(model)).norm(gradients.__getitem__, 1.0)
    assert not found.value < float("inf")
    assert found.culprit is not None
    assert found.culprit.startswith("2.bias (layer 2, ")
