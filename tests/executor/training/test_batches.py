from __future__ import annotations

import pytest
import torch
from transformers import BatchEncoding

from executor.errors import WorkloadError
from executor.training.batches import Batch, joined
from tests.executor.trained import MINIBATCH, chain
from tests.executor.training.loops import ON_CPU, trainer_of


def test_a_batch_has_labels() -> None:
    workload = chain()
    trainer = trainer_of(workload, ON_CPU)
    inputs, labels = workload.batch(MINIBATCH, 0)
    assert trainer.evaluate([inputs, labels]) == trainer.evaluate(inputs, labels)
    with pytest.raises(WorkloadError, match="no labels"):
        trainer.step(inputs)
    with pytest.raises(WorkloadError, match="a dictionary of x"):
        trainer.step({"x": inputs})
    with pytest.raises(WorkloadError, match=r"shapes \(8, 6\), its labels \(7,\)"):
        trainer.step(inputs, labels[1:])


def test_batches_are_joined_along_their_samples() -> None:
    parts = [
        Batch.of({"b": torch.full((n, 2), n), "a": torch.full((n,), -n), "labels": torch.arange(n)}) for n in (1, 2)
    ]
    whole = joined(parts)
    assert whole.samples == 3
    assert whole.inputs.names == ("a", "b")
    assert [tensor.tolist() for tensor in whole.inputs.tensors] == [[-1, -2, -2], [[1, 1], [2, 2], [2, 2]]]
    assert whole.labels.tolist() == [0, 0, 1]
    assert whole.first(2).labels.tolist() == [0, 0]


def test_batches_of_one_step_are_alike() -> None:
    with pytest.raises(WorkloadError, match=r"\(2, 5\) and labels \(2,\), another \(2, 4\) and \(2,\); pad them"):
        joined([Batch.of(torch.zeros(2, width), torch.zeros(2)) for width in (5, 4)])
    with pytest.raises(WorkloadError, match="no batch is given"):
        joined([])


def test_a_batch_of_transformers_is_a_dictionary() -> None:
    encoded = BatchEncoding({"input_ids": torch.ones(2, 3), "labels": torch.zeros(2, 3)})
    assert Batch.of(encoded).inputs.names == ("input_ids",)
