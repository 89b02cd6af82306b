from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from executor.models.data import image_batches, labelled_text_batches, next_token_loss, text_batches


class TestText:
    def test_labels_are_the_next_bytes_of_source_text(self):
        inputs, labels = text_batches(64)(8, 3)
        assert inputs.dtype == labels.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], labels[:, :-1])
        library = b"".join(path.read_bytes() for path in sorted(Path(json.__file__).parent.parent.glob("*.py")))
        for row, last in zip(inputs.tolist(), labels[:, -1].tolist(), strict=True):
            assert bytes([*row, last]) in library

    def test_batches_depend_on_their_seed_alone(self):
        batch = text_batches(16)
        assert torch.equal(batch(4, 1)[0], batch(4, 1)[0])
        assert not torch.equal(batch(4, 1)[0], batch(4, 2)[0])

    def test_the_loss_of_even_logits_is_the_entropy(self):
        loss = next_token_loss(torch.zeros(2, 3, 7), torch.zeros(2, 3, dtype=torch.int64))
        assert loss.item() == pytest.approx(torch.tensor(7.0).log().item())

    def test_a_class_is_the_byte_behind_the_text(self):
        text, following = text_batches(16)(8, 3)
        labelled, labels = labelled_text_batches(16, 5)(8, 3)
        assert torch.equal(labelled, text)
        assert torch.equal(labels, following[:, -1] % 5)


def test_images_have_labels_of_their_own():
    images, labels = image_batches(3, 16, 10)(64, 1)
    assert images.shape == (64, 3, 16, 16)
    assert len(labels.unique()) > 5
    again, same = image_batches(3, 16, 10)(64, 1)
    assert torch.equal(images, again)
    assert torch.equal(labels, same)
