"""Losses over items that microbatches hold different numbers of, such as labels that are not padding.

A mean over the samples weighs each microbatch by its samples. That is wrong for a mean over labels of which some are
ignored: there, the sum counts, and how many items the whole minibatch has. :class:`SummedLoss` says both. Torch's own
cross entropy says them by itself, and is taken so wherever it is given.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

IGNORED = -100
"""What torch's cross entropy leaves out, unless it is told otherwise."""

LossFunction = Callable[[Tensor, Tensor], Tensor]
"""(output of the last layer, labels) → scalar."""

Items = Callable[[Tensor], Tensor | float]
"""labels → how many items they hold; for weighted items, their weight."""


@dataclass(frozen=True)
class SummedLoss:
    """The mean over items: ``total(outputs, labels)`` over ``items(labels)``, both of a whole minibatch. The total may
    be what each item adds, which is then added up, in float32 at least.

    A microbatch without items adds 0, and so does a minibatch.

    >>> loss = SummedLoss(nn.CrossEntropyLoss(reduction="sum"), lambda labels: (labels != -100).sum())
    >>> float(loss(torch.zeros(3, 2), torch.tensor([1, -100, -100])))  # the logarithm of 2
    0.6931471824645996
    """

    total: LossFunction
    items: Items

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch by itself."""
        return added(self.total(outputs, labels)) * share_of(float(self.items(labels)))


def added(losses: Tensor) -> Tensor:
    """The sum. Of half precision in float32: sums in float16 end at 65504."""
    return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32)) if losses.ndim else losses


def share_of(items: float) -> float:
    """What each item counts for among so many."""
    return 1 / items if items else 0.0


def as_summed(loss_fn: LossFunction) -> SummedLoss | None:
    """A loss as a sum and a number of items, where its class tells; None for one that is taken for a mean."""
    match loss_fn:
        case SummedLoss():
            return loss_fn
        case nn.CrossEntropyLoss() | nn.NLLLoss() if loss_fn.reduction == "mean":
            each = copy.copy(loss_fn)  # with the same class weights
            each.reduction = "none"
            return SummedLoss(each, _LabelItems(loss_fn.ignore_index, loss_fn.weight))
        case _ if loss_fn is nn.functional.cross_entropy:
            return as_summed(nn.CrossEntropyLoss())
        case _ if loss_fn is nn.functional.nll_loss:
            return as_summed(nn.NLLLoss())
        case _:
            return None


@dataclass(frozen=True)
class _LabelItems:
    """The items of torch's cross entropy: labels that are not ignored, or their class weights."""

    ignored: int
    weight: Tensor | None

    def __call__(self, labels: Tensor) -> Tensor | float:
        if labels.is_floating_point():  # probabilities [samples, classes, …], of which none is ignored
            return labels.numel() / labels.shape[1] if labels.ndim > 1 else 1.0
        valid = labels[labels != self.ignored]
        return valid.numel() if self.weight is None else self.weight[valid].sum()


def ignored_labels(labels: Tensor) -> Tensor | None:
    """Which labels are what torch leaves out by default; None if none are."""
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        return None
    found = labels == IGNORED
    return found if bool(found.any()) else None
