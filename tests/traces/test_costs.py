"""Costs: equal to the rows at profiled sizes, on the line between them, refused outside; sums equal brute force."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.strategies import traces
from traces.costs import Costs
from traces.errors import TraceError
from traces.schema import Layer, Phase, Provenance, SizeRow, TiedWeight, TimeRow, Trace, worst
from traces.synthetic import skewed_trace, uniform_trace, with_frozen, with_tied


def _runs(trace: Trace) -> list[tuple[int, int]]:
    return list(combinations_with_replacement(range(len(trace.layers)), 2))


def _two_layers(forward: dict[int, tuple[int, int]]) -> Trace:
    """Two layers without weights whose forward takes ``forward[u][layer]``."""
    layer = Layer(name="plain", kind="any", weight_bytes=0, gradient_bytes=0, optimizer_state_bytes=0)
    times = [
        TimeRow(layer=at, phase=phase, microbatch=u, duration_ns=durations[at])
        for phase in (Phase.FORWARD, Phase.BACKWARD)
        for u, durations in forward.items()
        for at in (0, 1)
    ]
    sizes = [
        SizeRow(
            layer=at,
            microbatch=u,
            input_bytes=u,
            output_bytes=u,
            input_gradient_bytes=u,
            saved_bytes=u,
            workspace_bytes=u,
            forward_workspace_bytes=u,
        )
        for u in forward
        for at in (0, 1)
    ]
    return Trace(
        model="two",
        device="paper",
        dtype="float32",
        optimizer="sgd",
        label_bytes_per_sample=8,
        layers=(layer, layer),
        times=tuple(times),
        sizes=tuple(sizes),
    )


@settings(max_examples=50)
@given(trace=traces())
def test_answers_at_profiled_sizes_are_the_rows(trace: Trace) -> None:
    costs = Costs(trace)
    for row in trace.times:
        match row.phase:
            case Phase.FORWARD:
                assert costs.forward_ns(row.layer, row.layer, row.microbatch) == row.duration_ns
            case Phase.BACKWARD:
                assert costs.backward_ns(row.layer, row.layer, row.microbatch) == row.duration_ns
            case Phase.BACKWARD_INPUT:
                assert costs.backward_input_ns(row.layer, row.layer, row.microbatch) == row.duration_ns
            case Phase.BACKWARD_WEIGHT:
                assert costs.backward_weight_ns(row.layer, row.layer, row.microbatch) == row.duration_ns
            case _:
                assert costs.update_ns(row.layer, row.layer, row.phase) == row.duration_ns
        assert costs.provenance(row.layer, row.phase, row.microbatch) is row.provenance
    for size in trace.sizes:
        at = (size.layer, size.microbatch)
        assert costs.input_bytes(*at) == size.input_bytes
        assert costs.output_bytes(*at) == size.output_bytes
        assert costs.input_gradient_bytes(*at) == size.input_gradient_bytes
        assert costs.forward_workspace_bytes(size.layer, *at) == size.forward_workspace_bytes
        assert costs.backward_workspace_bytes(size.layer, *at) == size.saved_bytes + size.workspace_bytes
        assert costs.size_provenance(*at) is size.provenance
        assert costs.label_bytes(size.microbatch) == trace.label_bytes_per_sample * size.microbatch


@settings(max_examples=50)
@given(trace=traces(), u=st.integers(1, 60))
def test_runs_of_layers_equal_brute_force(trace: Trace, u: int) -> None:
    costs = Costs(trace, extrapolate=True)
    one = [(costs.forward_ns(at, at, u), costs.backward_ns(at, at, u)) for at in range(len(trace.layers))]
    inputs = [costs.input_bytes(at, u) for at in range(len(trace.layers))]
    alone = [costs.forward_workspace_bytes(at, at, u) for at in range(len(trace.layers))]
    for first, last in _runs(trace):
        run = range(first, last + 1)
        assert costs.forward_ns(first, last, u) == sum(one[at][0] for at in run)
        assert costs.backward_ns(first, last, u) == sum(one[at][1] for at in run)
        rows = trace.layers[first : last + 1]
        assert costs.weight_bytes(first, last) == sum(row.weight_bytes for row in rows)
        assert costs.buffer_bytes(first, last) == sum(row.buffer_bytes for row in rows)
        assert costs.gradient_bytes(first, last) == sum(row.gradient_bytes for row in rows)
        assert costs.optimizer_state_bytes(first, last) == sum(row.optimizer_state_bytes for row in rows)
        expected = max(alone[at] + (inputs[at] if at > first else 0) for at in run)
        assert costs.forward_workspace_bytes(first, last, u) == expected


@settings(max_examples=50)
@given(trace=traces())
def test_backward_peak_is_what_is_saved_so_far_plus_the_layers_own_workspace(trace: Trace) -> None:
    costs = Costs(trace)
    rows = {(row.layer, row.microbatch): row for row in trace.sizes}
    for u in {row.microbatch for row in trace.sizes}:
        for first, last in _runs(trace):
            expected = max(
                sum(rows[below, u].saved_bytes for below in range(first, at + 1)) + rows[at, u].workspace_bytes
                for at in range(first, last + 1)
            )
            assert costs.backward_workspace_bytes(first, last, u) == expected


@settings(max_examples=50)
@given(trace=traces(), u=st.integers(1, 60))
def test_between_profiled_sizes_each_layer_is_on_the_line(trace: Trace, u: int) -> None:
    costs = Costs(trace)
    sizes = costs.microbatches(Phase.FORWARD)
    if u in sizes or not sizes[0] < u < sizes[-1]:
        return
    u0, u1 = max(s for s in sizes if s < u), min(s for s in sizes if s > u)
    rows = {(row.layer, row.microbatch): row.duration_ns for row in trace.times if row.phase is Phase.FORWARD}
    for layer in range(len(trace.layers)):
        low, high = rows[layer, u0], rows[layer, u1]
        exact = low + Fraction(high - low) * (u - u0) / (u1 - u0)
        assert abs(costs.forward_ns(layer, layer, u) - exact) <= Fraction(1, 2)
        assert costs.provenance(layer, Phase.FORWARD, u) is Provenance.INTERPOLATED


def test_halves_round_up_in_each_layer_before_summing() -> None:
    costs = Costs(_two_layers({1: (10, 10), 3: (15, 11)}))
    assert [costs.forward_ns(at, at, 2) for at in (0, 1)] == [13, 11]
    assert costs.forward_ns(0, 1, 2) == 24


@pytest.mark.parametrize("u", [1, 2, 3, 5, 7, 8, 13, 100])
def test_proportional_sizes_are_exact_at_any_size(u: int) -> None:
    costs = Costs(skewed_trace(7, microbatches=(2, 8)), extrapolate=True)
    for layer in range(costs.layer_count):
        assert costs.input_bytes(layer, u) * 2 == costs.input_bytes(layer, 2) * u
        assert costs.output_bytes(layer, u) * 2 == costs.output_bytes(layer, 2) * u


def test_sizes_outside_the_profile_are_refused_with_the_way_out() -> None:
    costs = Costs(_two_layers({2: (10, 20), 4: (30, 40)}))
    for u in (1, 5):
        with pytest.raises(TraceError) as caught:
            costs.forward_ns(0, 1, u)
        message = str(caught.value)
        assert "trace of two on paper: forward times of layers 0-1" in message
        assert f"microbatch size {u} is outside the profiled sizes 2, 4" in message
        assert "--extrapolate" in message
    with pytest.raises(TraceError, match="sizes of layers 0-1: microbatch size 5"):
        costs.input_bytes(0, 5)
    with pytest.raises(TraceError, match="backward times"):
        costs.provenance(0, Phase.BACKWARD, 9)


def test_extrapolation_follows_the_two_nearest_sizes_and_stays_above_zero() -> None:
    costs = Costs(_two_layers({2: (10, 20), 4: (40, 20), 8: (50, 60)}), extrapolate=True)
    assert [costs.forward_ns(0, 0, u) for u in (1, 10, 12)] == [0, 55, 60]
    assert [costs.forward_ns(1, 1, u) for u in (1, 10, 12)] == [20, 80, 100]
    assert costs.provenance(0, Phase.FORWARD, 10) is Provenance.EXTRAPOLATED
    with pytest.raises(TraceError, match="size 0"):
        costs.forward_ns(0, 0, 0)


def test_a_single_profiled_size_answers_others_only_by_scaling() -> None:
    trace = _two_layers({4: (10, 7)})
    with pytest.raises(TraceError, match="outside the profiled sizes 4;"):
        Costs(trace).forward_ns(0, 0, 2)
    costs = Costs(trace, extrapolate=True)
    assert [costs.forward_ns(0, 0, u) for u in (2, 4, 8)] == [5, 10, 20]
    assert costs.forward_ns(1, 1, 2) == 4


def test_largest_microbatch_is_what_every_table_can_answer() -> None:
    trace = uniform_trace(microbatches=(1, 2, 4))
    assert Costs(trace).largest_microbatch() == 4
    shorter = replace(trace, times=tuple(r for r in trace.times if r.phase is Phase.FORWARD or r.microbatch < 4))
    costs = Costs(shorter)
    assert costs.largest_microbatch() == costs.largest_microbatch(Phase.BACKWARD) == 2
    assert costs.largest_microbatch(Phase.FORWARD) == 4


def test_updates_sum_and_missing_rows_are_named() -> None:
    trace = uniform_trace(4, weight_bytes=1000)
    costs = Costs(trace)
    assert costs.update_ns(0, 3, Phase.UPDATE_CPU) == 3000
    assert costs.update_ns(1, 2, Phase.UPDATE_GPU) == 200
    assert costs.update_ns(3, 3, Phase.UPDATE_CPU) == 0
    without = replace(trace, times=tuple(r for r in trace.times if (r.layer, r.phase) != (2, Phase.UPDATE_GPU)))
    costs = Costs(without)
    assert costs.update_ns(0, 1, Phase.UPDATE_GPU) == 200
    with pytest.raises(TraceError, match=r"layer 2 \(layer2\): has no update_gpu row.*plan updates on the CPU"):
        costs.update_ns(0, 3, Phase.UPDATE_GPU)


def test_tied_weights_are_owned_by_the_first_user_and_frozen_layers_own_none() -> None:
    costs = Costs(with_frozen(with_tied(uniform_trace(5, weight_bytes=1000), (1, 3), 70), [0]))
    assert [costs.owned_weight_bytes(at) for at in range(5)] == [0, 1070, 1000, 1000, 0]
    assert [costs.updates(at) for at in range(5)] == [False, True, True, True, False]
    assert [costs.tied_partners(at) for at in range(5)] == [(), (3,), (), (), ()]
    assert costs.weight_bytes(0, 4) == 4140
    assert costs.gradient_bytes(0, 4) == 3140
    assert costs.optimizer_state_bytes(0, 4) == 6140
    assert costs.update_ns(0, 4, Phase.UPDATE_CPU) == 3070


def test_a_layer_that_only_borrows_needs_no_update() -> None:
    trace = uniform_trace(3, weight_bytes=1000)
    tied = (TiedWeight(group="table", weight_bytes=1000),)
    layers = tuple(
        replace(layer, tied=tied, optimizer_state_bytes=0 if at else 2000) if layer.weight_bytes else layer
        for at, layer in enumerate(trace.layers)
    )
    times = tuple(row for row in trace.times if not (row.phase.is_update and row.layer == 1))
    costs = Costs(replace(trace, layers=layers, times=times))
    assert [costs.updates(at) for at in range(3)] == [True, False, False]
    assert costs.tied_partners(0) == (1,)
    assert costs.update_ns(0, 2, Phase.UPDATE_GPU) == 100


def test_an_update_reads_everything_and_writes_weights_and_state() -> None:
    """Adam's two moments are state. A tied weight moves with the update of its first user, a frozen one never."""
    plain = uniform_trace(layers=3)
    layers = [replace(layer, weight_bytes=40, gradient_bytes=20, optimizer_state_bytes=80) for layer in plain.layers]
    tied = TiedWeight(group="embedding", weight_bytes=10)
    layers[0] = replace(layers[0], tied=(tied,))
    layers[1] = replace(layers[1], trainable=False, gradient_bytes=0, optimizer_state_bytes=0)
    layers[2] = replace(layers[2], tied=(tied,), optimizer_state_bytes=60)
    costs = Costs(replace(plain, layers=tuple(layers)))
    of_each = [(40 + 20 + 80) + (40 + 80), 0, (30 + 15 + 60) + (30 + 60)]
    assert [costs.update_bytes(layer, layer) for layer in range(3)] == of_each
    assert costs.update_bytes(0, 2) == sum(of_each)


