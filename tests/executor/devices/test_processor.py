import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from executor.devices.processor import YARDSTICK_NS, SteadyClock, quiet, yardstick


def spin(milliseconds: float) -> Callable[[], None]:
    def work() -> None:
        started = time.thread_time_ns()
        while time.thread_time_ns() - started < milliseconds * 1e6:
            pass

    return work


class Readings:
    """A yardstick that shows given durations, and a clock that moves on by itself."""

    def __init__(self, durations: Iterator[float], step_s: float) -> None:
        self.taken, self.now_s, self._durations, self._step_s = 0, 0.0, durations, step_s

    def measure(self) -> int:
        self.taken += 1
        return round(next(self._durations) * YARDSTICK_NS)

    def clock_s(self) -> float:
        self.now_s += self._step_s
        return self.now_s


def always(duration: float) -> Iterator[float]:
    while True:
        yield duration


@pytest.mark.parametrize("slowness", [0.5, 1, 2])
def test_time_is_cpu_time_in_parts_of_the_yardsticks_speed(slowness: float):
    readings = Readings(always(slowness), 1)
    steady_ns = SteadyClock(readings.measure, readings.clock_s)(spin(5))
    assert 5e6 / slowness <= steady_ns < 10e6 / slowness


def test_sleep_does_not_count():
    readings = Readings(always(1), 1)
    assert SteadyClock(readings.measure, readings.clock_s)(lambda: time.sleep(0.05)) < 25_000_000


def test_the_speed_is_a_median_over_the_latest_readings_and_forgets_old_ones():
    readings = Readings(iter([9, 1, 1, 5, 2, 2, 2, 2]), 0.4)  # the first sets up
    clock = SteadyClock(readings.measure, readings.clock_s)
    first = [clock(spin(4)) for _ in range(2)]  # medians of 1, 1, 5 and of 1, 1, 5, 2
    assert first[0] > first[1]
    for _ in range(3):
        last = clock(spin(4))
    assert 1.9e6 < last < 4e6  # all of the last second show 2


def test_the_yardstick_is_read_now_and_then():
    readings = Readings(always(1), 0.01)
    clock = SteadyClock(readings.measure, readings.clock_s)
    for _ in range(100):
        clock(lambda: None)
    assert 10 < readings.taken < 20


def test_the_yardstick_is_near_its_nominal_duration():
    with quiet():
        measure = yardstick()
        assert 0.05 < min(measure() for _ in range(9)) / YARDSTICK_NS < 20


def test_quiet_gives_threads_and_the_collection_of_garbage_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with quiet():
            assert torch.get_num_threads() == 1
            assert not gc.isenabled()
            with quiet():
                pass
            assert not gc.isenabled()
        assert torch.get_num_threads() == 2
        assert gc.isenabled()
    finally:
        torch.set_num_threads(before)
