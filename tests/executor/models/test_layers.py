import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel

from executor.errors import ModelError
from executor.models.inputs import Inputs
from executor.models.layers import LayerModel, decompose

torch.set_num_threads(1)


def tiny_gpt2(**options) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 11}
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**{**sizes, **rates, "bos_token_id": 0, "eos_token_id": 0, **options}))


def tokens(batch: int = 3, sequence: int = 8) -> Tensor:
    return torch.randint(11, (batch, sequence), generator=torch.Generator().manual_seed(1))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


def chain(layers: LayerModel, inputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    x = inputs
    for layer in layers.layers[:-1]:
        x = layer.module(x)
    return x, layers.layers[-1].module(x, labels)


class TestSequential:
    def test_has_a_layer_per_child_and_the_loss(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
        layers = decompose(model, nn.functional.mse_loss).layers
        assert [(layer.name, layer.kind) for layer in layers] == [
            ("0", "Linear"),
            ("1", "ReLU"),
            ("2", "Linear"),
            ("loss", "loss"),
        ]
        assert [layer.weight_bytes for layer in layers] == [64, 0, 32, 0]
        assert layers[0].parameters["weight"].qualified == "0.weight"
        assert layers[2].parameters["weight"].tensor is model[2].weight

    def test_equals_the_model(self):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), nn.Linear(4, 2))
        inputs, labels = torch.randn(5, 3), torch.randn(5, 2)
        output, loss = chain(decompose(model, nn.functional.mse_loss), inputs, labels)
        assert torch.equal(output, model(inputs))
        assert torch.equal(loss, nn.functional.mse_loss(model(inputs), labels))

    def test_finds_a_parameter_that_children_share(self):
        first, last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        last.weight = first.weight
        layers = decompose(nn.Sequential(first, nn.ReLU(), last), nn.functional.mse_loss)
        (group,) = layers.tied
        assert (group.name, group.layers) == ("0.weight", (0, 2))
        assert group.parameter is first.weight
        assert layers.layers[2].parameters["weight"].qualified == "0.weight"
        assert list(layers.owned(0)) == ["weight"]
        assert list(layers.owned(2)) == []

    def test_a_child_in_two_places_is_two_layers(self):
        shared = nn.Linear(4, 4)
        layers = decompose(nn.Sequential(shared, nn.ReLU(), shared), nn.functional.mse_loss)
        assert [layer.name for layer in layers.layers] == ["0", "1", "2", "loss"]
        assert {group.name: group.layers for group in layers.tied} == {"0.weight": (0, 2), "0.bias": (0, 2)}

    def test_frozen_parameters_have_no_gradient(self):
        model = nn.Sequential(nn.Linear(3, 4))
        model[0].weight.requires_grad_(False)
        (layer, _) = decompose(model, nn.functional.mse_loss).layers
        assert (layer.weight_bytes, layer.gradient_bytes, list(layer.trainable)) == (64, 16, ["bias"])

    def test_marks_chance_and_changing_buffers_by_mode(self):
        model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(4), nn.Linear(4, 4))
        layers = decompose(model, nn.functional.mse_loss).layers
        assert [layer.random for layer in layers] == [True, False, False, False, False]
        assert [layer.changes_buffers for layer in layers] == [False, False, True, False, False]
        assert [layer.cut_sensitive for layer in layers] == [True, False, True, False, False]
        assert layers[2].buffer_bytes == 4 * 4 + 4 * 4 + 8
        assert layers[2].buffers["running_mean"].qualified == "2.running_mean"
        evaluated = decompose(model.eval(), nn.functional.mse_loss).layers
        assert not any(layer.random or layer.changes_buffers or layer.cut_sensitive for layer in evaluated)

    def test_statistics_of_the_batch_depend_on_the_cut_even_if_not_kept(self):
        norm = nn.BatchNorm1d(4, track_running_stats=False)
        layer = decompose(nn.Sequential(norm), nn.functional.mse_loss).layers[0]
        assert (layer.changes_buffers, layer.cut_sensitive) == (False, True)


