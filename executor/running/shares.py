"""What a microbatch's loss counts for in the loss of its minibatch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sim.schedule import Interval

from ..errors import ModelError
from ..models.layers import LayerModel
from ..models.losses import IGNORED, ignored_labels, share_of


@dataclass(frozen=True)
class Shares:
    """The factor of each microbatch's loss: its share of the ``samples``, or, for a loss that is a sum over items, what
    each item counts for (``of_item``)."""

    samples: int
    of_item: float | None = None

    @classmethod
    def of(cls, model: LayerModel, labels: Tensor) -> Shares:
        """Of a minibatch with these labels (samples first). Raises ModelError if a mean would weigh them wrongly."""
        if model.items is not None:
            return cls(len(labels), share_of(float(model.items(labels))))
        ignored = ignored_labels(labels)
        if ignored is not None and len(set(ignored.reshape(len(labels), -1).sum(1).tolist())) > 1:
            raise ModelError(
                f"{int(ignored.sum())} of {labels.numel()} labels are {IGNORED}, more in some samples than in others, "
                "and the loss is taken for a mean over samples: give torch.nn.CrossEntropyLoss itself, or "
                "executor.SummedLoss(sum over the labels, how many there are)"
            )
        return cls(len(labels))

    def factor(self, samples: Interval) -> float:
        """Of a microbatch of these samples."""
        return (samples[1] - samples[0]) / self.samples if self.of_item is None else self.of_item
