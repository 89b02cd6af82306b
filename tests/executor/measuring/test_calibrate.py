import math
from collections.abc import Sequence

import msgspec
import pytest

from executor.devices.facade import DeviceKind
from executor.errors import DeviceError
from executor.measuring.calibrate import Transfer, calibrate, fit_copy_rate, measured_machine
from sim.hardware.fabric import Fabric, Route
from sim.hardware.machine import Emulation, Gpu, Host, Link, Machine, NvLink
from sim.schedule import TaskKind


class FabricClock:
    """Copies over a machine's fabric, timed without a clock; each starts after its route's delay."""

    def __init__(self, machine: Machine) -> None:
        self._fabric = Fabric(machine)
        self.copies = 0

    def __call__(self, transfers: Sequence[Transfer]) -> int:
        self.copies += len(transfers)
        fluid = self._fabric.fluid()
        routes = [self._route(transfer) for transfer in transfers]
        for at, (transfer, route) in enumerate(zip(transfers, routes, strict=True)):
            fluid.start(route.delay_ns, at, route.loads, transfer.bytes, route.cap_for(transfer.bytes))
        while (upcoming := fluid.next_end()) < math.inf:
            fluid.advance(upcoming)
        return math.ceil(max(fluid.finished.values()))

    def _route(self, transfer: Transfer) -> Route:
        match transfer.kind, transfer.peer:
            case TaskKind.SWAP_IN, None:
                return self._fabric.swap_in(transfer.gpu)
            case TaskKind.SWAP_OUT, None:
                return self._fabric.swap_out(transfer.gpu)
            case TaskKind.P2P, int(peer):
                return self._fabric.p2p(transfer.gpu, peer)
        raise AssertionError(transfer)


def machine(*gpus: Gpu, links: tuple[Link, ...] = (), nvlinks: tuple[NvLink, ...] = ()) -> Machine:
    host = Host(memory_bytes=2**40, dram_bandwidth=1e15, cores=1)
    return Machine(name="test", host=host, gpus=gpus, links=links, nvlinks=nvlinks)


def gpu(bandwidth: float, **fields) -> Gpu:
    return Gpu(name="g", memory_bytes=2**34, bandwidth=bandwidth, copy_overhead_ns=20_000, **fields)


def guess(true: Machine) -> Machine:
    """The same machine, with rates nobody has measured yet."""
    replace = msgspec.structs.replace
    gpus = tuple(
        replace(g, bandwidth=1.0, copy_overhead_ns=0, p2p_bandwidth=None, both_directions=None) for g in true.gpus
    )
    links = tuple(replace(link, bandwidth=1.0, both_directions=None, latency_ns=3) for link in true.links)
    return replace(true, gpus=gpus, links=links, nvlinks=tuple(replace(edge, bandwidth=1.0) for edge in true.nvlinks))


def measured(true: Machine) -> Machine:
    return measured_machine(guess(true), FabricClock(true))


class TestFit:
    def test_recovers_a_line_exactly(self):
        rate = fit_copy_rate((size, 5_000 + size / 2) for size in (1_000, 10_000, 100_000))
        assert rate.overhead_ns == 5_000
        assert rate.bandwidth == pytest.approx(2e9)

    def test_an_overhead_is_never_negative(self):
        rate = fit_copy_rate([(1_000, 400.0), (2_000, 1_100.0)])
        assert rate.overhead_ns == 0
        assert rate.bandwidth == pytest.approx(2e9)

    def test_a_noisy_short_copy_hardly_changes_the_rate(self):
        rate = fit_copy_rate([(10_000, 30_000.0), (10**6, 1_010_000.0), (10**7, 10_010_000.0)])
        assert rate.bandwidth == pytest.approx(1e9, rel=2e-3)

    def test_refuses_times_that_do_not_grow(self):
        with pytest.raises(DeviceError, match="1000 to 2000 bytes take equally long"):
            fit_copy_rate([(1_000, 9_000.0), (1_500, 8_900.0), (2_000, 8_800.0)])


