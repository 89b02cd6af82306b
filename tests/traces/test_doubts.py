"""What to doubt of a trace."""

from __future__ import annotations

from msgspec.structs import replace

from traces.doubts import blind_spots, noise
from traces.schema import Phase, Provenance, Trace
from traces.summary import summarize
from traces.synthetic import uniform_trace


def with_spread(trace: Trace, layer: int, spread: float) -> Trace:
    """The trace with one forward that varies by this part of its duration."""
    return replace(
        trace,
        times=tuple(
            replace(row, spread_ns=round(spread * row.duration_ns))
            if (row.layer, row.phase) == (layer, Phase.FORWARD)
            else row
            for row in trace.times
        ),
    )


TRACE = uniform_trace()


def measured(trace: Trace) -> Trace:
    return replace(trace, times=tuple(replace(row, provenance=Provenance.MEASURED) for row in trace.times))


def test_a_steady_trace_has_no_noise() -> None:
    assert noise(with_spread(measured(TRACE), 1, 0.2)) is None
    assert summarize(TRACE)["noise"] is None


def test_what_varies_is_named() -> None:
    found = noise(with_spread(measured(TRACE), 1, 0.5))
    assert found is not None
    assert found.rows == len([row for row in TRACE.times if (row.layer, row.phase) == (1, Phase.FORWARD)])
    assert found.of == len(TRACE.times)
    assert 0 < found.share_of_time < 1
    assert f"forward of {TRACE.layers[1].name}" in str(found)
    assert summarize(with_spread(measured(TRACE), 1, 0.5))["noise"] == str(found)


def test_what_was_not_measured_is_no_noise() -> None:
    modelled = tuple(replace(row, provenance=Provenance.MODELLED) for row in TRACE.times)
    assert noise(with_spread(replace(TRACE, times=modelled), 1, 0.5)) is None


def test_blind_spots_are_those_of_the_trace() -> None:
    on_cpu = " ".join(blind_spots(replace(measured(TRACE), device="cpu", sample="128 tokens")))
    on_gpu = " ".join(blind_spots(replace(measured(TRACE), device="NVIDIA H200")))
    modelled = tuple(replace(row, provenance=Provenance.MODELLED) for row in TRACE.times)
    estimated = " ".join(blind_spots(replace(TRACE, times=modelled)))
    largest = max(row.microbatch for row in TRACE.sizes)
    assert f"more than {largest} samples" in on_cpu
    assert "128 tokens" in on_cpu
    assert "one operator" in on_cpu
    assert "one operator" not in on_gpu
    assert "allocator" in on_gpu
    assert "modelled" in estimated
    assert "copies that run beside" not in estimated
