"""How far estimates for a GTX 1080 Ti are from what was measured there: whole models, at some microbatch sizes.

Also what the coefficients would be if they were fitted now (as those in ``executor/estimating/gpus.py`` were), and how
far off each family of models is when the others alone are fitted to. Needs the measured profiles beside this checkout.

    python benchmarks/bench_estimates.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from gpu_references import BOTH, FORWARD, MEASURED, REFERENCES, Kinds, Reference
from numpy.typing import NDArray
from rich.console import Console

from executor.estimating.counting import Kind, Operator, Stage, operators_of
from executor.estimating.estimate import estimate
from executor.estimating.gpus import KnownGpu, known_gpu
from executor.estimating.roofline import Roofline
from sim.tables import Table
from traces.schema import Phase

GPU = known_gpu("GTX 1080 Ti")
CALCULATED = (Kind.MATMUL, Kind.BATCHED_MATMUL, Kind.CONVOLUTION, Kind.CONVOLUTION_BACKWARD)
STEADY = 0.1
"""Errors of totals weigh more than in proportion beyond this."""
BELIEF = {"batched_matmul": 1.0, "stream": 0.5}
"""How strongly a coefficient is held to the guess, in parts of one relative error; the tables hardly tell these two."""

Floats = NDArray[np.float64]

GUESS = np.array([0.75, 0.8, 1.0, 0.8, *[5e7] * 4, 0.85, 0.5, 2e5, *(1e-5, 3e-5, 4e-5), *(1e-4, 2e-4, 3e-4)])
"""Where fits start, which must know nothing of the models that are held back."""


@dataclass(frozen=True)
class Coefficients:
    """What is fitted, in the order of ``names``."""

    names = (
        *(kind.value for kind in CALCULATED),
        *(f"half {kind.value}" for kind in CALCULATED),
        "stream",
        "reduction",
        "half traffic",
        *(f"operator {stage.value}" for stage in Stage),
        *(f"task {stage.value}" for stage in Stage),
    )

    @staticmethod
    def of(gpu: KnownGpu) -> Floats:
        """Those of a GPU."""
        arithmetic = [gpu.arithmetic[kind] for kind in CALCULATED]
        stream, reduction = gpu.traffic[Kind.ELEMENTWISE], gpu.traffic[Kind.REDUCTION]
        return np.array(
            [each.best for each in arithmetic]
            + [each.half for each in arithmetic]
            + [stream.best, reduction.best, stream.half]
            + [gpu.operator_s[stage] for stage in Stage]
            + [gpu.task_s[stage] for stage in Stage]
        )


@dataclass(frozen=True)
class _Listening(Roofline):
    """Its clock keeps what runs, and says which call it was instead of how long it took."""

    heard: Any = None

    def clock(self, work: Callable[[], object]) -> int:
        self.heard.append(operators_of(work))
        return len(self.heard)


@cache
def _heard(kinds: Kinds) -> dict[tuple[int, str, int], list[Operator]]:
    """The operators of each layer, pass and size."""
    heard: list[list[Operator]] = []

    class Ear(KnownGpu):
        def roofline(self, dtype: str) -> Roofline:
            return _Listening(**vars(GPU.roofline(dtype)), heard=heard)

    times = estimate(kinds.make(), Ear(**vars(GPU)), microbatches=kinds.microbatches).times
    call = {(row.layer, row.phase, row.microbatch): row.duration_ns for row in times}
    found = {}
    for (layer, phase, u), at in call.items():
        if phase is Phase.FORWARD:
            found[layer, FORWARD, u] = heard[at - 1]
            found[layer, BOTH, u] = heard[at + call[layer, Phase.BACKWARD, u] - 1]
    return found


class Fit:
    """All that some models ran, and what it took."""

    def __init__(self, references: Sequence[Reference]) -> None:
        self.keys: list[tuple[str, str, int]] = []
        totals, rows = [], []
        for reference in references:
            measured = reference.measured()
            heard = _heard(reference.kinds)
            for timed, seconds in measured.items():
                if timed[1] not in reference.kinds.microbatches:
                    continue
                row = len(self.keys)
                self.keys.append((reference.name, *timed))
                totals.append(seconds)
                for layer, times in enumerate(reference.repeats):
                    operators = heard[layer, timed[0], timed[1]]
                    stages = {operator.stage for operator in operators}
                    rows += [(row, times, op.kind, op.stage, op.flops, op.bytes, 0) for op in operators]
                    rows += [(row, times, Kind.ELEMENTWISE, stage, 0, 0, 1) for stage in stages]
        self.measured = np.array(totals)
        row, times, kinds, stages, flops, moved, task = zip(*rows, strict=True)
        self._row, self._times = np.array(row), np.array(times, dtype=float)
        self._kind = np.array([CALCULATED.index(kind) if kind in CALCULATED else -1 for kind in kinds])
        self._slow = np.array([kind is Kind.REDUCTION for kind in kinds])
        self._stage = np.array([list(Stage).index(stage) for stage in stages])
        self._flops, self._bytes = np.array(flops, dtype=float), np.array(moved, dtype=float)
        self._task = np.array(task, dtype=bool)
        models = [name for name, _, _ in self.keys]
        self._weight = np.array([models.count(name) ** -0.5 for name in models])

    def errors(self, coefficients: Floats) -> Floats:
        """Relative, of the totals."""
        best, half = coefficients[:4], coefficients[4:8]
        stream, reduction, half_traffic = coefficients[8:11]
        calculating = np.where(
            (self._kind >= 0) & (self._flops > 0),
            (self._flops + half[self._kind]) / (GPU.peaks["float32"] * best[self._kind]),
            0.0,
        )
        reached = GPU.bandwidth * np.where(self._slow, reduction, stream)
        moving = np.where(self._bytes > 0, (self._bytes + half_traffic) / reached, 0.0)
        beside = np.where(self._task, coefficients[14:17][self._stage], coefficients[11:14][self._stage])
        seconds = self._times * (np.maximum(calculating, moving) + beside)
        totals: Floats = np.bincount(self._row, seconds, len(self.keys))
        return totals / self.measured - 1

    def fitted(self, start: Floats) -> Floats:
        """The coefficients with the least errors, by Levenberg and Marquardt's method in their logarithms."""
        belief = np.array([BELIEF.get(name, 0.005) for name in Coefficients.names])

        def residuals(x: Floats) -> Floats:
            off = np.log(1 + self.errors(np.exp(x)))
            off *= self._weight * np.sqrt(1 + (off / STEADY) ** 2)
            return np.concatenate([off, belief * (x - np.log(start))])

        x, damping = np.log(start), 1e-2
        now = residuals(x)
        while damping < 1e6:
            slope = np.stack([(residuals(x + 1e-4 * unit) - now) / 1e-4 for unit in np.eye(len(x))], axis=1)
            square = slope.T @ slope
            step = np.linalg.solve(square + damping * np.diag(np.diag(square) + 1e-9), -slope.T @ now)
            then = residuals(x + np.clip(step, -1, 1))
            gained = now @ now - then @ then
            if gained > 0:
                x, now, damping = x + np.clip(step, -1, 1), then, damping / 5
            else:
                damping *= 4
            if 0 < gained < 1e-7 * (now @ now):
                break
        return np.exp(x)


