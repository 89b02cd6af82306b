"""What the calculations of one step share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from sim.schedule import Interval

from ..errors import NonFiniteLoss
from .parts import WeightPart
from .recording import Recording
from .shares import Shares


@dataclass(frozen=True)
class LossPart:
    """The loss of one microbatch, and the factor that it counts with."""

    first_sample: int
    factor: float
    loss: Tensor


@dataclass(frozen=True)
class StepContext:
    """What the calculations of one step share. Random layers draw from ``seed`` and the step's ``number``. ``losses``
    fills up; ``recordings`` are forwards whose backwards do not repeat them, ``weight_parts`` the second parts of
    backwards, by GPU, that have done their first. With ``checks_memory`` workspaces are measured."""

    number: int
    seed: int
    shares: Shares
    checks_memory: bool
    losses: list[LossPart] = field(default_factory=list)
    recordings: dict[tuple[range, Interval], Recording] = field(default_factory=dict)
    weight_parts: dict[tuple[int, range, Interval], WeightPart] = field(default_factory=dict)

    @cached_property
    def losses_are_finite(self) -> bool:
        """True. Ask when all losses are there, as they are before the first update: every gradient needs them all.

        Raises NonFiniteLoss if one is infinite or no number.
        """
        for device in {part.loss.device for part in self.losses if part.loss.is_cuda}:
            torch.cuda.synchronize(device)  # they are enqueued by now, maybe in other queues
        for part in sorted(self.losses, key=lambda part: part.first_sample):
            if not math.isfinite(value := part.loss.item()):
                raise NonFiniteLoss(self.number, part.first_sample, value)
        return True

    def loss(self) -> float:
        """The loss of the minibatch, once the step has ended; added in the order of the samples."""
        parts = sorted(self.losses, key=lambda part: part.first_sample)
        return sum([part.factor * part.loss.item() for part in parts])
