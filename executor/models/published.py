"""Models by name, at the sizes that were published, and small ones to try things with.

Sizes come from the models' own configurations on huggingface.co unless said otherwise. Harmony's are those of its
published artifact (github.com/msr-fiddle/harmony): BERT with 96 layers, GPT-2 from 10 to 100 billion parameters (500
blocks of width 4096), VGG with 416 and ResNet with 1026 weighted layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from .data import (
    BatchFunction,
    class_loss,
    image_batches,
    labelled_text_batches,
    next_token_loss,
    text_batches,
    vector_batches,
)
from .losses import LossFunction
from .vision import CHANNELS, resnet, vgg

IMAGE_SIZE = 224
IMAGE_CLASSES = 1000
SEQUENCE = 1024
"""Tokens of a sample where a model could take more."""

_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class Tokens(NamedTuple):
    """How many tokens a sample has where nothing else is asked for, and how many the model takes at most."""

    usual: int
    most: int


@dataclass(frozen=True)
class Task:
    """What a model is trained for: its loss, and how batches are made; those of text, of so many tokens a sample."""

    loss_fn: LossFunction
    batches: Callable[..., BatchFunction]
    tokens: Tokens | None = None


@dataclass(frozen=True)
class Published:
    """A model by name: how to make it, and what it is trained for. ``source`` says where sizes are from."""

    model: Callable[[], nn.Module]
    task: Task
    source: str


def transformer(family: str, head: str, options: Mapping[str, Any]) -> nn.Module:
    """A model of transformers with random weights, such as ``GPT2LMHeadModel`` of ``GPT2Config``, in training mode."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**options)
    model: nn.Module = getattr(transformers, f"{family}{head}")(config)
    return model.train()


def _causal(family: str, head: str, tokens: Tokens, source: str, **options: Any) -> Published:
    model = partial(transformer, family, head, {**_NO_TOKENS, **options})
    return Published(model, Task(next_token_loss, text_batches, tokens), source)


def _gpt2(
    blocks: int,
    width: int,
    heads: int,
    source: str,
    *,
    sequence: int = 1024,
    vocabulary: int = 50257,
    dropout: float = 0.1,
) -> Published:
    return _causal(
        "GPT2", "LMHeadModel", Tokens(sequence, sequence), source,
        n_layer=blocks, n_embd=width, n_head=heads, n_positions=sequence, vocab_size=vocabulary,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip


def _bert(blocks: int, source: str) -> Published:
    sequence, classes = 512, 2
    options = {
        "num_hidden_layers": blocks, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
        "max_position_embeddings": sequence, "vocab_size": 30522, "num_labels": classes,
    }  # fmt: skip
    model = partial(transformer, "Bert", "ForSequenceClassification", options)
    batches = partial(labelled_text_batches, classes=classes)
    return Published(model, Task(class_loss, batches, Tokens(sequence, sequence)), source)


def _images(model: Callable[[], nn.Module], source: str) -> Published:
    return Published(model, Task(class_loss, partial(image_batches, CHANNELS, IMAGE_SIZE, IMAGE_CLASSES)), source)


def _mlp(features: int, width: int, hidden_layers: int, classes: int) -> Published:
    def model() -> nn.Sequential:
        widths = [features] + hidden_layers * [width]
        hidden = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
        return nn.Sequential(*hidden, nn.Linear(width, classes))

    return Published(model, Task(class_loss, partial(vector_batches, features, classes)), "ours")


_HARMONY = "Harmony's artifact"
_QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
          "max_position_embeddings": 40960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip

PUBLISHED: dict[str, Published] = {
    "mlp": _mlp(features=64, width=256, hidden_layers=4, classes=10),
    "gpt2-demo": _gpt2(16, 256, 4, "ours", sequence=128, vocabulary=256, dropout=0.0),
    "gpt2": _gpt2(12, 768, 12, "openai-community/gpt2"),
    "gpt2-medium": _gpt2(24, 1024, 16, "openai-community/gpt2-medium"),
    "gpt2-xl": _gpt2(48, 1600, 25, "openai-community/gpt2-xl"),
    **{f"gpt2-{billions}b": _gpt2(5 * billions, 4096, 32, _HARMONY) for billions in range(10, 101, 10)},
    "bert-large": _bert(24, "google-bert/bert-large-uncased, with a head for two classes"),
    "bert96": _bert(96, _HARMONY),
    "vgg416": _images(partial(vgg, (82, 82, 83, 83, 83)), _HARMONY),
    "resnet1026": _images(partial(resnet, (128, 128, 128, 128)), _HARMONY),
    "llama3.1-8b": _causal(
        "Llama", "ForCausalLM", Tokens(SEQUENCE, 131072), "meta-llama/Llama-3.1-8B",
        num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, rms_norm_eps=1e-5, max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "qwen3-1.7b": _causal(
        "Qwen3", "ForCausalLM", Tokens(SEQUENCE, 40960), "Qwen/Qwen3-1.7B", **_QWEN3,
        num_hidden_layers=28, hidden_size=2048, intermediate_size=6144, num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-32b": _causal(
        "Qwen3", "ForCausalLM", Tokens(SEQUENCE, 40960), "Qwen/Qwen3-32B", **_QWEN3,
        num_hidden_layers=64, hidden_size=5120, intermediate_size=25600, num_attention_heads=64,
        tie_word_embeddings=False,
    ),
}  # fmt: skip
