"""What a step may be given: a batch in one of its usual forms, or several that make up a minibatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import DifferentModel, WorkloadError
from ..models.inputs import Inputs

LABELS = "labels"
"""The key of the labels in a batch that is one dictionary, as transformers' data collators make it."""


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and labels, samples first."""

    inputs: Inputs
    labels: Tensor

    @staticmethod
    def of(inputs: Any, labels: Tensor | None = None) -> Batch:
        """From inputs and labels; or from one value: a dictionary that holds "labels" beside the inputs, or a pair of
        inputs and labels. Raises WorkloadError."""
        if labels is None:
            if hasattr(inputs, "items") and LABELS in inputs:
                named = dict(inputs.items())
                labels = named.pop(LABELS)
                inputs = named
            elif isinstance(inputs, tuple | list) and len(inputs) == 2:
                inputs, labels = inputs
        if not isinstance(labels, Tensor):
            raise WorkloadError(
                f"the batch has no labels ({_described(inputs)}); give inputs and labels, a pair of them, or one "
                f'dictionary that holds "{LABELS}", all of them tensors'
            )
        batch = Batch(Inputs.of(inputs), labels)
        batch.check()
        return batch

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self.labels)

    def first(self, samples: int) -> Batch:
        """The same of fewer samples."""
        return Batch(self.inputs.map(lambda tensor: tensor[:samples]), self.labels[:samples])

    def check(self) -> None:
        """Raises WorkloadError unless all tensors are of the same number of samples."""
        if self.labels.ndim == 0 or any(
            tensor.ndim == 0 or len(tensor) != self.samples for tensor in self.inputs.tensors
        ):
            raise WorkloadError(
                f"the batch's inputs have shapes {self.inputs.shapes}, its labels {tuple(self.labels.shape)}; the "
                "first dimension of all of them must be the samples"
            )

    def check_makes_up(self, minibatch: int) -> None:
        """Raises DifferentModel unless it has as many samples."""
        if self.samples < minibatch:
            raise DifferentModel(
                f"a step has {self.samples} samples, the schedule is for minibatches of {minibatch}; give several "
                "batches that make it up (step_on), and leave out what is left of an epoch: DataLoader(…, "
                "drop_last=True)"
            )
        if self.samples > minibatch:
            raise DifferentModel(
                f"a step has {self.samples} samples, the schedule is for minibatches of {minibatch}; give smaller "
                f"batches, or plan again for {self.samples}"
            )


def joined(batches: Sequence[Batch]) -> Batch:
    """One batch of the samples of all. Raises WorkloadError if they differ in more than their number."""
    if not batches:
        raise WorkloadError("no batch is given; a step needs at least one")
    first, *others = batches
    if not others:
        return first
    for other in others:
        if _sample_of(other) != _sample_of(first):
            raise WorkloadError(
                f"batches of one step must be alike but for their number of samples: one has inputs of shapes "
                f"{first.inputs.shapes} and labels {tuple(first.labels.shape)}, another {other.inputs.shapes} and "
                f"{tuple(other.labels.shape)}; pad them to the same length"
            )
    columns = zip(*(batch.inputs.tensors for batch in batches), strict=True)
    inputs = Inputs(tuple(torch.cat(column) for column in columns), first.inputs.names)
    return Batch(inputs, torch.cat([batch.labels for batch in batches]))


def _sample_of(batch: Batch) -> Any:
    tensors = (*batch.inputs.tensors, batch.labels)
    return batch.inputs.names, [(tensor.shape[1:], tensor.dtype) for tensor in tensors]


def _described(given: object) -> str:
    if hasattr(given, "keys"):
        return f"a dictionary of {', '.join(map(str, given.keys()))}"
    return f"one {type(given).__name__}"
