"""Which resources each copy takes, on machines small enough to see it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.errors import MachineError
from sim.hardware.fabric import Fabric, Route, reached, ring_edge_bytes
from sim.hardware.files import load_machine
from sim.hardware.machine import Gpu, Host, Interconnect, Link, Machine, NvLink

GB_S = 1e9
FOREVER = 10**12


def make_gpu(link: str = "host", **changes: Any) -> Gpu:
    return Gpu(**{"name": "gpu", "memory_bytes": 2**30, "bandwidth": 10 * GB_S, "link": link, **changes})


def make_machine(gpus: list[Gpu], links: list[Link] | None = None, **changes: Any) -> Machine:
    host = Host(memory_bytes=None, dram_bandwidth=100 * GB_S, cores=4)
    return Machine(**{"name": "m", "host": host, "gpus": tuple(gpus), "links": tuple(links or ()), **changes})


def two_switches() -> Machine:
    """Two GPUs behind each of two switches; the switches' uplinks hang off one root link."""
    links = [
        Link(name="root", bandwidth=16 * GB_S, latency_ns=100),
        Link(name="left", bandwidth=12 * GB_S, parent="root", latency_ns=30),
        Link(name="right", bandwidth=12 * GB_S, parent="root", latency_ns=7),
    ]
    gpus = [make_gpu(link, copy_overhead_ns=1000 * (1 + n)) for n, link in enumerate(["left"] * 2 + ["right"] * 2)]
    return make_machine(gpus, links)


def taken(fabric: Fabric, route: Route) -> list[str]:
    """Names of what a copy loads, twice if loaded twice."""
    return sorted(name for resource, times in route.loads for name in [fabric.resources[resource].name] * int(times))


def capacities(fabric: Fabric) -> dict[str, float]:
    return {resource.name: resource.capacity for resource in fabric.resources}


