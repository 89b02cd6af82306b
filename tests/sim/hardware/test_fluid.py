"""Flows share resources max-min fairly: cases solved by hand, and an independent solver in exact fractions.

Capacities are in bytes per nanosecond (GB/s), so that the times are easy to check.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.hardware import fluid
from sim.hardware.fluid import Fluid, Loads, whole_ns

GB_S = 10**9
FOREVER = 10**12


def make_fluid(*gb_per_s: float) -> Fluid:
    return Fluid([rate * GB_S for rate in gb_per_s])


def send(
    flows: Fluid,
    now: float,
    name: Hashable,
    route: Sequence[int],
    bytes: float,
    cap: float = math.inf,
    rank: int = 0,
) -> None:
    """Start a flow over resources; those named twice are taken twice."""
    flows.start(
        now, name, tuple((resource, float(times)) for resource, times in Counter(route).items()), bytes, cap, rank
    )


def ends(flows: Fluid) -> dict[object, float]:
    """When everything in flight ends if nothing else starts."""
    flows.advance(FOREVER)
    return flows.finished


class TestHandSolved:
    def test_one_flow_takes_bytes_over_capacity(self) -> None:
        flows = make_fluid(8)
        send(flows, 100, "a", [0], 4000)
        assert flows.next_end() == 600
        assert ends(flows) == {"a": 600}

    def test_two_flows_share_and_the_rest_goes_at_full_rate(self) -> None:
        flows = make_fluid(12)
        send(flows, 0, "a", [0], 120)
        send(flows, 0, "b", [0], 60)
        assert ends(flows) == {"b": 10, "a": 15}

    def test_arrival_midway(self) -> None:
        flows = make_fluid(10)
        send(flows, 0, "a", [0], 1000)  # 500 bytes by 50, then 5 a nanosecond for 60, then 20 ns at 10
        send(flows, 50, "b", [0], 300)
        assert flows.progress("a") == 500
        assert ends(flows) == {"b": 110, "a": 130}

    def test_three_flows_over_two_links(self) -> None:
        flows = make_fluid(10, 4)
        send(flows, 0, "long", [0, 1], 200)
        send(flows, 0, "first", [0], 800)
        send(flows, 0, "second", [1], 100)
        assert flows.rates() == {"long": 2 * GB_S, "first": 8 * GB_S, "second": 2 * GB_S}
        # At 50 "second" is through: "long" has 100 left and 4 a nanosecond, "first" 400 left and 6.
        # At 75 "long" is through: "first" has 250 left and all 10.
        assert ends(flows) == {"second": 50, "long": 75, "first": 100}

    def test_a_flows_own_cap_leaves_the_rest_to_others(self) -> None:
        flows = make_fluid(10)
        send(flows, 0, "capped", [0], 30, cap=3 * GB_S)
        send(flows, 0, "free", [0], 100)
        assert flows.rates() == {"capped": 3 * GB_S, "free": 7 * GB_S}
        assert ends(flows) == {"capped": 10, "free": 13}

    def test_a_cap_above_the_fair_share_changes_nothing(self) -> None:
        flows = make_fluid(10)
        send(flows, 0, "capped", [0], 50, cap=6 * GB_S)
        send(flows, 0, "free", [0], 50)
        assert ends(flows) == {"capped": 10, "free": 10}

    def test_a_flow_needs_no_resource_if_it_has_a_cap(self) -> None:
        flows = make_fluid()
        send(flows, 0, "a", [], 40, cap=4 * GB_S)
        assert ends(flows) == {"a": 10}

    def test_using_a_resource_twice_loads_it_twice(self) -> None:
        flows = make_fluid(12)
        send(flows, 0, "twice", [0, 0], 40)
        send(flows, 0, "once", [0], 40)
        assert flows.rates() == {"twice": 4 * GB_S, "once": 4 * GB_S}
        assert ends(flows) == {"twice": 10, "once": 10}

    def test_a_resource_that_half_of_the_bytes_pass_is_loaded_by_half(self) -> None:
        flows = make_fluid(10, 3)
        flows.start(0, "half", ((0, 1.0), (1, 0.5)), 40)
        flows.start(0, "whole", ((1, 1.0),), 40)
        assert flows.rates() == {"half": 2 * GB_S, "whole": 2 * GB_S}
        flows.advance(20)
        flows.finished.clear()
        flows.start(20, "half", ((0, 1.0), (1, 0.5)), 60)
        assert ends(flows) == {"half": 30}

    def test_both_directions_together(self) -> None:
        down, up, both = 0, 1, 2
        flows = make_fluid(10, 10, 14)
        send(flows, 0, "in", [down, both], 70)
        send(flows, 0, "out", [up, both], 170)
        assert ends(flows) == {"in": 10, "out": 20}

    def test_an_unlimited_resource_limits_nothing(self) -> None:
        flows = Fluid([math.inf, 5 * GB_S])
        send(flows, 0, "a", [0, 1], 50)
        send(flows, 0, "b", [0], 50, cap=10 * GB_S)
        assert ends(flows) == {"a": 10, "b": 5}


class TestRanks:
    def test_a_lower_rank_goes_first_and_the_other_waits(self) -> None:
        flows = make_fluid(12)
        send(flows, 0, "a", [0], 120, rank=1)
        send(flows, 0, "b", [0], 60)
        assert flows.rates() == {"a": 0, "b": 12 * GB_S}
        assert ends(flows) == {"b": 5, "a": 15}

    def test_what_the_first_leave_is_shared_fairly_by_the_next(self) -> None:
        flows = make_fluid(12)
        send(flows, 0, "capped", [0], 40, cap=4 * GB_S)
        send(flows, 0, "long", [0], 80, rank=1)
        send(flows, 0, "short", [0], 40, rank=1)
        # 4 each until 10; then "long" alone has 12 for its 40 bytes.
        assert ends(flows) == {"capped": 10, "short": 10, "long": pytest.approx(10 + 40 / 12)}

    def test_one_full_link_stops_a_flow_that_has_room_elsewhere(self) -> None:
        flows = make_fluid(10, 4)
        send(flows, 0, "first", [1], 40)
        send(flows, 0, "across", [0, 1], 20, rank=1)
        send(flows, 0, "last", [0], 100, rank=2)
        # "across" stands still until 10; then it has 4 until 15, and "last" 6.
        assert flows.rates() == {"first": 4 * GB_S, "across": 0, "last": 10 * GB_S}
        assert ends(flows) == {"first": 10, "last": 10, "across": 15}

    def test_an_arrival_takes_all_from_a_higher_rank_and_gives_it_back(self) -> None:
        flows = make_fluid(10)
        send(flows, 0, "patient", [0], 100, rank=1)
        send(flows, 5, "urgent", [0], 30)
        assert flows.progress("patient") == 50
        flows.advance(7)
        assert flows.progress("patient") == 50
        assert ends(flows) == {"urgent": 8, "patient": 13}

    def test_a_flow_may_be_given_another_rank(self) -> None:
        flows = make_fluid(10)
        send(flows, 0, "a", [0], 100, rank=1)
        send(flows, 0, "b", [0], 100, rank=1)
        flows.rerank(4, "b", 0)  # 20 bytes each by then
        assert flows.rates() == {"a": 0, "b": 10 * GB_S}
        assert ends(flows) == {"b": 12, "a": 20}
        flows.rerank(30, "b", 1)
        assert flows.finished == {"b": 12, "a": 20}

    def test_rounding_leaves_no_rate_to_the_next_rank(self) -> None:
        flows = make_fluid(1.1)
        for number in range(3):
            send(flows, 0, number, [0], 100)
        send(flows, 0, "later", [0], 100, rank=1)
        assert flows.rates()["later"] == 0


class TestEnds:
    def test_a_flow_without_bytes_ends_at_once_and_disturbs_nobody(self) -> None:
        flows = make_fluid(10)
        send(flows, 0, "a", [0], 100)
        send(flows, 4, "nothing", [0], 0)
        assert flows.finished == {"nothing": 4}
        assert ends(flows) == {"nothing": 4, "a": 10}

    def test_several_ends_in_one_advance_are_exact_and_in_order(self) -> None:
        flows = make_fluid(6)
        for number, size in enumerate((30, 20, 10)):
            send(flows, 0, number, [0], size)
        flows.advance(1000)
        assert list(flows.finished.items()) == [(2, 5), (1, 25 / 3), (0, 10)]
        assert len(flows) == 0
        assert flows.next_end() == math.inf

    def test_progress_counts_until_the_latest_time(self) -> None:
        flows = make_fluid(8)
        send(flows, 0, "a", [0], 100)
        flows.advance(5)
        send(flows, 5, "b", [0], 100)
        flows.advance(10)
        assert (flows.progress("a"), flows.progress("b")) == (60, 20)
        flows.advance(FOREVER)
        with pytest.raises(KeyError):
            flows.progress("a")

    def test_a_time_in_the_past_counts_as_now(self) -> None:
        flows = make_fluid(10)
        send(flows, 100, "a", [0], 100)
        flows.advance(105)
        flows.advance(50)
        send(flows, 103, "b", [0], 20)
        assert flows.progress("a") == 50
        assert ends(flows) == {"b": 109, "a": 112}

    def test_a_name_can_be_used_again_after_its_end(self) -> None:
        flows = make_fluid(10)
        send(flows, 0, "a", [0], 100)
        flows.advance(20)
        assert flows.finished.pop("a") == 10
        send(flows, 20, "a", [0], 100)
        assert ends(flows) == {"a": 30}

    def test_equal_flows_end_together_whatever_happened_meanwhile(self) -> None:
        flows = make_fluid(1, 1, 0.7)
        for name, route in (("a", [0, 2]), ("b", [1, 2])):
            send(flows, 0, name, route, 10**6 / 3)
        for number in range(200):
            send(flows, number * 1000 / 7, number, [number % 2], 100 / 3)
            send(flows, number * 1000 / 7, -1 - number, [1 - number % 2], 100 / 3)
        finished = ends(flows)
        assert finished["a"] == finished["b"]

    def test_flows_that_should_end_together_do_in_spite_of_rounding(self) -> None:
        starts = [number * 1000 / 7 for number in range(7)]
        flows = make_fluid(1.1)
        for number, start in enumerate(starts):  # what is left to send from here until 2000 ns, shared as it will be
            shares = [
                (then - since) / alive for alive, (since, then) in enumerate(pairwise([*starts, 2000.0]), start=1)
            ]
            send(flows, start, number, [0], 1.1 * math.fsum(shares[number:]))
        finished = ends(flows)
        assert finished[0] == pytest.approx(2000, abs=1e-6)
        assert set(finished.values()) == {finished[0]}

    @pytest.mark.parametrize("base", [0, 10**9, 10**13, 10**16])
    def test_a_clock_of_whole_nanoseconds_sees_each_end_when_it_rings(self, base: int) -> None:
        flows = make_fluid(12.35, 8.8)
        for number in range(40):
            send(flows, base + number, number, [number % 2] if number % 3 else [0, 1], 1000 / (number + 3))
        rings = 0
        while (following := flows.next_end()) < math.inf:
            ended = len(flows.finished)
            flows.advance(whole_ns(following))
            assert len(flows.finished) > ended
            rings += 1
        assert len(flows.finished) == 40
        assert rings <= 40

    def test_whole_nanoseconds_round_up_but_for_rounding(self) -> None:
        assert [whole_ns(time) for time in (7, 7 + 1e-9, 7.01, 6.999999)] == [7, 7, 8, 7]

    def test_an_end_just_after_a_tick_belongs_to_that_tick(self) -> None:
        flows = make_fluid(1)
        send(flows, 0, "a", [0], 7 + 1e-9)
        send(flows, 0, "b", [0], 100)
        flows.advance(14)
        assert flows.finished == {"a": pytest.approx(14)}

    def test_forgetting_known_rates_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run() -> dict[object, float]:
            flows = make_fluid(7, 5)
            for number in range(60):
                send(flows, number * 3, number, [[0], [1], [0, 1]][number % 3], 10 + number % 7)
            return ends(flows)

        expected = run()
        monkeypatch.setattr(fluid, "_REMEMBERED", 2)
        assert run() == expected


class TestRefusals:
    def test_capacities_must_be_positive(self) -> None:
        with pytest.raises(ValueError, match="positive"):
            Fluid([1.0, 0.0])

    @pytest.mark.parametrize("loads", [((0, 1.0), (0, 1.0)), ((0, 0.0),), ((0, -1.0),)])
    def test_loads_are_positive_and_name_each_resource_once(self, loads: Loads) -> None:
        with pytest.raises(ValueError, match="each resource once"):
            make_fluid(1).start(0, "a", loads, 1)

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            (("a", [0], 1), "in flight already"),
            (("b", [0], -1), "bytes to send"),
            (("b", [0], math.nan), "bytes to send"),
            (("b", [0], math.inf), "bytes to send"),
            (("b", [0], 1, 0.0), "cap must be positive"),
            (("b", [], 1), "nothing limits"),
            (("b", [1], 1), "nothing limits"),
        ],
    )
    def test_what_makes_no_sense(self, arguments: tuple[object, ...], problem: str) -> None:
        flows = Fluid([GB_S, math.inf])
        send(flows, 0, "a", [0], 10)
        with pytest.raises(ValueError, match=problem):
            send(flows, 0, *arguments)  # type: ignore[arg-type]
        assert ends(flows) == {"a": 10}


# An independent solver ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    start: int
    loads: dict[int, Fraction]
    bytes: int
    cap: int | None
    rank: int


def level_for(capacity: Fraction, demands: list[tuple[Fraction | float, Fraction]]) -> Fraction | float:
    """The common limit under which these (demand, times) take ``capacity``; if they take less even without a limit,
    what the largest of them could grow to."""
    left, waiting, largest, its_times = capacity, sorted(demands), Fraction(0), Fraction(1)
    while waiting:
        together = sum(times for _, times in waiting)
        if waiting[0][0] * together > left:
            return left / together
        demand, its_times = waiting.pop(0)
        largest = Fraction(demand)
        left -= largest * its_times
    return largest + left / its_times


def fair_rates(capacities: Sequence[Fraction], jobs: Sequence[Job]) -> list[Fraction]:
    """Max-min rates as the fixed point of what each resource advertises (Charny 1994), not by filling."""
    levels: list[Fraction | float] = [math.inf] * len(capacities)

    def limit(job: Job, but_for: int | None) -> Fraction | float:
        cap = math.inf if job.cap is None else Fraction(job.cap)
        return min([cap, *(levels[r] for r in job.loads if r != but_for)])

    for _ in range(1000):
        advertised = [
            level_for(
                capacity,
                [(limit(job, resource), job.loads[resource]) for job in jobs if resource in job.loads],
            )
            for resource, capacity in enumerate(capacities)
        ]
        if advertised == levels:
            return [Fraction(limit(job, None)) for job in jobs]
        levels = advertised
    raise AssertionError("the advertised rates do not settle")


def exact_rates(capacities: Sequence[int], jobs: Sequence[Job]) -> list[Fraction]:
    """Rank after rank, each with what the earlier leave."""
    room, found = [Fraction(capacity) for capacity in capacities], [Fraction(0)] * len(jobs)
    for rank in sorted({job.rank for job in jobs}):
        members = [number for number, job in enumerate(jobs) if job.rank == rank]
        for number, rate in zip(members, fair_rates(room, [jobs[number] for number in members]), strict=True):
            found[number] = rate
        for number in members:
            for resource, times in jobs[number].loads.items():
                room[resource] -= times * found[number]
    return found


def exact_ends(capacities: Sequence[int], jobs: Sequence[Job]) -> list[Fraction]:
    left = {number: Fraction(job.bytes) for number, job in enumerate(jobs)}
    found: dict[int, Fraction] = {}
    now = Fraction(0)
    while left:
        flying = [number for number in left if jobs[number].start <= now]
        rates = dict(zip(flying, exact_rates(capacities, [jobs[number] for number in flying]), strict=True))
        events = [now + left[number] / rates[number] for number in flying if rates[number]]
        events += [Fraction(jobs[number].start) for number in left if jobs[number].start > now]
        then = min(events)
        for number, rate in rates.items():
            left[number] -= rate * (then - now)
        now = then
        for number in [number for number in flying if left[number] == 0]:
            del left[number]
            found[number] = now
    return [found[number] for number in range(len(jobs))]


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[int], list[Job]]:
    capacities = draw(st.lists(st.integers(1, 20), min_size=1, max_size=5))
    times = st.sampled_from([Fraction(1), Fraction(1), Fraction(2), Fraction(1, 2), Fraction(1, 3)])
    job = st.builds(
        Job,
        start=st.integers(0, 300),
        loads=st.dictionaries(st.integers(0, len(capacities) - 1), times, min_size=1, max_size=4),
        bytes=st.integers(1, 3000),
        cap=st.none() | st.integers(1, 20),
        rank=st.integers(0, 2),
    )
    return capacities, draw(st.lists(job, min_size=1, max_size=9))


def launch(flows: Fluid, time: float, number: int, job: Job) -> None:
    cap = math.inf if job.cap is None else job.cap * GB_S
    loads = tuple((resource, float(times)) for resource, times in job.loads.items())
    flows.start(time, number, loads, job.bytes, cap, job.rank)


def start_all(capacities: Sequence[int], jobs: Sequence[Job]) -> Fluid:
    flows = make_fluid(*capacities)
    for number, job in sorted(enumerate(jobs), key=lambda numbered: numbered[1].start):
        launch(flows, job.start, number, job)
    return flows


def rates_together(capacities: Sequence[int], jobs: Sequence[Job]) -> list[float]:
    """Rates (bytes/ns) of these jobs, all under way."""
    flows = make_fluid(*capacities)
    for number, job in enumerate(jobs):
        launch(flows, 0, number, job)
    return [flows.rates()[number] / GB_S for number in range(len(jobs))]


@given(networks())
@settings(max_examples=300)
def test_rates_agree_with_an_independent_solver(network: tuple[list[int], list[Job]]) -> None:
    capacities, jobs = network
    expected = [float(rate) for rate in exact_rates(capacities, jobs)]
    assert rates_together(capacities, jobs) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@given(networks())
@settings(max_examples=300)
def test_ends_agree_with_an_independent_solver(network: tuple[list[int], list[Job]]) -> None:
    capacities, jobs = network
    found = ends(start_all(capacities, jobs))
    for number, expected in enumerate(exact_ends(capacities, jobs)):
        assert found[number] == pytest.approx(float(expected), rel=1e-12, abs=0.01)


@given(networks())
@settings(max_examples=200)
def test_no_resource_is_overloaded_and_every_flow_has_a_bottleneck(network: tuple[list[int], list[Job]]) -> None:
    """Which is what max-min fair means, among the flows of a rank."""
    capacities, jobs = network
    rated = list(zip(rates_together(capacities, jobs), jobs, strict=True))

    def load(resource: int, rank: int) -> float:
        return sum(rate * float(job.loads.get(resource, 0)) for rate, job in rated if job.rank <= rank)

    assert all(load(resource, 9) <= capacity * (1 + 1e-9) for resource, capacity in enumerate(capacities))
    for rate, job in rated:
        at_cap = job.cap is not None and rate == pytest.approx(job.cap)
        full_and_fastest = any(
            load(resource, job.rank) == pytest.approx(capacities[resource])
            and all(rate >= other * (1 - 1e-9) for other, j in rated if j.rank == job.rank and resource in j.loads)
            for resource in job.loads
        )
        assert at_cap or full_and_fastest


@given(networks(), st.lists(st.floats(0, 4000), max_size=20))
@settings(max_examples=100)
def test_looking_more_often_changes_nothing(network: tuple[list[int], list[Job]], looks: list[float]) -> None:
    capacities, jobs = network
    expected = ends(start_all(capacities, jobs))
    flows = make_fluid(*capacities)
    sent = dict.fromkeys(range(len(jobs)), 0.0)
    starts = [(float(job.start), number) for number, job in enumerate(jobs)]
    for time, number in sorted([*starts, *((look, -1) for look in looks)]):
        flows.advance(time)
        for flow in sent:
            if flow in flows.rates():
                assert flows.progress(flow) >= sent[flow] - 1e-6
                sent[flow] = flows.progress(flow)
        if number >= 0:
            launch(flows, time, number, jobs[number])
    found = ends(flows)
    assert found == pytest.approx(expected, rel=1e-12, abs=0.01)
    assert all(earlier <= later for earlier, later in pairwise(found.values()))


@given(networks(), st.lists(st.tuples(st.integers(0, 300), st.integers(0, 8)), max_size=5))
@settings(max_examples=100)
def test_work_is_conserved_whatever_is_reranked(
    network: tuple[list[int], list[Job]], changes: list[tuple[int, int]]
) -> None:
    """One resource: however flows are ranked, it is busy while anything is left, and the last end stays the same."""
    [capacity, *_], jobs = network
    jobs = [replace(job, loads={0: Fraction(1)}, cap=None) for job in jobs]
    expected = max(exact_ends([capacity], jobs))
    flows = make_fluid(capacity)
    starts = [(job.start, 0, number) for number, job in enumerate(jobs)]
    for time, late, number in sorted([*starts, *((time, 1, number) for time, number in changes)]):
        if late:
            flows.rerank(time, number, 0)
        else:
            launch(flows, time, number, jobs[number])
    assert max(ends(flows).values()) == pytest.approx(float(expected), rel=1e-12, abs=0.01)
