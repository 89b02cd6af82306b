"""What the calculations of one step share, and what becomes of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from sim.errors import ScheduleError
from sim.schedule import Interval

from ..devices.facade import Mark, Queue
from ..errors import NonFinite, NonFiniteGradient, NonFiniteLoss
from .gradients import GradientNorm
from .parts import WeightPart
from .recording import Recording
from .rules import UpdateRule
from .shares import Shares


@dataclass(frozen=True)
class LossPart:
    """The loss of one microbatch (there when ``known`` is passed), and the factor that it counts with."""

    samples: Interval
    factor: float
    loss: Tensor
    known: Mark


@dataclass(frozen=True)
class StepContext:
    """What the calculations of one step share. Random layers draw from ``seed`` and the step's ``number``. With
    ``checks_memory`` workspaces are measured. ``host`` is a queue of the host. ``before``: the step before, if steps
    overlap.

    ``losses`` fills up; ``norms`` gets the norm of the gradient, if the schedule takes it; ``recordings`` are forwards
    whose backwards do not repeat them, ``weight_parts`` the second parts of backwards, by GPU, that have done their
    first.
    """

    number: int
    seed: int
    shares: Shares
    checks_memory: bool
    rule: UpdateRule
    host: Queue
    before: StepContext | None = None
    losses: list[LossPart] = field(default_factory=list)
    norms: list[GradientNorm] = field(default_factory=list)
    recordings: dict[tuple[range, Interval], Recording] = field(default_factory=dict)
    weight_parts: dict[tuple[int, range, Interval], WeightPart] = field(default_factory=dict)

    def loss(self) -> float:
        """The loss of the minibatch, once the step has ended; added in the order of the samples."""
        return sum([part.factor * part.loss.item() for part in self._sorted_losses()])

    @property
    def norm(self) -> float | None:
        """The norm of the gradient, unscaled, as soon as it is taken; None if the schedule does not take it."""
        return self.norms[0].value if self.norms else None

    def update_factor(self) -> float | None:
        """What gradients are multiplied by before an update; None: the step updates nothing."""
        return None if self.problem is not None else self.rule.factor(self.norm)

    @cached_property
    def problem(self) -> NonFinite | None:
        """Why the step updates nothing, if so: it, or one before it that it overlaps, has a loss or a gradient that is
        not finite.

        To be asked when all losses are known, and the norm, if the schedule takes it. Raises ScheduleError if it is
        asked before the last microbatch's loss is on its way.
        """
        if self.before is not None and self.before.problem is not None:
            return self.before.problem
        losses = self._sorted_losses()
        known = sum(stop - start for start, stop in (part.samples for part in losses))
        if (unknown := self.shares.samples - known) > 0:
            raise ScheduleError((f"the losses of {unknown} samples are not known before an update",))
        for part in losses:
            self.host.wait(part.known)
            if not math.isfinite(value := part.loss.item()):
                return NonFiniteLoss(self.number, part.samples, value)
        for norm in self.norms:
            if not math.isfinite(norm.value):
                return NonFiniteGradient(self.number, norm.value, norm.culprit, self.rule.loss_scale)
        return None

    def _sorted_losses(self) -> list[LossPart]:
        return sorted(self.losses, key=lambda part: part.samples)
