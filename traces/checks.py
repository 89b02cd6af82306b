"""What must hold between the rows of a trace. Types and ranges of single values are checked in ``decode.py``."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import msgspec

from .decode import convert_trace
from .errors import TraceError
from .schema import Layer, Phase, Trace


def check_trace(trace: Trace, source: str) -> None:
    """Check a whole trace, wherever it comes from. Raises TraceError for the first fault; ``source`` names it there."""
    convert_trace(msgspec.to_builtins(trace), source)
    check_relations(trace, source)


def check_relations(trace: Trace, source: str) -> None:
    """Check what must hold between rows whose own values are of the right type and range. Raises TraceError."""
    if not trace.layers:
        raise TraceError(source, "layers", "is empty; a trace needs at least the layer with the loss")
    for index, layer in enumerate(trace.layers):
        _check_layer(index, layer, source)
    _check_tied_groups(trace, source)
    _check_rows(trace, source)
    parts = [phase for phase in Phase if phase.is_part]
    timed = parts if any(row.phase.is_part for row in trace.times) else []
    for phase in (Phase.FORWARD, Phase.BACKWARD, *timed):
        rows = ((row.layer, row.microbatch) for row in trace.times if row.phase is phase)
        _check_grid(trace, f"times, phase {phase.value}", rows, source)
    _check_grid(trace, "sizes", ((row.layer, row.microbatch) for row in trace.sizes), source)
    _check_updates(trace, source)
    _check_boundaries(trace, source)


def _check_layer(index: int, layer: Layer, source: str) -> None:
    where = f"layers, layer {index} ({layer.name})"
    for column in ("gradient_bytes", "optimizer_state_bytes"):
        value = getattr(layer, column)
        if value and not layer.trainable:
            raise TraceError(
                source, where, f"{column} is {value}, but a frozen layer has none; write 0, or trainable: true"
            )
    groups = [tied.group for tied in layer.tied]
    if len(set(groups)) != len(groups):
        raise TraceError(source, where, f"tied names a group twice ({', '.join(groups)}); name each once")
    tied_bytes = sum(tied.weight_bytes for tied in layer.tied)
    if tied_bytes > layer.weight_bytes:
        raise TraceError(
            source,
            where,
            f"its tied groups hold {tied_bytes} bytes, more than its weight_bytes {layer.weight_bytes}; "
            "weight_bytes counts tied parameters too",
        )


def _check_tied_groups(trace: Trace, source: str) -> None:
    first_use: dict[str, tuple[int, int]] = {}
    for index, layer in enumerate(trace.layers):
        for tied in layer.tied:
            owner, expected = first_use.setdefault(tied.group, (index, tied.weight_bytes))
            if tied.weight_bytes != expected:
                raise TraceError(
                    source,
                    f"layers, layer {index} ({layer.name})",
                    f"tied group {tied.group!r} has {tied.weight_bytes} bytes here and {expected} in layer {owner}; "
                    "it is one parameter, so write the same size",
                )


def _check_rows(trace: Trace, source: str) -> None:
    """Layers exist, microbatch sizes suit the phase, no row twice."""
    _check_keys("times", [(row.phase, row.layer, row.microbatch) for row in trace.times], trace, source)
    _check_keys("sizes", [(None, row.layer, row.microbatch) for row in trace.sizes], trace, source)


def _check_keys(table: str, keys: list[tuple[Phase | None, int, int]], trace: Trace, source: str) -> None:
    seen: dict[tuple[Phase | None, int, int], int] = {}
    for number, (phase, layer, u) in enumerate(keys):
        where = f"{table}, row {number} (layer {layer}{f', phase {phase.value}' if phase else ''}, microbatch {u})"
        if layer >= len(trace.layers):
            raise TraceError(source, where, f"there is no layer {layer}; layers are 0-{len(trace.layers) - 1}")
        if phase and phase.is_update != (u == 0):
            wanted = "does not depend on the microbatch; write 0" if phase.is_update else "needs at least 1 sample"
            raise TraceError(source, where, f"microbatch is {u}, but {phase.value} {wanted}")
        earlier = seen.setdefault((phase, layer, u), number)
        if earlier != number:
            raise TraceError(source, where, f"is there already, as row {earlier}; keep one of them")


def _check_grid(trace: Trace, table: str, rows: Iterable[tuple[int, int]], source: str) -> None:
    """Every layer must have a row at every microbatch size that any layer has."""
    present = set(rows)
    sizes = sorted({u for _, u in present})
    for index, layer in enumerate(trace.layers):
        missing = [u for u in sizes if (index, u) not in present]
        if len(missing) == len(sizes):
            raise TraceError(source, table, f"layer {index} ({layer.name}) has no row; profile it, or write one")
        if missing:
            raise TraceError(
                source,
                table,
                f"layer {index} ({layer.name}) has no row for microbatch {missing[0]}, which other layers have; "
                "all layers must be profiled at the same sizes",
            )


def _check_updates(trace: Trace, source: str) -> None:
    """Only layers that own trained weights take time to update; an owner of tied weights updates them alone."""
    owners = {group: members[0] for group, members in trace.tied_groups.items()}
    for number, row in enumerate(trace.times):
        if not row.phase.is_update or not row.duration_ns:
            continue
        layer = trace.layers[row.layer]
        borrowed = sum(tied.weight_bytes for tied in layer.tied if owners[tied.group] != row.layer)
        if not layer.trainable or layer.weight_bytes == borrowed:
            raise TraceError(
                source,
                f"times, row {number} (layer {row.layer}, phase {row.phase.value})",
                f"duration_ns is {row.duration_ns}, but layer {row.layer} ({layer.name}) owns no trained weights; "
                "write 0 or leave the row out",
            )


def _check_boundaries(trace: Trace, source: str) -> None:
    """A layer's output is the next layer's input."""
    sizes = {(row.layer, row.microbatch): row for row in trace.sizes}
    microbatches = sorted({u for _, u in sizes})
    for layer, following in pairwise(range(len(trace.layers))):
        for u in microbatches:
            out, into = sizes[layer, u].output_bytes, sizes[following, u].input_bytes
            if out != into:
                raise TraceError(
                    source,
                    f"sizes, layer {layer} ({trace.layers[layer].name}), microbatch {u}",
                    f"output_bytes is {out}, but the input_bytes of layer {following} "
                    f"({trace.layers[following].name}) is {into}; a layer's output is the next one's input",
                )