class TestSkeleton:
    def test_holds_no_memory_and_computes_with_bound_parameters(self):
        layers = decompose(tiny_gpt2(), cross_entropy, Inputs.of(tokens()))
        block, head = layers.layers[1], layers.layers[4]
        for layer, inputs in ((block, torch.randn(2, 8, 16)), (head, torch.randn(2, 8, 16))):
            skeleton = layer.skeleton()
            assert all(parameter.is_meta for parameter in skeleton.parameters())
            bound = {local: named.tensor for local, named in layer.parameters.items()}
            assert torch.equal(functional_call(skeleton, bound, (inputs,)), layer.module(inputs))

    def test_keeps_frozen_parameters_frozen_and_buffers_empty(self):
        model = nn.Sequential(nn.BatchNorm1d(4))
        model[0].bias.requires_grad_(False)
        skeleton = decompose(model, nn.functional.mse_loss).layers[0].skeleton()
        assert (skeleton.weight.requires_grad, skeleton.bias.requires_grad) == (True, False)
        assert all(buffer.is_meta for buffer in skeleton.buffers())
        assert not model[0].running_mean.is_meta


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Scaled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class WithExtra(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4))
        self.scale = nn.Parameter(torch.ones(1))


class TestRefusals:
    @pytest.mark.parametrize("model", [Residual(), Scaled(nn.Linear(4, 4)), nn.Linear(4, 4)])
    def test_only_a_sequential_is_cut_without_a_batch(self, model: nn.Module):
        with pytest.raises(ModelError, match=f"{type(model).__name__} is no nn.Sequential; .* takes a batch"):
            decompose(model, nn.functional.mse_loss)

    def test_parameters_outside_the_layers(self):
        with pytest.raises(ModelError, match="outside its layers: scale"):
            decompose(WithExtra(), nn.functional.mse_loss)

    def test_an_empty_model(self):
        with pytest.raises(ModelError, match="empty"):
            decompose(nn.Sequential(), nn.functional.mse_loss)

    def test_a_loss_with_parameters(self):
        with pytest.raises(ModelError, match=r"loss.*Linear has parameters"):
            decompose(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 1))

    def test_hooks_that_nobody_would_call(self):
        model = nn.Sequential(nn.Linear(4, 4))
        model.register_forward_hook(lambda module, args, output: None)
        with pytest.raises(ModelError, match="hooks"):
            decompose(model, nn.functional.mse_loss)

    def test_hooks_inside_a_layer_run(self):
        model = nn.Sequential(nn.Linear(4, 4))
        model[0].register_forward_hook(lambda module, args, output: 2 * output)
        x = torch.randn(2, 4)
        assert torch.equal(decompose(model, nn.functional.mse_loss).layers[0].module(x), model(x))

    def test_a_changing_buffer_in_two_layers(self):
        norm = nn.BatchNorm1d(4)
        with pytest.raises(ModelError, match=r"0 and 2 share the buffer 0\.running_mean"):
            decompose(nn.Sequential(norm, nn.Linear(4, 4), norm), nn.functional.mse_loss)


def test_decompose_leaves_the_model_as_it_is():
    model = tiny_gpt2()
    before = {name: (id(module), dict(module.__dict__)) for name, module in model.named_modules()}
    decompose(model, cross_entropy, Inputs.of(tokens()))
    assert {name: (id(module), dict(module.__dict__)) for name, module in model.named_modules()} == before


def test_a_loss_module_keeps_its_buffers():
    weights = torch.tensor([1.0, 2.0])
    loss = decompose(nn.Sequential(nn.Linear(3, 2)), nn.CrossEntropyLoss(weights)).layers[-1]
    assert [named.qualified for named in loss.buffers.values()] == ["loss_fn.weight"]
    assert loss.buffer_bytes == 8