def _range(errors: Sequence[float]) -> str:
    return f"{min(errors):+.0%} to {max(errors):+.0%}" if errors else ""


def main() -> None:
    if not MEASURED.exists():
        sys.exit(f"the measured profiles are not at {MEASURED}")
    shipped = Coefficients.of(GPU)
    families = list(dict.fromkeys(reference.kinds for reference in REFERENCES))
    # The giants are one block repeated: one of them stands for all.
    fitting = [next(each for each in REFERENCES if each.kinds is kinds) for kinds in families]
    together = Fit(fitting).fitted(GUESS)
    apart = {kinds: Fit([each for each in fitting if each.kinds is not kinds]).fitted(GUESS) for kinds in families}
    rows = []
    for reference in REFERENCES:
        fit = Fit([reference])
        for timed in (FORWARD, BOTH):
            at = [index for index, (_, each, _) in enumerate(fit.keys) if each == timed]
            smallest = min(at, key=lambda index: fit.keys[index][2])
            found = [fit.errors(each) for each in (shipped, together, apart[reference.kinds])]
            without = [found[2][index] for index in at if index != smallest]
            rows.append(
                (
                    reference.name,
                    "forward" if timed == FORWARD else "forward and backward",
                    f"{min(fit.keys[index][2] for index in at)}-{max(fit.keys[index][2] for index in at)}",
                    _range([found[0][index] for index in at]),
                    _range([found[1][index] for index in at]),
                    _range(without),
                    f"{found[2][smallest]:+.0%}",
                )
            )
    columns = ("model", "pass", "samples", "as shipped", "fitted to all", "to other families", "of the smallest size")
    console = Console(width=140)
    console.print(Table("Errors of whole models on a GTX 1080 Ti", columns, tuple(rows), words=2))
    pairs = zip(Coefficients.names, shipped, together, strict=True)
    shown = tuple((name, f"{value:.3g}", f"{new:.3g}") for name, value, new in pairs)
    console.print(Table("Coefficients", ("", "shipped", "fitted to all"), shown))


if __name__ == "__main__":
    main()
