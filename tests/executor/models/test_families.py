"""Models of transformers as layers: the same results as the model's own forward and backward."""

from __future__ import annotations

import pytest
import torch

from executor.errors import ModelError
from executor.models.layers import decompose
from tests.executor.models.families import (
    BLOCKS,
    FAMILIES,
    check_equal,
    gpt2,
    llama,
    made,
    product_loss,
    through_layers,
    tokens,
)

torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_model(family: str) -> None:
    check_equal(*made(family))


@pytest.mark.parametrize("family", ["llama padded", "gpt2 eager", "t5"])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_cut_serves_batches_of_other_sizes(family: str, samples: int) -> None:
    model, inputs = made(family)
    layers = decompose(model, product_loss, inputs)
    other = inputs.map(lambda tensor: torch.cat((tensor.flip(0), tensor))[:samples])
    expected = model(
        **dict(zip(other.names, other.tensors, strict=True)) if other.names else {"input_ids": other.tensors[0]}
    )
    torch.testing.assert_close(through_layers(layers, other), expected.logits, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("family", "blocks"),
    [("gpt2", "transformer.h"), ("bert", "bert.encoder.layer"), ("llama", "model.layers"), ("vit", "vit.layers")],
)
def test_every_block_is_a_layer_after_one_for_all_in_front(family: str, blocks: str) -> None:
    layers = decompose(*made(family)[:1], product_loss, made(family)[1]).layers
    assert [layer.name for layer in layers[1 : BLOCKS + 1]] == [f"{blocks}.{index}" for index in range(BLOCKS)]
    behind = [layer.weight_bytes > 0 for layer in layers[BLOCKS + 1 :]]
    assert behind == [True, True, False]  # norm or pooler, head, loss


def test_stages_of_blocks_are_cut_into_blocks() -> None:
    layers = decompose(*made("resnet")[:1], product_loss, made("resnet")[1]).layers
    kinds = [layer.kind for layer in layers]
    assert kinds == ["ResNetEmbeddings", *3 * ["ResNetBasicLayer"], "Linear", "loss"]


def test_tied_weights_are_one() -> None:
    for family, name in (("gpt2", "transformer.wte.weight"), ("qwen3", "model.embed_tokens.weight")):
        (group,) = check_equal(*made(family)).tied
        assert (group.name, group.layers) == (name, (0, BLOCKS + 2))
    (group,) = check_equal(*made("t5")).tied  # encoder's, decoder's embedding and head
    assert (group.name, group.layers) == ("shared.weight", (0, 4, 8))


def test_parameters_keep_their_names() -> None:
    model = gpt2()
    layers = decompose(model, product_loss, made("gpt2")[1]).layers
    held = {named.qualified for layer in layers for named in layer.parameters.values()}
    assert held == set(model.state_dict()) - {"lm_head.weight"}


class TestWhatPasses:
    """Shapes of x, one sample, layer by layer."""

    def passing(self, family: str) -> list[list[tuple[int, ...]]]:
        model, inputs = made(family)
        layers = decompose(model, product_loss, inputs)
        x, shapes = inputs.map(lambda tensor: tensor[:1]).tensors, []
        for layer in layers.layers[:-1]:
            shapes.append([tuple(tensor.shape[1:]) for tensor in x])
            out = layer.module(*x)
            x = out if isinstance(out, tuple) else (out,)
        return shapes

    def test_without_a_mask_one_tensor(self) -> None:
        assert self.passing("llama")[1:] == (BLOCKS + 2) * [[(6, 16)]]

    def test_a_padding_mask_passes_through_the_blocks_as_it_came(self) -> None:
        """Not the square masks made of it, which are larger."""
        assert self.passing("llama padded")[1:] == [*BLOCKS * [[(6, 16), (6,)]], [(6, 16)], [(6, 16)]]

    def test_positions_and_causal_masks_do_not_pass(self) -> None:
        assert self.passing("gpt2 eager")[1:] == (BLOCKS + 2) * [[(6, 16)]]

    def test_a_bias_of_trained_weights_passes_with_every_sample(self) -> None:
        encoder, decoder = self.passing("t5")[2], self.passing("t5")[6]
        assert encoder == [(6, 16), (1, 4, 6, 6), (6,)]
        assert decoder == [(6, 16), (6, 16), (1, 4, 6, 6), (1, 4, 6, 6)]

    def test_angles_of_positions_are_constants_of_each_block(self) -> None:
        model, inputs = made("llama")
        layers = decompose(model, product_loss, inputs).layers
        sizes = [layer.buffer_bytes for layer in layers]
        assert sizes == [0, *BLOCKS * [2 * 6 * 4 * 8], 0, 0, 0]  # cosine and sine of 6 positions and 4 channels


def test_gradients_stop_at_frozen_embeddings() -> None:
    model, inputs = made("llama")
    model.model.embed_tokens.requires_grad_(False)
    layers = decompose(model, product_loss, inputs).layers
    assert [layer.input_gradients for layer in layers[:3]] == [(False,), (False,), (True,)]


def test_dropout_marks_layers_as_random() -> None:
    model = gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.0)
    layers = decompose(model, product_loss, made("gpt2")[1]).layers
    assert [layer.random for layer in layers] == [True, *BLOCKS * [True], False, False, False]


def test_dropout_is_the_models() -> None:
    model = gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    inputs = made("gpt2")[1]
    layers = decompose(model, product_loss, inputs)
    torch.manual_seed(3)
    expected = model(tokens()).logits
    torch.manual_seed(3)
    assert torch.equal(through_layers(layers, inputs), expected)


def test_a_model_without_memory_is_cut_too() -> None:
    with torch.device("meta"):
        model = llama()
    layers = decompose(model, product_loss, made("llama")[1])
    assert len(layers) == BLOCKS + 4
    assert all(named.tensor.is_meta for layer in layers.layers for named in layer.parameters.values())


def test_gradient_checkpointing_is_refused() -> None:
    model = gpt2()
    model.activation_checkpointing_enable()
    with pytest.raises(ModelError, match="gradient checkpointing is on"):
        decompose(model.train(), product_loss, made("gpt2")[1])


def test_unused_parameters_are_refused_unless_frozen() -> None:
    model, inputs = made("gpt2")
    model.spare = torch.nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"outside its layers: spare\.weight, spare\.bias; nothing .* uses them"):
        decompose(model, product_loss, inputs)
    model.spare.requires_grad_(False)
    decompose(model, product_loss, inputs)