class TestRoutes:
    def test_swaps_take_every_link_in_their_direction_and_dram(self) -> None:
        fabric = Fabric(two_switches())
        assert taken(fabric, fabric.swap_in(1)) == ["dram", "gpu1 down", "left down", "root down"]
        assert taken(fabric, fabric.swap_out(2)) == ["dram", "gpu2 up", "right up", "root up"]

    def test_delay_is_the_latency_of_every_link_and_the_gpus_overhead(self) -> None:
        fabric = Fabric(two_switches())
        assert fabric.swap_in(0).delay_ns == 30 + 100 + 1000
        assert fabric.swap_out(3).delay_ns == 7 + 100 + 4000
        assert fabric.p2p(1, 0).delay_ns == 2000
        assert fabric.p2p(1, 2).delay_ns == 30 + 7 + 2000

    def test_p2p_below_one_switch_leaves_the_uplink_alone(self) -> None:
        fabric = Fabric(two_switches())
        assert taken(fabric, fabric.p2p(0, 1)) == ["gpu0 up", "gpu1 down"]

    def test_p2p_between_switches_turns_where_the_ways_meet(self) -> None:
        fabric = Fabric(two_switches())
        assert taken(fabric, fabric.p2p(0, 3)) == ["gpu0 up", "gpu3 down", "left up", "right down"]

    def test_p2p_between_roots_takes_both_uplinks_but_not_dram(self) -> None:
        links = [Link(name="a", bandwidth=GB_S), Link(name="b", bandwidth=GB_S)]
        fabric = Fabric(make_machine([make_gpu("a"), make_gpu("b")], links))
        assert taken(fabric, fabric.p2p(1, 0)) == ["a down", "b up", "gpu0 down", "gpu1 up"]

    @pytest.mark.parametrize("access", [(False, False), (True, False), (False, True)])
    def test_without_p2p_access_a_copy_goes_through_host_memory(self, access: tuple[bool, bool]) -> None:
        gpus = [make_gpu("up", p2p=allowed, copy_overhead_ns=500) for allowed in access]
        fabric = Fabric(make_machine(gpus, [Link(name="up", bandwidth=8 * GB_S, latency_ns=20)]))
        route = fabric.p2p(0, 1)
        assert taken(fabric, route) == ["dram", "dram", "gpu0 up", "gpu1 down", "up down", "up up"]
        assert route.delay_ns == 2 * 20 + 2 * 500

    def test_the_smaller_p2p_bandwidth_caps_the_copy(self) -> None:
        gpus = [make_gpu(p2p_bandwidth=9 * GB_S), make_gpu(p2p_bandwidth=7 * GB_S), make_gpu()]
        fabric = Fabric(make_machine(gpus))
        assert [fabric.p2p(0, 1).cap, fabric.p2p(2, 0).cap] == [7 * GB_S, 9 * GB_S]
        assert fabric.swap_in(0).cap == math.inf

    def test_a_cap_on_both_directions_is_taken_by_either(self) -> None:
        gpus = [make_gpu("up", both_directions=14 * GB_S), make_gpu("up")]
        fabric = Fabric(make_machine(gpus, [Link(name="up", bandwidth=12 * GB_S, both_directions=20 * GB_S)]))
        assert taken(fabric, fabric.swap_in(0)) == ["dram", "gpu0 both", "gpu0 down", "up both", "up down"]
        assert taken(fabric, fabric.swap_out(0)) == ["dram", "gpu0 both", "gpu0 up", "up both", "up up"]
        assert taken(fabric, fabric.p2p(1, 0)) == ["gpu0 both", "gpu0 down", "gpu1 up"]

    def test_a_staged_copy_takes_a_cap_on_both_directions_twice(self) -> None:
        link = Link(name="up", bandwidth=12 * GB_S, both_directions=20 * GB_S)
        fabric = Fabric(make_machine([make_gpu("up", p2p=False)] * 2, [link]))
        assert taken(fabric, fabric.p2p(0, 1)).count("up both") == 2
        assert fabric.uncontended_rate(fabric.p2p(0, 1)) == 10 * GB_S
        assert capacities(fabric)["up both"] == 20 * GB_S

    def test_nvlink_replaces_the_tree_for_its_pair_only(self) -> None:
        edges = (NvLink(gpus=(0, 1), bandwidth=50 * GB_S),)
        fabric = Fabric(make_machine([make_gpu(p2p=False, copy_overhead_ns=5)] * 3, nvlinks=edges))
        there, back = fabric.p2p(0, 1), fabric.p2p(1, 0)
        assert (taken(fabric, there), taken(fabric, back)) == (["nvlink 0-1"], ["nvlink 1-0"])
        assert (there.delay_ns, there.cap) == (5, math.inf)
        assert "dram" in taken(fabric, fabric.p2p(1, 2))

    def test_a_direction_may_have_a_bandwidth_of_its_own(self) -> None:
        fabric = Fabric(make_machine([make_gpu("up", bandwidth_up=7 * GB_S)], [Link(name="up", bandwidth=9 * GB_S)]))
        assert capacities(fabric) == {
            "dram": 100 * GB_S,
            "cores": 4e9,
            "up down": 9 * GB_S,
            "up up": 9 * GB_S,
            "gpu0 down": 10 * GB_S,
            "gpu0 up": 7 * GB_S,
        }

    def test_a_copy_to_itself_is_refused(self) -> None:
        with pytest.raises(MachineError, match="GPU 0 to itself"):
            Fabric(make_machine([make_gpu()])).p2p(0, 0)

    def test_a_ring_goes_round(self) -> None:
        fabric = Fabric(two_switches())
        assert fabric.ring(4) == tuple(fabric.p2p(source, (source + 1) % 4) for source in range(4))
        assert fabric.ring([3, 1]) == (fabric.p2p(3, 1), fabric.p2p(1, 3))
        assert fabric.ring(1) == ()

    def test_every_resource_has_its_own_name_and_index(self) -> None:
        for name in ("8x1080ti-2switch", "4x3090-nvlink", "4x4090"):
            fabric = Fabric(load_machine(name))
            assert len({resource.name for resource in fabric.resources}) == len(fabric.resources)
            assert fabric.capacities == tuple(resource.capacity for resource in fabric.resources)


def two_sockets(memory_on: tuple[int, ...] = (), *, p2p: bool = True, **changes: Any) -> Fabric:
    """GPU 0 directly on socket 0, GPU 1 behind a switch on socket 1; 8 GB/s between the sockets."""
    host = Host(memory_bytes=None, dram_bandwidth=100 * GB_S, cores=4, sockets=2, memory_on=memory_on)
    links = [Link(name="switch", bandwidth=12 * GB_S, socket=1, latency_ns=20)]
    interconnect = Interconnect(**{"bandwidth": 8 * GB_S, "latency_ns": 700, **changes})
    gpus = [make_gpu(p2p=p2p), make_gpu("switch", p2p=p2p)]
    return Fabric(make_machine(gpus, links, host=host, interconnect=interconnect))


