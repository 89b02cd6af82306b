from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from executor.errors import DifferentModel, ModelError
from executor.models.inputs import Inputs
from executor.models.layers import LayerModel
from executor.running.layout import layouts
from executor.running.store import Home, Minibatch
from sim.schedule import TensorKind
from tests.executor import made


def allocate(size: int) -> Tensor:
    return torch.full((size,), 0xA5, dtype=torch.uint8)


def home(model: LayerModel, *, is_the_models: bool = True) -> Home:
    state = {id(parameter): {"m": torch.float64} for parameter in model.model.parameters()}
    return Home(model, layouts(model, state), allocate, is_the_models=is_the_models)


def read(home: Home, kind: TensorKind, layer: int) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.uint8), *home.read(kind, layer)])


def write(home: Home, kind: TensorKind, layer: int, content: Tensor) -> None:
    at = 0
    for piece in home.write(kind, layer):
        piece.copy_(content[at : at + len(piece)])
        at += len(piece)
    assert at == len(content)


def test_moving_in_changes_no_value() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model(torch.randn(4, 3))  # statistics other than the initial ones
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    home(made.split(model))
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_comes_home_is_in_the_model_at_once() -> None:
    model = made.mlp()
    place = home(made.split(model))
    parameter = model[0].weight
    content = read(place, TensorKind.WEIGHT, 0)
    assert torch.equal(content[: parameter.nbytes].view(torch.float64).view(parameter.shape), parameter)
    write(place, TensorKind.WEIGHT, 0, (content.view(torch.float64) + 1).view(torch.uint8))
    assert model[0].weight is parameter
    assert torch.equal(parameter, made.mlp()[0].weight + 1)


def test_a_block_is_one_piece_where_nothing_is_shared() -> None:
    place = home(made.split(made.mlp()))
    assert [len(place.read(TensorKind.WEIGHT, layer)) for layer in (0, 1)] == [1, 0]


def test_a_shared_weight_is_read_from_its_owner_and_written_by_it_alone() -> None:
    model = made.tied()
    place = home(made.split(model, made.mse))
    original = read(place, TensorKind.WEIGHT, 0)
    assert torch.equal(read(place, TensorKind.WEIGHT, 2), original)
    assert not torch.equal(read(place, TensorKind.WEIGHT, 1), original)
    write(place, TensorKind.WEIGHT, 2, torch.zeros_like(original))
    assert torch.equal(read(place, TensorKind.WEIGHT, 0), original)
    write(place, TensorKind.WEIGHT, 0, torch.zeros_like(original))
    assert not read(place, TensorKind.WEIGHT, 2).any()
    assert not model[2].weight.any()


class Head(nn.Module):
    """A norm, and a projection whose weight may be shared."""

    def __init__(self, projection: nn.Linear, width: int) -> None:
        super().__init__()
        self.before, self.projection, self.after = nn.LayerNorm(width), projection, nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.projection(self.before(x)))


def test_a_shared_weight_between_tensors_of_the_layers_own() -> None:
    first = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(first, Head(nn.Linear(4, 4, bias=False), 4))
    model[1].projection.weight = first.weight
    layers = made.split(model, made.mse)
    place = home(layers)
    assert [len(piece) for piece in place.read(TensorKind.WEIGHT, 1)] == [32, 64, 32]
    content = torch.ones(32, dtype=torch.float32)
    write(place, TensorKind.WEIGHT, 1, content.view(torch.uint8))
    assert torch.equal(model[1].after.weight, torch.ones(4))
    assert torch.equal(model[1].before.bias, torch.ones(4))
    assert not torch.equal(first.weight, torch.ones(4, 4))


def test_each_user_of_a_shared_weight_has_its_own_gradient() -> None:
    place = home(made.split(made.tied(), made.mse))
    place.views(TensorKind.GRADIENT, 0)["weight", ""].fill_(1)
    place.views(TensorKind.GRADIENT, 2)["weight", ""].fill_(2)
    assert place.views(TensorKind.GRADIENT, 0)["weight", ""].sum() == 16
    assert read(place, TensorKind.GRADIENT, 2).view(torch.float64).sum() == 32