def test_several_tied_groups_give_all_partners_once() -> None:
    trace = with_tied(with_tied(uniform_trace(6), (0, 2, 4), 10), (0, 1, 2), 20)
    costs = Costs(trace)
    assert costs.tied_partners(0) == (1, 2, 4)
    assert costs.tied_partners(2) == ()
    assert [costs.tied_owners(at) for at in range(5)] == [(), (0,), (0,), (), (0,)]


def test_where_numbers_come_from_is_counted_once_per_layer_and_size() -> None:
    trace = uniform_trace(4, microbatches=(1, 4))
    measured = tuple(
        replace(row, provenance=Provenance.MEASURED) if row.phase is Phase.FORWARD and row.layer == 0 else row
        for row in trace.times
    )
    costs = Costs(replace(trace, times=measured), extrapolate=True)
    used = [(Phase.FORWARD, 1), (Phase.FORWARD, 1), (Phase.FORWARD, 3), (Phase.BACKWARD, 9), (Phase.UPDATE_CPU, 1)]
    assert costs.tally(used) == {
        Provenance.MEASURED: 1,
        Provenance.MODELLED: 3 + 3,
        Provenance.INTERPOLATED: 4,
        Provenance.EXTRAPOLATED: 4,
    }
    assert costs.pack_provenance(0, 0, Phase.FORWARD, 1) is Provenance.MEASURED
    assert costs.pack_provenance(0, 3, Phase.FORWARD, 1) is Provenance.MODELLED
    assert costs.pack_provenance(0, 3, Phase.FORWARD, 2) is Provenance.INTERPOLATED


def test_rows_that_say_a_layer_has_no_update_do_not_count() -> None:
    trace = uniform_trace(4)
    nothing = TimeRow(layer=3, phase=Phase.UPDATE_CPU, microbatch=0, duration_ns=0)
    costs = Costs(replace(trace, times=(*trace.times, nothing)))
    assert costs.tally([(Phase.UPDATE_CPU, 0)]) == {Provenance.MODELLED: 3}


def test_worst_prefers_the_least_certain() -> None:
    assert worst([]) is Provenance.MEASURED
    assert worst([Provenance.IMPORTED, Provenance.EXTRAPOLATED, Provenance.MODELLED]) is Provenance.EXTRAPOLATED


@pytest.mark.parametrize("table", ["times", "sizes"])
def test_an_unchecked_trace_with_a_hole_is_refused_by_name(table: str) -> None:
    trace = uniform_trace(4)
    rows = tuple(row for row in getattr(trace, table) if row.layer != 2)
    with pytest.raises(TraceError, match=r"layer 2 \(layer2\) has no"):
        Costs(replace(trace, **{table: rows}))
