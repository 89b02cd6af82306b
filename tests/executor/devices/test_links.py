from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from executor.devices.facade import Aborted
from executor.devices.links import Load, SharedLinks
from sim.hardware.fabric import Fabric
from sim.hardware.machine import Gpu, Host, Link, Machine

# An uplink of 1 B/ns, below which two GPUs could take 1 B/ns each.
MACHINE = Machine(
    name="two",
    host=Host(memory_bytes=None, dram_bandwidth=1e12, cores=1),
    gpus=tuple(Gpu(name=name, memory_bytes=1, bandwidth=1e9, link="up") for name in "ab"),
    links=(Link(name="up", bandwidth=1e9),),
)
FABRIC = Fabric(MACHINE)


class HandClock:
    """Time passes only in waits, and by hand. What happens ``at`` a time happens on the way."""

    def __init__(self) -> None:
        self.time_ns = 0
        self.waits = 0

    def now_ns(self) -> int:
        return self.time_ns

    def wait(self, changed: threading.Condition, ahead_ns: float) -> None:
        self.waits += 1
        assert self.waits < 100, "it waits and waits"
        self.time_ns += max(1, round(ahead_ns))


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def links(clock: HandClock) -> SharedLinks:
    return SharedLinks(FABRIC, clock)


def into(gpu: int, size: float) -> list[Load]:
    return [Load(FABRIC.swap_in(gpu), size)]


def test_copy_alone_takes_its_bytes_over_the_rate(links: SharedLinks, clock: HandClock) -> None:
    links.carry(into(0, 1000), ())
    assert clock.time_ns == 1000


def test_each_piece_waits_for_its_share_of_the_copy(links: SharedLinks, clock: HandClock) -> None:
    times = []

    def work() -> Iterator[float]:
        for quarter in (1, 2, 3):
            times.append(clock.time_ns)
            yield quarter / 4
        times.append(clock.time_ns)

    links.carry(into(0, 1000), work())
    assert times == [0, 250, 500, 750]
    assert clock.time_ns == 1000


def test_work_slower_than_the_links_does_not_wait(links: SharedLinks, clock: HandClock) -> None:
    def work() -> Iterator[float]:
        clock.time_ns += 5000
        yield 0.5
        assert clock.time_ns == 5000

    links.carry(into(0, 1000), work())
    assert clock.time_ns == 5000


def test_two_copies_over_one_uplink_share_it(links: SharedLinks) -> None:
    first = links.start(into(0, 1000))
    assert links.due_ns(first, 1.0) == pytest.approx(1000)
    second = links.start(into(1, 1000))
    assert links.due_ns(first, 1.0) == pytest.approx(2000)
    assert links.due_ns(first, 0.25) == pytest.approx(500)
    assert links.due_ns(second, 1.0) == pytest.approx(2000)


def test_opposite_directions_do_not_share(links: SharedLinks) -> None:
    first = links.start(into(0, 1000))
    links.start([Load(FABRIC.swap_out(1), 1000)])
    assert links.due_ns(first, 1.0) == pytest.approx(1000)


def test_a_copy_that_joins_halfway_slows_the_rest_down(links: SharedLinks, clock: HandClock) -> None:
    def work() -> Iterator[float]:
        yield 0.5
        assert clock.time_ns == 500
        links.start(into(1, 10_000))

    links.carry(into(0, 1000), work())
    assert clock.time_ns == 500 + 2 * 500


def test_a_copy_goes_on_faster_when_the_other_has_ended(links: SharedLinks, clock: HandClock) -> None:
    short = links.start(into(1, 100))
    links.carry(into(0, 1000), ())
    # Both at half the rate until 200, when 900 of the long one are left.
    assert clock.time_ns == 200 + 900
    links.end(short)


def test_a_copy_ends_with_the_last_of_its_loads(links: SharedLinks, clock: HandClock) -> None:
    links.carry([Load(FABRIC.swap_in(0), 300), Load(FABRIC.swap_out(0), 700)], ())
    assert clock.time_ns == 700


def test_copies_of_no_bytes_end_at_once(links: SharedLinks, clock: HandClock) -> None:
    links.carry(into(0, 0), ())
    assert clock.time_ns == 0


def test_closed_links_abort_until_they_are_opened_again(links: SharedLinks, clock: HandClock) -> None:
    links.close()
    with pytest.raises(Aborted):
        links.carry(into(0, 1000), ())
    links.reopen()
    links.carry(into(0, 1000), ())
    assert clock.time_ns == 1000  # what was given up does not load the links any more


def test_closing_wakes_a_copy_on_its_way() -> None:
    links = SharedLinks(FABRIC)
    aborted = threading.Event()

    def copy() -> None:
        try:
            links.carry(into(0, 1e15), ())  # a hundred years
        except Aborted:
            aborted.set()

    thread = threading.Thread(target=copy)
    thread.start()
    links.close()
    thread.join(10)
    assert aborted.is_set()


def test_real_copies_at_once_take_their_time_on_the_clock() -> None:
    """Lower bounds only: a busy computer may add to them."""
    links = SharedLinks(FABRIC)
    clock = links._clock
    started = clock.now_ns()
    threads = [threading.Thread(target=links.carry, args=(into(gpu, 2e6), ())) for gpu in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clock.now_ns() - started >= 2e6