def loads(fabric: Fabric, route: Route) -> dict[str, float]:
    return {fabric.resources[resource].name: times for resource, times in route.loads}


class TestSockets:
    def test_memory_of_all_sockets_sends_the_others_share_over_the_interconnect(self) -> None:
        fabric = two_sockets()
        assert loads(fabric, fabric.swap_in(0)) == {"dram": 1, "gpu0 down": 1, "socket 1-0": 0.5}
        assert loads(fabric, fabric.swap_out(1)) == {"dram": 1, "gpu1 up": 1, "switch up": 1, "socket 1-0": 0.5}
        assert fabric.uncontended_rate(fabric.swap_in(0)) == 10 * GB_S
        assert fabric.swap_out(1).delay_ns == 720

    def test_memory_of_one_socket_is_near_or_far(self) -> None:
        fabric = two_sockets((1,))
        near, far = fabric.swap_in(1), fabric.swap_in(0)
        assert loads(fabric, near) == {"dram": 1, "gpu1 down": 1, "switch down": 1}
        assert loads(fabric, far) == {"dram": 1, "gpu0 down": 1, "socket 1-0": 1}
        assert (near.delay_ns, far.delay_ns) == (20, 700)
        assert fabric.uncontended_rate(far) == 8 * GB_S

    def test_copies_between_gpus_of_two_sockets_cross_once(self) -> None:
        fabric = two_sockets()
        assert loads(fabric, fabric.p2p(0, 1)) == {"gpu0 up": 1, "socket 0-1": 1, "switch down": 1, "gpu1 down": 1}
        assert fabric.p2p(1, 0).delay_ns == 720

    def test_without_p2p_access_they_write_and_read_memory_wherever_it_is(self) -> None:
        fabric = two_sockets(p2p=False)
        route = fabric.p2p(0, 1)
        expected = {"gpu0 up": 1, "dram": 2, "socket 0-1": 1, "switch down": 1, "gpu1 down": 1}
        assert loads(fabric, route) == expected
        assert route.delay_ns == 20 + 2 * 700
        fabric = two_sockets((0,), p2p=False)
        assert loads(fabric, fabric.p2p(1, 0))["socket 1-0"] == 1

    def test_gpus_below_one_link_do_not_cross(self) -> None:
        host = Host(memory_bytes=None, dram_bandwidth=GB_S, cores=4, sockets=2)
        links = [Link(name="a", bandwidth=GB_S, socket=1), Link(name="b", bandwidth=GB_S, socket=1)]
        interconnect = Interconnect(bandwidth=GB_S)
        fabric = Fabric(make_machine([make_gpu(x) for x in "aab"], links, host=host, interconnect=interconnect))
        assert taken(fabric, fabric.p2p(0, 1)) == ["gpu0 up", "gpu1 down"]
        assert taken(fabric, fabric.p2p(1, 2)) == ["a up", "b down", "gpu1 up", "gpu2 down"]

    def test_three_sockets_hold_a_third_each(self) -> None:
        host = Host(memory_bytes=None, dram_bandwidth=GB_S, cores=4, sockets=3)
        machine = make_machine([make_gpu(socket=2)], host=host, interconnect=Interconnect(bandwidth=GB_S, latency_ns=5))
        fabric = Fabric(machine)
        route = fabric.swap_out(0)
        assert loads(fabric, route) == {"dram": 1, "gpu0 up": 1, "socket 2-0": 1 / 3, "socket 2-1": 1 / 3}
        assert route.delay_ns == 5

    def test_a_cap_on_both_directions_is_taken_by_either(self) -> None:
        fabric = two_sockets((0,), both_directions=12 * GB_S)
        assert capacities(fabric)["sockets 0 and 1"] == 12 * GB_S
        assert loads(fabric, fabric.swap_in(1))["sockets 0 and 1"] == 1
        assert loads(fabric, fabric.swap_out(1))["sockets 0 and 1"] == 1

    def test_swaps_of_far_memory_share_the_interconnect(self) -> None:
        fabric = two_sockets()
        flows = fabric.fluid()
        for name, route in (("in", fabric.swap_in(0)), ("p2p", fabric.p2p(1, 0))):
            flows.start(0, name, route.loads, 1000, route.cap)
        # Both end in GPU 0: 5 and 5, which leaves 0.5 of the interconnect's 8; then 10 would be 8 for "p2p".
        assert flows.rates() == {"in": 5 * GB_S, "p2p": 5 * GB_S}
        flows = fabric.fluid()
        flows.start(0, "out", fabric.swap_out(1).loads, 1000)
        flows.start(0, "p2p", fabric.p2p(1, 0).loads, 1000)
        flows.start(0, "in", fabric.swap_in(0).loads, 400)
        # Rates r of all: 1.0 for "p2p" and 0.5 for each swap fill 8 at r = 4; GPU 1's link would only do so at 5.
        assert flows.rates() == {"out": 4 * GB_S, "p2p": 4 * GB_S, "in": 4 * GB_S}


