"""What copies take that are alone or all together, against the fabric's figures by hand."""

from __future__ import annotations

import numpy as np
import pytest

from sim.hardware.machine import Gpu, Host, Link, Machine
from sim.planner.ways import Ways
from tests.sim.handmade import machine as separate_links

MB = 10**6


def one_uplink(gpus: int, **gpu: object) -> Machine:
    made = tuple(Gpu(name="any", memory_bytes=10**9, bandwidth=2e9, link="up") for _ in range(gpus))
    host = Host(memory_bytes=None, dram_bandwidth=1e12, cores=2)
    return Machine(name="uplink", host=host, gpus=made, links=(Link(name="up", bandwidth=3e9, latency_ns=700),))


def test_a_copy_takes_its_latency_and_its_bytes_at_the_slowest_link() -> None:
    ways = Ways(one_uplink(2))
    for way in (*ways.into, *ways.out):
        assert way.ns(4 * MB) == pytest.approx(700 + 2 * MB)
        assert way.ns(0) == 0


def test_together_copies_share_what_they_have_in_common() -> None:
    """Three at 2 GB/s each on an uplink of 3 GB/s have 1 GB/s each; on links of their own nothing changes."""
    together = Ways(one_uplink(3), together=True)
    assert [way.ns(MB) for way in together.into] == pytest.approx([700 + MB] * 3)
    alone, apart = Ways(separate_links(gpus=3)), Ways(separate_links(gpus=3), together=True)
    assert [way.ns(MB) for way in apart.out] == [way.ns(MB) for way in alone.out]


def test_a_collective_goes_over_all_edges_of_the_ring_at_once() -> None:
    """On links of one byte a nanosecond each of the four edges carries a quarter of what all GPUs send."""
    ways = Ways(separate_links(gpus=4))
    assert ways.ring_ns(8 * MB) == pytest.approx(8 * MB / 4, rel=1e-6)
    assert Ways(separate_links()).ring_ns(8 * MB) == 0


def test_a_byte_that_may_take_two_ways_loads_what_both_have_in_common() -> None:
    ways = Ways(one_uplink(2))
    either = ways.either_load(0, 1)
    through_host = ways.out[0].load + ways.into[1].load
    assert np.all(either <= ways.between[0, 1].load)
    assert np.all(either <= through_host)
    assert ways.drain_ns(ways.into[0].load * 2 * MB).max() == pytest.approx(MB)