class TestMeasuredMachine:
    def test_finds_rates_and_overheads_of_gpus(self):
        found = measured(machine(gpu(10e9, p2p_bandwidth=6e9), gpu(5e9)))
        fast, slow = found.gpus
        assert fast.bandwidth == pytest.approx(10e9, rel=1e-3)
        assert slow.bandwidth == pytest.approx(5e9, rel=1e-3)
        assert fast.copy_overhead_ns == pytest.approx(20_000, abs=100)
        assert fast.p2p_bandwidth == pytest.approx(5e9, rel=1e-3)  # the slower end's own link
        assert fast.both_directions is None

    def test_finds_a_link_that_gpus_share(self):
        link = Link(name="uplink", bandwidth=12e9, latency_ns=2_000)
        found = measured(machine(*[gpu(10e9, link="uplink")] * 4, links=(link,)))
        assert found.links[0].bandwidth == pytest.approx(12e9, rel=1e-2)
        assert found.gpus[3].bandwidth == pytest.approx(10e9, rel=1e-3)

    def test_overheads_include_the_latency_of_links(self):
        link = Link(name="uplink", bandwidth=12e9, latency_ns=2_000)
        found = measured(machine(gpu(10e9, link="uplink"), links=(link,)))
        assert found.gpus[0].copy_overhead_ns == pytest.approx(22_000, abs=100)
        assert found.links[0].latency_ns == 0

    def test_a_wide_link_does_not_hold_gpus_back(self):
        found = measured(machine(*[gpu(10e9, link="uplink")] * 2, links=(Link(name="uplink", bandwidth=40e9),)))
        assert found.links[0].bandwidth == pytest.approx(20e9, rel=1e-3)
        assert found.links[0].both_directions is None

    def test_a_link_that_nothing_fills_keeps_the_rate_it_is_said_to_have(self):
        true = machine(gpu(10e9, link="uplink"), links=(Link(name="uplink", bandwidth=64e9),))
        assert measured_machine(true, FabricClock(true)).links[0].bandwidth == 64e9

    def test_what_was_said_of_sizes_and_of_one_direction_gives_way_to_what_was_measured(self):
        said = {"efficiency": ((10**6, 0.5),), "bandwidth_up": 2e9}
        true = machine(gpu(10e9, link="uplink"), links=(Link(name="uplink", bandwidth=12e9),))
        known = machine(gpu(10e9, link="uplink", **said), links=(Link(name="uplink", bandwidth=12e9, **said),))
        assert measured_machine(known, FabricClock(true)) == measured_machine(true, FabricClock(true))

    def test_finds_both_levels_of_a_tree(self):
        links = (
            Link(name="root", bandwidth=15e9),
            Link(name="a", bandwidth=12e9, parent="root"),
            Link(name="b", bandwidth=12e9, parent="root"),
        )
        gpus = [gpu(10e9, link=name) for name in ("a", "a", "b", "b")]
        found = {link.name: link.bandwidth for link in measured(machine(*gpus, links=links)).links}
        assert found == pytest.approx({"root": 15e9, "a": 12e9, "b": 12e9}, rel=1e-2)

    def test_finds_directions_that_limit_each_other(self):
        link = Link(name="uplink", bandwidth=30e9, both_directions=25e9)
        found = measured(
            machine(gpu(10e9, link="uplink", both_directions=16e9), gpu(10e9, link="uplink"), links=(link,))
        )
        assert found.gpus[0].both_directions == pytest.approx(16e9, rel=1e-2)
        assert found.gpus[1].both_directions is None
        assert found.links[0].both_directions == pytest.approx(25e9, rel=2e-2)

    def test_a_cap_of_gpus_is_not_taken_for_one_of_their_link(self):
        link = Link(name="uplink", bandwidth=40e9)
        found = measured(machine(*[gpu(10e9, link="uplink", both_directions=15e9)] * 2, links=(link,)))
        assert found.links[0].both_directions is None

    def test_measures_nvlink_edges_apart_from_other_ways(self):
        true = machine(gpu(10e9), gpu(10e9), gpu(10e9), nvlinks=(NvLink(gpus=(0, 1), bandwidth=50e9),))
        found = measured(true)
        assert found.nvlinks[0].bandwidth == pytest.approx(50e9, rel=1e-3)
        assert found.gpus[0].p2p_bandwidth == pytest.approx(10e9, rel=1e-3)

    def test_no_p2p_rate_without_access(self):
        assert measured(machine(gpu(10e9, p2p=False), gpu(10e9, p2p=False))).gpus[0].p2p_bandwidth is None

    def test_copies_fit_into_small_gpus(self):
        small = msgspec.structs.replace(gpu(10e9), memory_bytes=2**20)
        largest = 0

        def measure(transfers: Sequence[Transfer]) -> int:
            nonlocal largest
            largest = max(largest, sum(transfer.bytes for transfer in transfers))
            return FabricClock(machine(small))(transfers)

        measured_machine(guess(machine(small)), measure)
        assert 0 < largest <= 2**20

    def test_reports_progress_to_the_end(self):
        told: list[float] = []
        true = machine(gpu(10e9))
        measured_machine(guess(true), FabricClock(true), lambda share, what: told.append(share))
        assert told == sorted(told)
        assert (told[0], told[-1]) == (0.0, 1.0)


class TestEmulated:
    def true(self) -> Machine:
        nominal = Emulation(pace=4, gpu_bandwidth=0.5e9, p2p_bandwidth=0.4e9, links={"uplink": 0.7e9})
        return msgspec.structs.replace(
            guess(machine(*[gpu(1.0, link="uplink", speed=0.25)] * 2, links=(Link(name="uplink", bandwidth=1.0),))),
            emulation=nominal,
        )

    def test_finds_the_nominal_rates_about(self):
        for _ in range(3):
            found = calibrate(self.true(), DeviceKind.EMULATED)
            rates = [
                found.gpus[0].bandwidth,
                found.gpus[1].bandwidth,
                found.gpus[0].p2p_bandwidth,
                found.links[0].bandwidth,
            ]
            if rates == pytest.approx([0.5e9, 0.5e9, 0.4e9, 0.7e9], rel=0.1):
                break
        else:
            # A busy computer only ever makes copies slower.
            assert all(rate < 0.6e9 for rate in rates[:3])
            assert rates[3] < 0.8e9

    def test_keeps_what_the_emulator_plays(self):
        before = self.true()
        after = calibrate(before, DeviceKind.EMULATED)
        assert after.emulation == before.emulation
        assert [g.speed for g in after.gpus] == [0.25, 0.25]
        assert [g.memory_bytes for g in after.gpus] == [g.memory_bytes for g in before.gpus]
        assert after.host.speed == before.host.speed
        assert after.host.memory_bytes > 2**28
        assert after.host.cores >= 1
        assert after.host.dram_bandwidth > 1e8
