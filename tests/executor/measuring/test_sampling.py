import time

import pytest

from executor.measuring.sampling import sample, summarise, wall_clock


class FakeTime:
    """Pieces that take a fixed time each, and the time that has passed."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []

    def piece(self, name: str, seconds: float):
        def run(number: int) -> int:
            self.now += seconds
            self.calls.append((name, number))
            return round(seconds * 1e9) + number

        return run

    def __call__(self) -> float:
        return self.now


def test_pieces_take_turns_and_warm_ups_do_not_count():
    clock = FakeTime()
    pieces = [clock.piece("a", 1), clock.piece("b", 2)]
    durations = sample(pieces, warmups=1, repeats=2, budget_s=100, clock_s=clock)
    assert clock.calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert durations == [[10**9 + 1, 10**9 + 2], [2 * 10**9 + 1, 2 * 10**9 + 2]]


@pytest.mark.parametrize(
    ("budget_s", "rounds"),
    [(100, 9), (21, 6), (20.9, 5), (1, 3)],  # a round takes 3 s, one is a warm-up
)
def test_as_many_rounds_as_the_budget_has_room_for(budget_s: float, rounds: int):
    clock = FakeTime()
    durations = sample([clock.piece("a", 3)], warmups=1, repeats=9, budget_s=budget_s, clock_s=clock)
    assert len(durations[0]) == rounds


def test_no_more_rounds_than_asked_for():
    clock = FakeTime()
    assert len(sample([clock.piece("a", 3)], warmups=0, repeats=1, budget_s=0.1, clock_s=clock)[0]) == 1


def test_progress_only_grows():
    clock, told = FakeTime(), []
    sample(
        [clock.piece("a", 3)] * 4,
        warmups=1,
        repeats=5,
        budget_s=40,
        progress=lambda share, what: told.append(share),
        clock_s=clock,
    )
    assert told == sorted(told)
    assert 0 <= told[0] <= told[-1] <= 1


def test_summary_is_median_and_interquartile_range():
    assert summarise([5, 1, 2, 3, 4]) == (3, 2)
    assert summarise([7]) == (7, 0)


def test_the_wall_clock_counts_sleep():
    assert wall_clock(lambda: time.sleep(0.05)) >= 50_000_000
