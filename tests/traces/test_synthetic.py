"""Synthetic traces: valid, repeatable, and as their closed forms say."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.strategies import linear_traces
from traces.checks import check_trace
from traces.costs import Costs
from traces.schema import Phase, Trace
from traces.synthetic import skewed_trace, uniform_trace, with_frozen, with_tied


def test_uniform_layers_follow_their_closed_forms() -> None:
    trace = uniform_trace(4, weight_bytes=1000, sample_bytes=10, sample_ns=7, fixed_ns=3)
    check_trace(trace, "uniform")
    costs = Costs(trace)
    for u in range(1, 9):
        assert costs.forward_ns(0, 3, u) == 4 * (3 + 7 * u)
        assert costs.backward_ns(1, 2, u) == 2 * (6 + 14 * u)
        assert [costs.input_bytes(layer, u) for layer in range(4)] == [10 * u] * 4
        assert [costs.input_gradient_bytes(layer, u) for layer in range(4)] == [0, 10 * u, 10 * u, 10 * u]
        assert [costs.output_bytes(layer, u) for layer in range(4)] == [10 * u, 10 * u, 10 * u, 4 * u]
        assert costs.forward_workspace_bytes(0, 0, u) == 30 * u
        assert costs.backward_workspace_bytes(1, 1, u) == 30 * u + 1000 + 20 * u
        assert costs.backward_workspace_bytes(3, 3, u) == 10 * u + 14 * u
        assert costs.label_bytes(u) == 8 * u
    assert costs.weight_bytes(0, 3) == costs.gradient_bytes(0, 3) == 3000
    assert costs.optimizer_state_bytes(0, 3) == 6000
    assert costs.update_ns(0, 3, Phase.UPDATE_CPU) == 3000
    assert costs.update_ns(0, 3, Phase.UPDATE_GPU) == 300
    assert not costs.updates(3)


def test_skewed_layers_are_repeatable_and_differ() -> None:
    assert skewed_trace(5) == skewed_trace(5)
    assert skewed_trace(5).times != skewed_trace(6).times
    costs = Costs(skewed_trace(5, 8))
    assert len({costs.forward_ns(layer, layer, 2) for layer in range(8)}) > 4


@given(trace=linear_traces(tied=True, frozen=True))
def test_random_linear_traces_are_valid_and_proportional(trace: Trace) -> None:
    check_trace(trace, "linear")
    costs = Costs(trace)
    assert not costs.updates(costs.layer_count - 1)
    for layer in range(costs.layer_count):
        for ask in (costs.input_bytes, costs.output_bytes, costs.input_gradient_bytes):
            assert [ask(layer, u) for u in (1, 3, 8)] == [ask(layer, 1) * u for u in (1, 3, 8)]
    for phase in (Phase.UPDATE_CPU, Phase.UPDATE_GPU):
        assert costs.update_ns(0, costs.layer_count - 1, phase) >= 0


def test_tying_adds_one_parameter_to_its_users_and_its_state_to_the_first() -> None:
    before, after = Costs(uniform_trace(5)), Costs(with_tied(uniform_trace(5), (3, 1), 100))
    added = [after.weight_bytes(layer, layer) - before.weight_bytes(layer, layer) for layer in range(5)]
    assert added == [0, 100, 0, 100, 0]
    assert after.optimizer_state_bytes(0, 4) - before.optimizer_state_bytes(0, 4) == 200
    assert after.update_ns(1, 1, Phase.UPDATE_CPU) - before.update_ns(1, 1, Phase.UPDATE_CPU) == 100
    assert after.tied_partners(1) == (3,)


@pytest.mark.parametrize("frozen", [[0], [1, 2]])
def test_freezing_leaves_weights_and_takes_gradient_state_and_update(frozen: list[int]) -> None:
    trace = with_frozen(uniform_trace(4), frozen)
    check_trace(trace, "frozen")
    costs = Costs(trace)
    for layer in range(3):
        trained = layer not in frozen
        assert costs.updates(layer) is trained
        assert (costs.gradient_bytes(layer, layer) > 0) is trained
        assert (costs.update_ns(layer, layer, Phase.UPDATE_GPU) > 0) is trained
        assert costs.weight_bytes(layer, layer) == 4_000_000
