"""How the gradients of a step become its update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from sim.schedule import Schedule, TaskKind

from ..errors import NonFinite, NonFiniteLoss, RuleError

_CLIP_EPSILON = 1e-6
"""As in ``torch.nn.utils.clip_grad_norm_``."""


class Skip(Enum):
    """Which steps change nothing, where they would be an error: none; those with a loss that is not finite; or also
    those with a gradient that is not."""

    NEVER = "never"
    LOSS = "loss"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class UpdateRule:
    """What happens to gradients before an update. Raises RuleError for numbers that make no sense.

    ``max_norm``: if the 2-norm of the whole model's gradient is larger, all gradients are scaled down to it.
    ``loss_scale``: gradients are those of so many times the loss, and are divided by it before the update; half
    precision needs that where they are tiny. Losses and norms are told unscaled. ``skip``: which steps change nothing.
    """

    max_norm: float | None = None
    loss_scale: float = 1.0
    skip: Skip = Skip.NEVER

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.max_norm is not None and not self.max_norm > 0:
            raise RuleError(f"max_norm is {self.max_norm}; it must be more than 0, or None not to clip")
        if not 0 < self.loss_scale < math.inf:
            raise RuleError(f"loss_scale is {self.loss_scale}; it must be more than 0, and 1 not to scale")

    @property
    def needs_norm(self) -> bool:
        """Whether it asks for the norm of the whole gradient before the first update."""
        return self.max_norm is not None or self.skip is Skip.GRADIENT

    def check(self, schedule: Schedule) -> None:
        """Raises RuleError if the schedule does not know the norm before its first update, and the rule needs it."""
        needs = [] if self.max_norm is None else [f"max_norm={self.max_norm}"]
        needs += [f"skip={self.skip}"] if self.skip is Skip.GRADIENT else []
        if needs and not any(schedule.copies(TaskKind.NORM)):
            raise RuleError(
                f"{' and '.join(needs)} needs the norm of the whole gradient before the first update, and this "
                f"{schedule.plan.policy.value} schedule does not take it; plan again with --update-when end, which "
                "harmony-dp, harmony-pp and zero3-offload plans have"
            )

    def skips(self, problem: NonFinite) -> bool:
        """Whether a step with this problem is skipped; else it is an error."""
        return self.skip is Skip.GRADIENT or (self.skip is Skip.LOSS and isinstance(problem, NonFiniteLoss))

    def factor(self, norm: float | None) -> float:
        """What gradients are multiplied by; ``norm`` is that of the whole gradient, unscaled, if it is known."""
        clip = 1.0
        if self.max_norm is not None and norm is not None:
            clip = min(1.0, self.max_norm / (norm + _CLIP_EPSILON))
        return clip / self.loss_scale
