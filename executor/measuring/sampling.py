"""Timing many pieces of work on a machine that others use too.

All pieces are timed in turn, round after round, so that a slow spell meets all alike and not one of them. On the CPU
a piece lasts steady CPU time (``devices/processor.py``), which other processes' turns do not count towards; on CUDA,
what the device's events say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import NamedTuple

import torch

from traces.doubts import NOISY

from ..reporting import Progress, silent

Clock = Callable[[Callable[[], object]], int]
"""Does a piece of work and returns how long it took, in nanoseconds."""

FEWEST_REPEATS = 3


class Sampled(NamedTuple):
    """Median and interquartile range of a piece's durations, in nanoseconds."""

    median_ns: int
    spread_ns: int

    @property
    def is_noisy(self) -> bool:
        """Whether it varies too much to be trusted."""
        return self.spread_ns > NOISY * self.median_ns


def wall_clock(work: Callable[[], object]) -> int:
    """Time that passed."""
    started = time.perf_counter_ns()
    work()
    return time.perf_counter_ns() - started


def cuda_clock(device: torch.device) -> Clock:
    """Time between two events on the device's current stream."""

    def clock(work: Callable[[], object]) -> int:
        start, end = _event(), _event()
        torch.cuda.synchronize(device)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize(device)
        return round(float(start.elapsed_time(end)) * 1e6)

    return clock


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def sample(
    pieces: Sequence[Callable[[int], int]],
    *,
    warmups: int,
    repeats: int,
    budget_s: float,
    progress: Progress = silent,
    clock_s: Callable[[], float] = time.monotonic,
) -> list[list[int]]:
    """Durations of each piece, in the order of rounds, warm-ups left out.

    A piece is called with the number of the round and returns its duration. There are ``warmups`` rounds that do not
    count, then up to ``repeats``: as many as the budget (seconds, warm-ups included) has room for, but at least
    :data:`FEWEST_REPEATS` unless ``repeats`` is less. Noisy pieces (:data:`~traces.doubts.NOISY`) are called up to
    ``repeats`` times more, while the budget lasts.
    """
    durations: list[list[int]] = [[] for _ in pieces]
    started = clock_s()
    total = warmups + repeats
    for number in range(total):
        spent = clock_s() - started
        counted = number - warmups
        if counted >= min(FEWEST_REPEATS, repeats) and spent + spent / number > budget_s:
            break
        for at, piece in enumerate(pieces):
            by_time = (clock_s() - started) / budget_s
            progress(min(1.0, max((number + at / len(pieces)) / total, by_time)), f"round {number + 1}")
            duration = piece(number)
            if counted >= 0:
                durations[at].append(duration)
    for number in range(total, total + repeats):
        for at, piece in enumerate(pieces):
            if summarise(durations[at]).is_noisy and clock_s() - started < budget_s:
                durations[at].append(piece(number))
    return durations


def summarise(durations: Sequence[int]) -> Sampled:
    """Median and interquartile range (0 for a single duration)."""
    if len(durations) < 2:
        return Sampled(durations[0], 0)
    low, _, high = quantiles(durations, n=4, method="inclusive")
    return Sampled(round(median(durations)), round(high - low))
