"""What to doubt of a trace: durations that varied while they were measured, and what it cannot see at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .schema import Provenance, TimeRow, Trace

NOISY = 0.2
"""A duration whose interquartile range is above this part of it is noisy."""


@dataclass(frozen=True)
class Noise:
    """Noisy durations: how many ``rows`` of all measured ones, their share of all measured time, and the one that
    matters most, with its layer's name."""

    rows: int
    of: int
    share_of_time: float
    worst: TimeRow
    layer: str

    def __str__(self) -> str:
        row = self.worst
        where = f" at {row.microbatch} samples" if row.microbatch else ""
        return (
            f"{self.rows} of {self.of} durations, {self.share_of_time:.0%} of the time, vary by more than {NOISY:.0%} "
            f"(interquartile range), most of all {row.phase.value} of {self.layer}{where}: {row.duration_ns / 1e6:.3g} "
            f"ms, give or take {row.spread_ns / 2e6:.2g}; close other programs, or measure longer (--budget, --repeats)"
        )


def noise(trace: Trace) -> Noise | None:
    """The noise of what was measured; None if there is none."""
    measured = [row for row in trace.times if row.provenance is Provenance.MEASURED]
    noisy = [row for row in measured if row.spread_ns > NOISY * row.duration_ns]
    if not noisy:
        return None
    worst = max(noisy, key=lambda row: row.spread_ns)
    total = sum(row.duration_ns for row in measured)
    share = sum(row.duration_ns for row in noisy) / total if total else 0.0
    return Noise(len(noisy), len(measured), share, worst, trace.layers[worst.layer].name)


def blind_spots(trace: Trace) -> tuple[str, ...]:
    """What the trace says nothing of, and a prediction from it therefore leaves out, in words."""
    sources = {row.provenance for row in trace.times}
    found: list[str] = []
    if Provenance.MEASURED in sources:
        found += _of_measured(trace)
    if Provenance.MODELLED in sources:
        found.append("durations that are modelled, not measured: the device itself may be faster or slower")
    largest = max([row.microbatch for row in trace.sizes], default=0)
    found.append(f"microbatches of more than {largest} samples; plans with such need a profile of them")
    of = f" ({trace.sample})" if trace.sample else ""
    found.append(f"samples of another length than those here{of}, and layers whose cost depends on what they hold")
    return tuple(found)


def _of_measured(trace: Trace) -> Sequence[str]:
    """A layer was alone on its device, with nothing else to do."""
    found = ["what calculations lose to copies that run beside them, and to a device that gets hot"]
    if trace.device == "cpu":
        found.append("memory that one operator takes for itself while it runs (what operators return is counted)")
        found.append("updates and memory of a real GPU: this is the processor, which plays emulated ones")
    else:
        found.append("what the memory allocator loses to rounding and gaps")
    return found
