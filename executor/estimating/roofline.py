"""How long operators take on a GPU: each as long as its arithmetic or its memory traffic, whichever is longer.

    operator = overhead(stage) + max(FLOPs / (peak · efficiency), bytes / (bandwidth · efficiency))

Efficiencies are those of the operator's kind. Small operators do not fill a GPU: of n FLOPs or bytes, efficiency is
n / (n + half) of what it is at best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from sim.units import NS_PER_S

from .counting import Kind, Operator, Stage, operators_of


@dataclass(frozen=True)
class Efficiency:
    """The share of a peak that is reached at best, and the size (FLOPs or bytes) at which half of that is."""

    best: float
    half: float = 0.0

    def seconds(self, amount: float, peak: float) -> float:
        """For an amount of FLOPs (bytes), at a peak in FLOP/s (bytes/s). Nothing takes no time."""
        return (amount + self.half) / (peak * self.best) if amount else 0.0


@dataclass(frozen=True)
class Roofline:
    """A GPU at work in one dtype: peaks in FLOP/s and bytes/s. ``arithmetic`` is keyed by kinds with FLOPs, ``traffic``
    by all. ``operator_s`` passes around each operator (launch, allocation), ``task_s`` around each piece of work."""

    flops: float
    bandwidth: float
    arithmetic: Mapping[Kind, Efficiency]
    traffic: Mapping[Kind, Efficiency]
    operator_s: Mapping[Stage, float]
    task_s: Mapping[Stage, float]

    def operator_seconds(self, operator: Operator) -> float:
        """How long one operator takes."""
        moving = self.traffic[operator.kind].seconds(operator.bytes, self.bandwidth)
        counted = operator.kind in self.arithmetic
        calculating = self.arithmetic[operator.kind].seconds(operator.flops, self.flops) if counted else 0.0
        return self.operator_s[operator.stage] + max(moving, calculating)

    def seconds(self, operators: Iterable[Operator]) -> float:
        """How long a piece of work takes that runs these operators, one after the other."""
        ran = list(operators)
        stages = {operator.stage for operator in ran}
        return sum(self.task_s[stage] for stage in stages) + sum(map(self.operator_seconds, ran))

    def clock(self, work: Callable[[], object]) -> int:
        """Do work on the meta device; returns how many nanoseconds it would take."""
        return round(self.seconds(operators_of(work)) * NS_PER_S)
