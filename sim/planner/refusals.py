"""Why plans of a search were refused, each reason with its nearest miss."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from traces.errors import HarmonyError

from ..errors import DoesNotFit
from ..plan import Policy


class Reason(Enum):
    """What a plan was refused for."""

    PACKS = "no cut into packs fits the GPU"
    GPU = "does not fit the GPU's memory when laid out"
    HOST = "does not fit the host's memory"
    PLAN = "contradicts itself, the trace or the machine"


@dataclass(frozen=True)
class Refusal:
    """So many candidates of one policy, refused for one reason; ``nearest`` is the error that was nearest to a fit."""

    policy: Policy
    reason: Reason
    count: int
    nearest: HarmonyError

    def line(self) -> str:
        """As a sentence."""
        return f"{self.policy.value}: {self.count} x {self.reason.value}; nearest miss: {self.nearest}"

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        figures: dict[str, Any] = {
            "policy": self.policy.value,
            "reason": self.reason.value,
            "count": self.count,
            "nearest_miss": str(self.nearest),
        }
        if isinstance(self.nearest, DoesNotFit):
            figures |= {"needed_bytes": self.nearest.needed, "cap_bytes": self.nearest.cap}
        return figures


class Refusals:
    """Collects refusals."""

    def __init__(self) -> None:
        self._counts: dict[tuple[Policy, Reason], int] = {}
        self._nearest: dict[tuple[Policy, Reason], HarmonyError] = {}

    def add(self, policy: Policy, reason: Reason, error: HarmonyError, count: int = 1) -> None:
        """Note that ``count`` candidates were refused with an error like this."""
        key = policy, reason
        self._counts[key] = self._counts.get(key, 0) + count
        nearest = self._nearest.get(key)
        if nearest is None or _excess(error) < _excess(nearest):
            self._nearest[key] = error

    def add_built(self, policy: Policy, error: HarmonyError) -> None:
        """Note that a plan was refused when it was built."""
        if isinstance(error, DoesNotFit):
            self.add(policy, Reason.HOST if error.gpu is None else Reason.GPU, error)
        else:
            self.add(policy, Reason.PLAN, error)

    def count(self, policy: Policy) -> int:
        """How many of this policy were refused so far."""
        return sum(count for (each, _), count in self._counts.items() if each is policy)

    def list(self) -> tuple[Refusal, ...]:
        """All of them, in the order in which they first came."""
        return tuple(Refusal(*key, count, self._nearest[key]) for key, count in self._counts.items())


def _excess(error: HarmonyError) -> float:
    """Bytes by which something did not fit; a plan that is wrong is no near miss."""
    return error.needed - error.cap if isinstance(error, DoesNotFit) else float("inf")
