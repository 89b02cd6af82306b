"""The processor, where emulated GPUs calculate: made quiet, and with a clock that does not wobble with it.

A processor's speed changes from one second to the next, with its frequency and with what others do on the same chip:
on shared virtual machines CPU times of the same work were found to differ by 25 % within a minute. A fixed piece of
work, the yardstick, wobbles with them. *Steady time* is CPU time, times the nominal duration of the yardstick, over its
duration at about that moment. So what a profile measured still holds when a run follows minutes later.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

import torch
from torch.nn import functional

YARDSTICK_NS = 2_500_000
"""Nominal duration of the yardstick, by definition: about what one core of a server takes. It is long against
interrupts, and short against the work that it is put beside."""

_ROWS, _WIDTH = 32, 256

_READ_EVERY_S = 0.1
_REMEMBER_S = 1.0
_FEWEST_READINGS = 3

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # of glibc's mallopt(3)
_NEVER, _MMAP_MAX = -1, 65536  # the latter is its default


@contextmanager
def quiet() -> Iterator[None]:
    """Operators of torch stay in their caller's thread, and Python does not look for garbage (which takes tens of
    milliseconds of whatever runs just then), until both are put back afterwards. And freed memory stays with the
    process: fetching it again from the system, page by page, was found to take up to a third of a step's time."""
    threads, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    _allocate(_M_TRIM_THRESHOLD, _NEVER)
    _allocate(_M_MMAP_MAX, 0)
    try:
        yield
    finally:
        _allocate(_M_MMAP_MAX, _MMAP_MAX)
        torch.set_num_threads(threads)
        if collects:
            gc.enable()


def _allocate(parameter: int, value: int) -> None:
    """Set a parameter of the C library's allocator; other libraries than glibc have none such."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)


# All threads share one heap. Those of their own, which threads get, are cut down whatever the threshold; and it must be
# said before there are any.
_allocate(_M_ARENA_MAX, 1)


def yardstick() -> Callable[[], int]:
    """The piece of work, ready: each call does it and returns its CPU time in nanoseconds.

    It is a small network forward and backward, as what it stands for: products of matrices alone feel other things.
    """
    x = torch.ones(_ROWS, _WIDTH, requires_grad=True)
    wide = torch.ones(4 * _WIDTH, _WIDTH, requires_grad=True)
    narrow = torch.ones(_WIDTH, 4 * _WIDTH, requires_grad=True)
    gradient = torch.ones(_ROWS, _WIDTH)

    def work() -> None:
        with torch.enable_grad():
            y = functional.linear(functional.gelu(functional.linear(functional.layer_norm(x, (_WIDTH,)), wide)), narrow)
            y = (y + x).softmax(-1)
        torch.autograd.grad(y, (x, wide, narrow), gradient)

    def measure() -> int:
        work()  # brings all into the caches, whatever was there before
        started = time.thread_time_ns()
        work()
        return time.thread_time_ns() - started

    return measure


class _Reading(NamedTuple):
    at_s: float
    duration_ns: int


class SteadyClock:
    """Times work in steady nanoseconds. Right only for work that stays in its caller's thread.

    Reading the yardstick, which happens now and then, does not count. For one thread at a time.
    """

    def __init__(self, measure: Callable[[], int] | None = None, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._measure, self._clock_s = measure or yardstick(), clock_s
        self._readings: deque[_Reading] = deque()
        self._measure()  # the first time sets up more than it calculates

    def __call__(self, work: Callable[[], object]) -> int:
        """Do the work; returns how long it took."""
        speed = self._speed()
        started = time.thread_time_ns()
        work()
        return round((time.thread_time_ns() - started) * speed)

    def _speed(self) -> float:
        """The processor's, in parts of the nominal one: a median over about a second."""
        readings, now_s = self._readings, self._clock_s()
        while readings and readings[0].at_s < now_s - _REMEMBER_S:
            readings.popleft()
        if not readings or readings[-1].at_s < now_s - _READ_EVERY_S:
            readings.append(_Reading(now_s, self._measure()))
        while len(readings) < _FEWEST_READINGS:
            readings.append(_Reading(now_s, self._measure()))
        return YARDSTICK_NS / median([reading.duration_ns for reading in readings])
