"""Small models of every family, with a batch of two samples, in float64 and without dropout; and how to compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from executor.models.inputs import Inputs, call_model, logits_of
from executor.models.layers import LayerModel, decompose
from tests.executor.made import called

transformers.logging.set_verbosity_error()

BLOCKS = 3
SEQUENCE = 6
VOCABULARY = 11
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4, "max_position_embeddings": 8,
}  # fmt: skip


def tokens(seed: int = 0, samples: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (samples, SEQUENCE), generator=torch.Generator().manual_seed(seed))


def padding(samples: int = 2) -> Tensor:
    """A mask of whose samples the first is shorter than the others."""
    mask = torch.ones(samples, SEQUENCE, dtype=torch.int64)
    mask[0, 4:] = 0
    return mask


def _without_dropout(model: nn.Module) -> nn.Module:
    for part in model.modules():
        for name in ("p", "dropout", "attention_dropout", "attn_pdrop", "dropout_prob", "dropout_rate"):
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    return model.double().train()


def gpt2(**options: Any) -> nn.Module:
    sizes = {"n_layer": BLOCKS, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": VOCABULARY}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **_NO_TOKENS, **options}))


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**_SIZES))


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**_SIZES, **_NO_TOKENS, num_key_value_heads=2, **options)
    return transformers.LlamaForCausalLM(config)


def qwen2() -> nn.Module:
    config = transformers.Qwen2Config(**_SIZES, **_NO_TOKENS, num_key_value_heads=2)
    return transformers.Qwen2ForCausalLM(config)


def qwen3() -> nn.Module:
    config = transformers.Qwen3Config(
        **_SIZES, **_NO_TOKENS, num_key_value_heads=2, head_dim=4, tie_word_embeddings=True
    )
    return transformers.Qwen3ForCausalLM(config)


def vit() -> nn.Module:
    sizes = {key: value for key, value in _SIZES.items() if key not in ("vocab_size", "max_position_embeddings")}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=8, patch_size=4))


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[2, 1], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=4, d_ff=20, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def pixels() -> Tensor:
    return torch.randn(2, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gpt2": (gpt2, tokens()),
    "gpt2 eager": (lambda: gpt2(attn_implementation="eager"), tokens()),
    "gpt2 padded": (gpt2, {"input_ids": tokens(), "attention_mask": padding()}),
    "bert": (bert, tokens()),
    "bert padded": (bert, {"input_ids": tokens(), "attention_mask": padding(), "token_type_ids": padding()}),
    "llama": (llama, tokens()),
    "llama padded": (llama, {"input_ids": tokens(), "attention_mask": padding()}),
    "qwen2": (qwen2, tokens()),
    "qwen3": (qwen3, tokens()),
    "vit": (vit, pixels()[:, :, :8, :8]),
    "resnet": (resnet, pixels()),
    "t5": (t5, {"input_ids": tokens(), "decoder_input_ids": tokens(1)}),
}


def made(family: str) -> tuple[nn.Module, Inputs]:
    """A model of a family, and a batch."""
    make, inputs = FAMILIES[family]
    torch.manual_seed(0)
    return _without_dropout(make()), Inputs.of(inputs)


def product_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits * labels).mean()


def through_layers(layers: LayerModel, inputs: Inputs) -> Tensor:
    """The logits, layer by layer."""
    x = inputs.tensors
    for layer in layers.layers[:-1]:
        assert len(x) == len(layer.input_gradients)
        x = called(layer.module, x)
    (logits,) = x
    return logits


def check_equal(model: nn.Module, inputs: Inputs, close: float = 1e-10) -> LayerModel:
    """Cut the model: logits and gradients of all parameters are those of the model itself, and nothing changed it."""
    alone = copy.deepcopy(model)
    layers = decompose(model, product_loss, inputs)
    for name, tensor in alone.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name
    expected = logits_of(call_model(alone, inputs))
    logits = through_layers(layers, inputs)
    torch.testing.assert_close(logits, expected, rtol=0, atol=close)
    weights = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward(product_loss(expected, weights))
    torch.autograd.backward(product_loss(logits, weights))
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None, name
        else:
            torch.testing.assert_close(parameter.grad, other.grad, rtol=0, atol=close, msg=name)
    return layers