class TestEfficiency:
    POINTS = ((1000, 0.25), (4000, 0.5), (16_000, 0.8))

    @pytest.mark.parametrize(
        ("size", "share"),
        [
            (1, 0.25),
            (1000, 0.25),
            (4000, 0.5),
            (2500, 2500 / 6000),  # takes as long as 6000 B at full rate: half way from 4000 to 8000
            (16_000, 0.8),
            (10**9, 0.8),
        ],
    )
    def test_times_are_interpolated(self, size: int, share: float) -> None:
        assert reached(self.POINTS, size) == pytest.approx(share, rel=1e-12)

    @given(st.integers(1, 20_000), st.integers(0, 1000))
    def test_a_larger_copy_never_takes_less(self, size: int, more: int) -> None:
        fabric = Fabric(make_machine([make_gpu(efficiency=self.POINTS)]))
        route = fabric.swap_in(0)
        assert fabric.uncontended_ns(route, size) <= fabric.uncontended_ns(route, size + more)

    def test_it_caps_the_copy_and_leaves_the_rest_to_others(self) -> None:
        fabric = Fabric(make_machine([make_gpu(efficiency=self.POINTS)]))
        flows, route = fabric.fluid(), fabric.swap_in(0)
        for name, size in (("small", 1000), ("large", 16_000)):
            flows.start(0, name, route.loads, size, route.cap_for(size))
        assert flows.rates() == {"small": 2.5 * GB_S, "large": 7.5 * GB_S}

    def test_the_slowest_of_the_way_counts_in_its_direction(self) -> None:
        gpus = [make_gpu("up", efficiency=((8, 0.5),), bandwidth_up=4 * GB_S), make_gpu("up", p2p_bandwidth=3 * GB_S)]
        fabric = Fabric(make_machine(gpus, [Link(name="up", bandwidth=12 * GB_S, efficiency=((8, 0.25),))]))
        assert fabric.swap_in(0).cap_for(8) == 3 * GB_S
        assert fabric.swap_out(0).cap_for(8) == 2 * GB_S
        assert fabric.p2p(0, 1).cap_for(8) == 2 * GB_S
        assert fabric.p2p(1, 0).cap_for(8) == 3 * GB_S
        assert fabric.uncontended_ns(fabric.swap_out(0), 8) == 4

    def test_an_nvlink_has_its_own(self) -> None:
        edge = NvLink(gpus=(0, 1), bandwidth=50 * GB_S, efficiency=((10, 0.1), (1000, 1.0)))
        fabric = Fabric(make_machine([make_gpu(efficiency=self.POINTS)] * 2, nvlinks=(edge,)))
        assert fabric.uncontended_rate(fabric.p2p(0, 1), 10) == 5 * GB_S
        assert fabric.uncontended_rate(fabric.p2p(0, 1)) == 50 * GB_S


