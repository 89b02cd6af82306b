"""Deterministic batches, so that nothing is downloaded: language models read the bytes of Python's own standard
library, image models see noise."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .losses import IGNORED, SummedLoss

BatchFunction = Callable[[int, int], tuple[Any, Tensor]]
"""(samples, seed) → (inputs, labels), batch dimension first; the same arguments give the same batch. Inputs are a
tensor, a tuple of tensors, or a dictionary of them by the names of the model's arguments."""

_THUMBNAIL = 7  # pixels each way


def _each_token(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)


next_token_loss = SummedLoss(_each_token, lambda labels: (labels != IGNORED).sum())
"""Cross entropy of logits [batch, sequence, vocabulary] against the next tokens [batch, sequence]: the mean over those
that are not -100."""


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of logits [batch, classes] against classes [batch]."""
    return nn.functional.cross_entropy(logits, labels)


@cache
def _corpus() -> Tensor:
    """The standard library's top-level sources, joined in order of their names: bytes, as uint8 [n]."""
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(source.read_bytes() for source in sources)), dtype=torch.uint8)


def _text(samples: int, length: int, seed: int) -> Tensor:
    """Consecutive bytes of source text from random places: int64 [samples, length]."""
    corpus = _corpus()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(corpus) - length + 1, (samples, 1), generator=generator)
    return corpus[starts + torch.arange(length)].long()


def text_batches(sequence: int) -> BatchFunction:
    """Source text: int64 [n, sequence] twice, the labels being the bytes that follow."""

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        text = _text(samples, sequence + 1, seed)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return batch


def labelled_text_batches(sequence: int, classes: int) -> BatchFunction:
    """Source text, int64 [n, sequence], with a class: the byte that follows, modulo ``classes``; int64 [n]."""

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        text = _text(samples, sequence + 1, seed)
        return text[:, :-1].contiguous(), text[:, -1] % classes

    return batch


def continued_text_batches(sequence: int) -> BatchFunction:
    """For an encoder and a decoder: source text, and the text that follows; labels are the decoder's next bytes."""

    def batch(samples: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        text = _text(samples, 2 * sequence + 1, seed)
        inputs = {"input_ids": text[:, :sequence], "decoder_input_ids": text[:, sequence:-1]}
        return {name: tensor.contiguous() for name, tensor in inputs.items()}, text[:, sequence + 1 :].contiguous()

    return batch


def vector_batches(features: int, classes: int) -> BatchFunction:
    """Normal vectors [n, features], labelled by the largest of ``classes`` fixed random projections: int64 [n]."""
    projection = torch.randn(features, classes, generator=torch.Generator().manual_seed(0))

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(samples, features, generator=torch.Generator().manual_seed(seed))
        return inputs, (inputs @ projection).argmax(1)

    return batch


def image_batches(channels: int, size: int, classes: int) -> BatchFunction:
    """Normal images [n, channels, size, size], labelled as :func:`vector_batches` does, by a thumbnail of each."""
    thumbnail = min(size, _THUMBNAIL)
    projection = torch.randn(channels * thumbnail**2, classes, generator=torch.Generator().manual_seed(0))

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(samples, channels, size, size, generator=torch.Generator().manual_seed(seed))
        thumbnails = nn.functional.adaptive_avg_pool2d(images, thumbnail).flatten(1)
        return images, (thumbnails @ projection).argmax(1)

    return batch
