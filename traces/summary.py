"""A trace in a few figures: what the model weighs, and how long it takes at each profiled microbatch size."""

from __future__ import annotations

from typing import Any

from .costs import Costs
from .doubts import blind_spots, noise
from .schema import Phase, Trace, worst

_NS_PER_S = 10**9


def summarize(trace: Trace) -> dict[str, Any]:
    """Totals over all layers, as plain JSON values.

    Weights count a tied parameter once. ``times`` has an entry for each microbatch size at which both passes and the
    sizes were profiled; its ``provenance`` is, for each figure, the least trustworthy among the layers (``memory``: of
    saved and workspace bytes).
    ``update_cpu_s`` and ``update_gpu_s`` are None where the trace has no such rows; the ``provenance`` beside them is
    theirs. ``noise`` says which measured durations vary too much (None: none do), ``unseen`` what the trace leaves out.
    """
    costs = Costs(trace)
    profiled = {row.microbatch for row in trace.sizes}
    profiled &= {*costs.microbatches(Phase.FORWARD)} & {*costs.microbatches(Phase.BACKWARD)}
    return {
        "model": trace.model,
        "device": trace.device,
        "dtype": trace.dtype,
        "optimizer": trace.optimizer,
        "sample": trace.sample,
        "modelled_by": trace.modelled_by,
        "framework": trace.framework,
        "threads": trace.threads,
        "warmups": trace.warmups,
        "repeats": trace.repeats,
        "layers": len(trace.layers),
        "weight_bytes": _weight_bytes(trace),
        "optimizer_state_bytes": sum(layer.optimizer_state_bytes for layer in trace.layers),
        "update_cpu_s": _update_s(trace, Phase.UPDATE_CPU),
        "update_gpu_s": _update_s(trace, Phase.UPDATE_GPU),
        "provenance": {
            f"{phase.value}_s": worst(row.provenance for row in rows).value
            for phase in (Phase.UPDATE_CPU, Phase.UPDATE_GPU)
            if (rows := [row for row in trace.times if row.phase is phase])
        },
        "times": [_times(costs, u) for u in sorted(profiled)],
        "noise": None if (found := noise(trace)) is None else str(found),
        "unseen": list(blind_spots(trace)),
    }


def outline(trace: Trace) -> dict[str, Any]:
    """What a trace is of, as plain JSON values."""
    return {
        "model": trace.model,
        "device": trace.device,
        "dtype": trace.dtype,
        "sample": trace.sample,
        "layers": len(trace.layers),
        "weight_bytes": _weight_bytes(trace),
        "microbatches": sorted({row.microbatch for row in trace.sizes}),
        "sources": sorted({row.provenance.value for row in trace.times}),
        "modelled_by": trace.modelled_by,
    }


def _weight_bytes(trace: Trace) -> int:
    """Of all layers, a tied parameter once."""
    groups = trace.tied_groups
    shared = sum(
        tied.weight_bytes
        for index, layer in enumerate(trace.layers)
        for tied in layer.tied
        if groups[tied.group][0] != index
    )
    return sum(layer.weight_bytes for layer in trace.layers) - shared


def _update_s(trace: Trace, phase: Phase) -> float | None:
    durations = [row.duration_ns for row in trace.times if row.phase is phase]
    return sum(durations) / _NS_PER_S if durations else None


def _times(costs: Costs, u: int) -> dict[str, Any]:
    last = costs.layer_count - 1
    layers = range(costs.layer_count)
    return {
        "microbatch": u,
        "forward_s": costs.forward_ns(0, last, u) / _NS_PER_S,
        "backward_s": costs.backward_ns(0, last, u) / _NS_PER_S,
        "input_bytes": sum(costs.input_bytes(layer, u) for layer in layers),
        "provenance": {
            "forward_s": costs.pack_provenance(0, last, Phase.FORWARD, u).value,
            "backward_s": costs.pack_provenance(0, last, Phase.BACKWARD, u).value,
            "input_bytes": worst(costs.size_provenance(layer, u) for layer in layers).value,
            "memory": worst(costs.memory_provenance(layer, u) for layer in layers).value,
        },
    }
