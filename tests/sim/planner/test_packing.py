"""Packs are the best of all cuts, by looking at all cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.plan import Pack, UpdateOn
from sim.planner.packing import Packer
from traces.costs import Costs
from traces.schema import Phase
from traces.synthetic import skewed_trace, uniform_trace, with_frozen, with_tied

U = 2
ROOMY = 10**15


def time_of(costs: Costs, pack: Pack, phase: Phase) -> int:
    return sum(
        costs.forward_ns(layer, layer, U) + (costs.backward_ns(layer, layer, U) if phase is Phase.BACKWARD else 0)
        for layer in range(pack[0], pack[1] + 1)
    )


def bytes_of(costs: Costs, pack: Pack, phase: Phase, update: UpdateOn) -> int:
    first, last = pack
    held = costs.weight_bytes(first, last) + costs.buffer_bytes(first, last)
    at_work = held + costs.input_bytes(first, U)
    if phase is Phase.FORWARD:
        return at_work + costs.output_bytes(last, U) + costs.forward_workspace_bytes(first, last, U)
    at_work += costs.gradient_bytes(first, last) + costs.backward_workspace_bytes(first, last, U)
    at_work += costs.input_gradient_bytes(first, U) if first > 0 else 0
    at_work += costs.label_bytes(U) if last == costs.layer_count - 1 else costs.input_gradient_bytes(last + 1, U)
    if update is UpdateOn.CPU:
        return at_work
    return max(at_work, held + costs.gradient_bytes(first, last) + costs.optimizer_state_bytes(first, last))


def all_cuts(layers: range, count: int) -> list[tuple[Pack, ...]]:
    inner = combinations(range(layers.start + 1, layers.stop), count - 1)
    return [tuple((a, b - 1) for a, b in pairwise((layers.start, *cut, layers.stop))) for cut in inner]


def best_cut(
    costs: Costs, layers: range, count: int, phase: Phase, cap: int, update: UpdateOn
) -> tuple[Pack, ...] | None:
    fitting = [
        cut for cut in all_cuts(layers, count) if all(bytes_of(costs, pack, phase, update) <= cap for pack in cut)
    ]

    def merit(cut: tuple[Pack, ...]) -> tuple[int, int, tuple[Pack, ...]]:
        times = [time_of(costs, pack, phase) for pack in cut]
        return max(times), -min(times), cut

    return min(fitting, key=merit, default=None)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Costs, range, Phase, UpdateOn, int]:
    size = draw(st.integers(2, 9))
    trace = skewed_trace(draw(st.integers(0, 10_000)), size)
    if draw(st.booleans()):
        trace = with_frozen(trace, (draw(st.integers(0, size - 2)),))
    elif draw(st.booleans()):
        trace = with_tied(trace, (0, size - 2), 3_000_000) if size > 2 else trace
    costs = Costs(trace)
    layers = range(draw(st.integers(1, size)))
    phase = draw(st.sampled_from([Phase.FORWARD, Phase.BACKWARD]))
    update = draw(st.sampled_from(UpdateOn))
    packs = [(a, b) for a in layers for b in range(a, layers.stop)]
    held = sorted({bytes_of(costs, pack, phase, update) for pack in packs})
    return costs, layers, phase, update, draw(st.sampled_from(held)) - draw(st.integers(0, 1))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_best_of_all_cuts(problem: tuple[Costs, range, Phase, UpdateOn, int]) -> None:
    costs, layers, phase, update, cap = problem
    expected = {count: best_cut(costs, layers, count, phase, cap, update) for count in range(1, len(layers) + 1)}
    packer = Packer(costs, U, phase, cap, update=update)
    for count, cut in expected.items():
        assert packer.balanced(count, layers.stop) == cut
        largest = None if cut is None else max(time_of(costs, pack, phase) for pack in cut)
        assert packer.bottleneck_ns(count, layers.stop) == largest
    fewest = min((count for count, cut in expected.items() if cut), default=None)
    assert packer.smallest_count(layers.stop) == fewest


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_hungriest_pack_decides_whether_anything_fits(
    problem: tuple[Costs, range, Phase, UpdateOn, int],
) -> None:
    costs, layers, phase, update, cap = problem
    packer = Packer(costs, U, phase, cap, update=update)
    pack, held = packer.hungriest(layers.stop)
    assert held == bytes_of(costs, pack, phase, update) == packer.held_bytes(pack)
    if held > cap:
        assert packer.smallest_count(layers.stop) is None
    inside = range(pack[0], pack[1] + 1)
    runs = [(a, b) for a in layers for b in range(a, layers.stop) if any(a <= layer <= b for layer in inside)]
    assert any(
        held == min(bytes_of(costs, run, phase, update) for run in runs if run[0] <= layer <= run[1])
        for layer in inside
    )


def test_equal_layers_are_dealt_evenly_with_the_small_packs_first() -> None:
    costs = Costs(uniform_trace(12))
    packs = Packer(costs, U, Phase.FORWARD, ROOMY).balanced(4, 11)
    assert packs == ((0, 1), (2, 4), (5, 7), (8, 10))


def test_a_heavy_layer_does_not_make_the_others_uneven() -> None:
    """One layer takes as long as the ten others together: they are still cut into equal halves."""
    trace = uniform_trace(12, fixed_ns=0)
    slow = tuple(
        row
        if row.layer != 10 or row.phase is not Phase.FORWARD
        else type(row)(layer=10, phase=row.phase, microbatch=row.microbatch, duration_ns=10 * row.duration_ns)
        for row in trace.times
    )
    costs = Costs(type(trace)(**{name: getattr(trace, name) for name in trace.__struct_fields__} | {"times": slow}))
    assert Packer(costs, U, Phase.FORWARD, ROOMY).balanced(3, 11) == ((0, 4), (5, 9), (10, 10))


def test_no_layers_are_no_packs() -> None:
    packer = Packer(Costs(uniform_trace(4)), U, Phase.FORWARD, ROOMY)
    assert packer.balanced(0, 0) == ()
    assert packer.smallest_count(0) == 0
    assert packer.balanced(0, 2) is None
    assert packer.balanced(3, 2) is None


def test_updates_have_no_packs() -> None:
    with pytest.raises(ValueError, match="update_cpu"):
        Packer(Costs(uniform_trace(4)), U, Phase.UPDATE_CPU, ROOMY)


def test_hundreds_of_layers_and_packs() -> None:
    costs = Costs(skewed_trace(3, 300))
    cap = 300_000_000
    packer = Packer(costs, U, Phase.BACKWARD, cap)
    largest = []
    for count in range(packer.smallest_count(300) or 0, 301):
        packs = packer.balanced(count, 300)
        assert packs is not None
        assert [pack[0] for pack in packs] == [0, *(pack[1] + 1 for pack in packs[:-1])]
        assert packs[-1][1] == 299
        assert all(packer.held_bytes(pack) <= cap for pack in packs)
        largest.append(max(packer.time_ns(pack) for pack in packs))
    assert largest == sorted(largest, reverse=True)
    assert largest[-1] == max(packer.time_ns((layer, layer)) for layer in range(300))