class TestTimes:
    def test_alone_a_copy_takes_its_delay_and_the_narrowest_resource(self) -> None:
        fabric = Fabric(two_switches())
        assert fabric.uncontended_rate(fabric.swap_in(0)) == 10 * GB_S
        assert fabric.uncontended_ns(fabric.swap_in(0), 5000) == 1130 + 500
        assert fabric.uncontended_ns(fabric.swap_in(0), 5001) == 1130 + 501
        assert fabric.uncontended_ns(fabric.swap_in(0), 0) == 1130

    def test_a_copys_own_cap_counts_if_it_is_the_narrowest(self) -> None:
        fabric = Fabric(make_machine([make_gpu(p2p_bandwidth=4 * GB_S), make_gpu()]))
        assert fabric.uncontended_ns(fabric.p2p(1, 0), 400) == 100

    def test_a_resource_used_twice_gives_half(self) -> None:
        host = Host(memory_bytes=None, dram_bandwidth=12 * GB_S, cores=1)
        fabric = Fabric(make_machine([make_gpu(p2p=False)] * 2, host=host))
        assert fabric.uncontended_rate(fabric.p2p(0, 1)) == 6 * GB_S

    def test_four_gpus_share_one_uplink(self) -> None:
        fabric = Fabric(load_machine("4x1080ti"))
        flows = fabric.fluid()
        for gpu in range(4):
            flows.start(0, ("in", gpu), fabric.swap_in(gpu).loads, 12_350)
        flows.start(0, ("out", 0), fabric.swap_out(0).loads, 12_350)
        flows.advance(FOREVER)
        assert flows.finished == pytest.approx({("out", 0): 1000, **{("in", gpu): 4000 for gpu in range(4)}})

    def test_cards_of_the_fourth_generation_both_ways_and_through_the_host(self) -> None:
        """Measured: 35 GB/s both ways together (in 11, out 24), 20 to 26 between cards without P2P access."""
        fabric = Fabric(load_machine("4x4090"))
        flows = fabric.fluid()
        flows.start(0, "in", fabric.swap_in(0).loads, 1)
        assert flows.rates() == {"in": 25 * GB_S}
        flows.start(0, "out", fabric.swap_out(0).loads, 1)
        assert flows.rates() == {"in": 17.5 * GB_S, "out": 17.5 * GB_S}
        assert fabric.uncontended_rate(fabric.p2p(0, 1)) == 25 * GB_S

    def test_the_two_halves_of_a_server_do_not_share_an_uplink(self) -> None:
        fabric = Fabric(load_machine("8x1080ti-2switch"))
        flows = fabric.fluid()
        for gpu in (0, 4):
            flows.start(0, gpu, fabric.swap_in(gpu).loads, 12_350)
        flows.advance(FOREVER)
        assert flows.finished == pytest.approx({0: 1000, 4: 1000})

    def test_staged_copies_slow_swaps_down_and_direct_ones_do_not(self) -> None:
        def swap_in_ns(p2p: bool) -> float:
            gpus = [make_gpu("up", p2p=p2p)] * 3
            fabric = Fabric(make_machine(gpus, [Link(name="up", bandwidth=10 * GB_S)]))
            flows = fabric.fluid()
            flows.start(0, "swap", fabric.swap_in(0).loads, 1000)
            flows.start(0, "copy", fabric.p2p(1, 2).loads, 10_000)
            flows.advance(FOREVER)
            return flows.finished["swap"]

        assert (swap_in_ns(True), swap_in_ns(False)) == (100, 200)

    def test_a_ring_of_gpus_on_one_switch_takes_two_parts_in_n_of_the_gradient_and_no_uplink(self) -> None:
        fabric = Fabric(load_machine("4x1080ti"))
        flows = fabric.fluid()
        edges = fabric.ring(4)
        for number, edge in enumerate(edges):
            flows.start(0, number, edge.loads, ring_edge_bytes(8_800_000, 4), edge.cap)
        flows.advance(FOREVER)
        assert flows.finished == pytest.approx(dict.fromkeys(range(4), 1_500_000))

    def test_a_ring_over_two_switches_is_as_fast_as_its_uplinks(self) -> None:
        links = [Link(name=name, bandwidth=2 * GB_S) for name in "ab"]
        fabric = Fabric(make_machine([make_gpu(name) for name in "aabb"], links))
        flows = fabric.fluid()
        for number, edge in enumerate(fabric.ring(4)):
            flows.start(0, number, edge.loads, 6000)
        flows.advance(FOREVER)
        assert flows.finished == {0: 600, 2: 600, 1: 3000, 3: 3000}

    def test_all_edges_of_a_ring_carry_what_an_all_reduce_needs(self) -> None:
        assert [ring_edge_bytes(12, gpus) * gpus for gpus in (1, 2, 3, 4)] == [0, 24, 48, 72]
