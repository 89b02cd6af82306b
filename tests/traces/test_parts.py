"""A backward in two parts: what a trace says of it, and what is modelled where it says nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from msgspec.structs import replace

from tests.strategies import traces
from traces.costs import Costs
from traces.errors import TraceError
from traces.files import encode_trace, load_trace, save_trace
from traces.schema import Phase, Provenance, TimeRow, Trace
from traces.synthetic import uniform_trace, with_frozen
from traces.transformer import GPT2_FAMILY, GTX_1080_TI, Gpt2, gpt2_trace


def with_parts(trace: Trace) -> Trace:
    """The trace with a third of each backward timed as its first part, half as its second, and bytes of its own."""
    parts = [
        replace(row, phase=phase, duration_ns=row.duration_ns // divisor, provenance=Provenance.MEASURED)
        for row in trace.times
        if row.phase is Phase.BACKWARD
        for phase, divisor in ((Phase.BACKWARD_INPUT, 3), (Phase.BACKWARD_WEIGHT, 2))
    ]
    sizes = tuple(replace(row, held_bytes=7 + row.layer, parts_workspace_bytes=50 - row.layer) for row in trace.sizes)
    return replace(trace, times=(*trace.times, *parts), sizes=sizes)


@given(trace=traces())
def test_what_is_not_timed_is_half_and_half_and_marked(trace: Trace) -> None:
    costs = Costs(trace)
    for row in (row for row in trace.times if row.phase is Phase.BACKWARD):
        at = row.layer, row.layer, row.microbatch
        of_weight = costs.backward_weight_ns(*at)
        assert costs.backward_input_ns(*at) + of_weight == row.duration_ns
        assert of_weight == (row.duration_ns // 2 if trace.layers[row.layer].gradient_bytes else 0)
        for phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT):
            assert costs.provenance(row.layer, phase, row.microbatch) is Provenance.MODELLED
    for size in trace.sizes:
        held = size.saved_bytes * (2 if trace.layers[size.layer].gradient_bytes else 1)
        assert costs.held_bytes(size.layer, size.layer, size.microbatch) == held
        peak = size.saved_bytes + size.workspace_bytes
        assert costs.parts_workspace_bytes(size.layer, size.layer, size.microbatch) == peak


@given(trace=traces())
def test_what_is_timed_is_taken(trace: Trace) -> None:
    full = with_parts(trace)
    costs = Costs(full)
    for row in (row for row in trace.times if row.phase is Phase.BACKWARD):
        at = row.layer, row.layer, row.microbatch
        assert costs.backward_input_ns(*at) == row.duration_ns // 3
        assert costs.backward_weight_ns(*at) == row.duration_ns // 2
        assert costs.provenance(row.layer, Phase.BACKWARD_INPUT, row.microbatch) is Provenance.MEASURED
    last, u = len(trace.layers) - 1, trace.sizes[0].microbatch
    assert costs.held_bytes(0, last, u) == sum(7 + layer for layer in range(last + 1))
    assert costs.parts_workspace_bytes(0, last, u) == 50


def test_frozen_layers_have_no_second_part() -> None:
    costs = Costs(with_frozen(uniform_trace(4), [1]))
    assert costs.backward_weight_ns(1, 1, 2) == 0
    assert costs.backward_input_ns(1, 1, 2) == costs.backward_ns(1, 1, 2)


def test_files_say_nothing_of_parts_that_are_not_there(tmp_path: Path) -> None:
    plain = uniform_trace(3)
    for word in (b"backward_input", b"held_bytes", b"parts_workspace_bytes"):
        assert word not in encode_trace(plain)
        assert word in encode_trace(with_parts(plain))
    save_trace(with_parts(plain), tmp_path / "t.json")
    assert load_trace(tmp_path / "t.json") == with_parts(plain)


def test_both_parts_of_all_layers_are_timed_or_none(tmp_path: Path) -> None:
    plain = uniform_trace(3)
    row = TimeRow(layer=1, phase=Phase.BACKWARD_INPUT, microbatch=1, duration_ns=5)
    with pytest.raises(TraceError, match=r"times, phase backward_input: layer 0 .* has no row"):
        save_trace(replace(plain, times=(*plain.times, row)), tmp_path / "t.json")
    halves = tuple(row for row in with_parts(plain).times if row.phase is not Phase.BACKWARD_WEIGHT)
    with pytest.raises(TraceError, match=r"times, phase backward_weight: .* has no row"):
        save_trace(replace(plain, times=halves), tmp_path / "t.json")


@pytest.mark.parametrize("model", GPT2_FAMILY, ids=lambda model: model.name)
def test_of_a_modelled_gpt2_a_good_part_of_the_backward_can_wait(model: Gpt2) -> None:
    costs = Costs(gpt2_trace(model, GTX_1080_TI))
    last = costs.layer_count - 1
    for u in (1, 4):
        both = costs.backward_ns(1, last, u)
        of_weight = costs.backward_weight_ns(1, last, u)
        assert costs.backward_input_ns(1, last, u) + of_weight == both
        assert 0.2 < of_weight / both < 0.5
    assert costs.backward_input_ns(0, 0, 1) == 0  # nobody needs the gradient of tokens
    assert costs.backward_weight_ns(last, last, 1) == 0
