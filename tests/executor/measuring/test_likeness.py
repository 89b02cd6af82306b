from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from executor.measuring.likeness import likeness
from executor.models.inputs import Inputs
from executor.models.layers import LayerSpec, decompose

X = torch.zeros(2, 4)


def layer(module: nn.Module) -> LayerSpec:
    return decompose(nn.Sequential(module), nn.functional.mse_loss).layers[0]


def frozen() -> nn.Module:
    return nn.Linear(4, 4).requires_grad_(False)


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = nn.Linear(4, 4), factor


def hooked() -> nn.Module:
    module = nn.Linear(4, 4)
    module.register_forward_hook(lambda module, args, output: output + 1)
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(4, 4),
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
        lambda: nn.Dropout(0.1),
        lambda: nn.BatchNorm1d(4),
        lambda: nn.Conv2d(3, 3, 3, padding=1),
        lambda: Scaled(2.0),
    ],
)
def test_layers_made_alike_are(make: Callable[[], nn.Module]):
    assert likeness(layer(make()), [X]) == likeness(layer(make()), [X])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 5)),
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, bias=False)),
        (lambda: nn.Linear(4, 4), lambda: nn.Linear(4, 4, dtype=torch.float64)),
        (lambda: nn.Linear(4, 4), frozen),
        (lambda: nn.Linear(4, 4), hooked),
        (hooked, hooked),
        (nn.ReLU, nn.GELU),
        (nn.GELU, lambda: nn.GELU("tanh")),
        (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.2)),
        (lambda: nn.Dropout(0.1), lambda: nn.Dropout(0.1).eval()),
        (lambda: nn.Conv2d(3, 3, 3), lambda: nn.Conv2d(3, 3, 3, stride=2)),
        (lambda: Scaled(2.0), lambda: Scaled(3.0)),
        (lambda: nn.Sequential(nn.ReLU(), nn.GELU()), lambda: nn.Sequential(nn.GELU(), nn.ReLU())),
    ],
)
def test_layers_that_differ_are_not(one: Callable[[], nn.Module], other: Callable[[], nn.Module]):
    assert likeness(layer(one()), [X]) != likeness(layer(other()), [X])


def test_the_input_counts():
    assert likeness(layer(nn.ReLU()), [X]) != likeness(layer(nn.ReLU()), [X.double()])
    assert likeness(layer(nn.ReLU()), [X]) != likeness(layer(nn.ReLU()), [torch.zeros(2, 5)])


def test_the_blocks_of_a_transformer_are_alike():
    config = GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=256, bos_token_id=None, eos_token_id=None)
    tokens = Inputs.of(torch.zeros(1, 4, dtype=torch.int64))
    layers = decompose(GPT2LMHeadModel(config), nn.functional.mse_loss, tokens).layers
    x = torch.zeros(2, 4, 8)
    assert likeness(layers[1], [x]) == likeness(layers[2], [x]) == likeness(layers[3], [x])
    assert likeness(layers[0], [x]) != likeness(layers[1], [x])