def test_gradients_and_state_start_at_zero() -> None:
    place = home(made.split(made.mlp()))
    assert not read(place, TensorKind.GRADIENT, 0).any()
    assert not read(place, TensorKind.OPTIMIZER_STATE, 0).any()


def test_private_copies_are_independent_of_the_model() -> None:
    model = made.mlp()
    layers = made.split(model)
    own, private = home(layers), home(layers, is_the_models=False)
    content = read(own, TensorKind.WEIGHT, 0)
    assert torch.equal(read(private, TensorKind.WEIGHT, 0), content)
    write(private, TensorKind.WEIGHT, 0, torch.zeros_like(content))
    assert torch.equal(read(own, TensorKind.WEIGHT, 0), content)
    assert model[0].weight.all()


def test_a_model_elsewhere_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(ModelError, match=r"0.weight is on meta"):
        home(made.split(model))


class TestMinibatch:
    def batch(self) -> Minibatch:
        return Minibatch(4, 7, {}, allocate)

    def test_bytes_of_some_samples(self) -> None:
        batch = self.batch()
        inputs, labels = torch.arange(24.0).view(4, 2, 3).transpose(1, 2), torch.arange(4)
        batch.load(Inputs.of(inputs), labels)
        (found,) = batch.pieces(0, (1, 3))
        assert torch.equal(found.view(torch.float32).view(2, 3, 2), inputs[1:3])
        (found,) = batch.pieces(7, (3, 4))
        assert torch.equal(found.view(torch.int64), labels[3:])
        assert batch.record(0).specs == (((3, 2), torch.float32),)
        assert batch.record(7).specs == (((), torch.int64),)

    def test_several_tensors_lie_one_after_the_other_the_wider_first(self) -> None:
        batch = self.batch()
        mask, tokens = torch.tensor([True, False, True, True]), torch.arange(8).view(4, 2)
        batch.load(Inputs.of({"mask": mask, "tokens": tokens}), torch.zeros(4))
        of_tokens, of_mask = batch.pieces(0, (1, 3))
        assert of_tokens.view(torch.int64).tolist() == [2, 3, 4, 5]
        assert of_mask.view(torch.bool).tolist() == [False, True]
        assert batch.record(0).sample_bytes == 17

    def test_the_next_batch_takes_the_place_of_the_last(self) -> None:
        batch = self.batch()
        batch.load(Inputs.of(torch.zeros(4, 2)), torch.zeros(4))
        where = batch.pieces(0, (0, 4))[0].data_ptr()
        batch.load(Inputs.of(torch.ones(4, 2)), torch.zeros(4))
        assert batch.pieces(0, (0, 4))[0].data_ptr() == where
        assert batch.pieces(0, (0, 4))[0].view(torch.float32).sum() == 8

    def test_of_another_size_it_is_refused(self) -> None:
        with pytest.raises(DifferentModel, match=r"the inputs have shape \(3, 2\); .* minibatches of 4 samples"):
            self.batch().load(Inputs.of(torch.zeros(3, 2)), torch.zeros(4))
        with pytest.raises(DifferentModel, match=r"the labels have shape \(\)"):
            self.batch().load(Inputs.of(torch.zeros(4, 2)), torch.zeros(()))

    def test_of_another_shape_than_before_it_is_refused(self) -> None:
        batch = self.batch()
        batch.load(Inputs.of(torch.zeros(4, 2)), torch.zeros(4))
        with pytest.raises(DifferentModel, match=r"the inputs have torch.float32 \[3\] a sample.*torch.float32 \[2\]"):
            batch.load(Inputs.of(torch.zeros(4, 3)), torch.zeros(4))

    def test_of_other_samples_than_scheduled_it_is_refused(self) -> None:
        batch = Minibatch(4, 7, {0: 8, 7: 8}, allocate)
        batch.load(Inputs.of(torch.zeros(4, 2)), torch.arange(4))
        with pytest.raises(DifferentModel, match=r"the labels take 4 B a sample \(torch.float32 \[\]\), .* for 8 B"):
            batch.load(Inputs.of(torch.zeros(4, 2)), torch.zeros(4))
