"""Totals of a trace."""

from __future__ import annotations

import json

import msgspec
import pytest

from traces.schema import Phase, Provenance
from traces.summary import summarize
from traces.synthetic import uniform_trace, with_tied


def test_totals_have_their_closed_form() -> None:
    found = summarize(uniform_trace(4, microbatches=(1, 2), weight_bytes=4_000_000))
    assert found["layers"] == 4
    assert found["weight_bytes"] == 3 * 4_000_000
    assert found["optimizer_state_bytes"] == 6 * 4_000_000
    assert found["update_cpu_s"] == pytest.approx(3 * 4_000_000 / 1e9)
    assert found["update_gpu_s"] == pytest.approx(3 * 400_000 / 1e9)
    assert [entry["microbatch"] for entry in found["times"]] == [1, 2]
    at_two = found["times"][1]
    assert at_two["forward_s"] == pytest.approx(4 * 2_100_000 / 1e9)
    assert at_two["backward_s"] == pytest.approx(8 * 2_100_000 / 1e9)
    assert at_two["input_bytes"] == 4 * 2 * 1_000_000
    assert set(at_two["provenance"]) == {"forward_s", "backward_s", "input_bytes", "memory"}
    assert json.loads(json.dumps(found)) == found


def test_tied_weights_count_once() -> None:
    plain = uniform_trace(4)
    tied = with_tied(plain, (0, 2), 1000)
    assert summarize(tied)["weight_bytes"] == summarize(plain)["weight_bytes"] + 1000


def test_the_least_trustworthy_layer_decides_the_provenance() -> None:
    trace = uniform_trace(3, microbatches=(1,))
    forward = next(row for row in trace.times if row.phase is Phase.FORWARD)
    rows = tuple(
        msgspec.structs.replace(row, provenance=Provenance.EXTRAPOLATED if row is forward else Provenance.MEASURED)
        for row in trace.times
    )
    found = summarize(msgspec.structs.replace(trace, times=rows))["times"][0]["provenance"]
    assert found["forward_s"] == "extrapolated"
    assert found["backward_s"] == "measured"


def test_updates_that_were_not_profiled_are_none() -> None:
    trace = uniform_trace(3)
    rows = tuple(row for row in trace.times if row.phase is not Phase.UPDATE_GPU)
    assert summarize(msgspec.structs.replace(trace, times=rows))["update_gpu_s"] is None
