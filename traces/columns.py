"""The columns of a trace: one figure of every layer, at any microbatch size.

A column (forward time, input bytes, …) holds one integer per layer and profiled microbatch size. A size between two
profiled ones is interpolated along a straight line, layer by layer, and rounded to the nearest integer, so what grows
exactly linearly comes out exact. What a trace may leave out is modelled when it is read.
"""

from __future__ import annotations

from bisect import bisect_left

from .errors import TraceError
from .parts import modelled_held_bytes, modelled_parts_ns, modelled_parts_workspace_bytes
from .runs import prefix_sums
from .schema import Phase, Provenance, SizeRow, Trace, worst

_SIZES = (
    "input_bytes",
    "output_bytes",
    "input_gradient_bytes",
    "saved_bytes",
    "workspace_bytes",
    "forward_workspace_bytes",
    "relayed_bytes",
)
_MODELLED_SIZES = ("unrecomputed_workspace_bytes", "held_bytes", "parts_workspace_bytes")
"""Modelled where a row does not say."""

_MEMORY_SIZES = frozenset({"saved_bytes", "workspace_bytes", "forward_workspace_bytes"})


class Column:
    """One integer per layer and profiled microbatch size, and at any other size by straight lines."""

    def __init__(self, what: str, source: str, extrapolate: bool) -> None:
        self._what, self._source, self._extrapolate = what, source, extrapolate
        self._profiled: dict[int, dict[int, int]] = {}
        self._provenance: dict[tuple[int, int], Provenance] = {}
        self._sizes: tuple[int, ...] | None = None
        self._values: dict[int, list[int]] = {}
        self._prefixes: dict[int, list[int]] = {}

    def put(self, layer: int, u: int, value: int, provenance: Provenance) -> None:
        """Enter a profiled value; all are entered before the first question."""
        self._profiled.setdefault(u, {})[layer] = value
        self._provenance[layer, u] = provenance

    def is_full(self, layer_count: int) -> bool:
        """Whether there is a value for every layer at every size."""
        return bool(self._profiled) and all(len(values) == layer_count for values in self._profiled.values())

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Profiled sizes, ascending."""
        if self._sizes is None:
            self._sizes = tuple(sorted(self._profiled))
        return self._sizes

    def at(self, u: int) -> list[int]:
        """The value of each layer."""
        values = self._values.get(u)
        if values is None:
            values = self._values[u] = self._line(u)
        return values

    def prefix(self, u: int) -> list[int]:
        """Sums over the first 0, 1, … layers."""
        prefix = self._prefixes.get(u)
        if prefix is None:
            prefix = self._prefixes[u] = prefix_sums(self.at(u))
        return prefix

    def provenance(self, layer: int, u: int) -> Provenance:
        """Of the value at this layer; TraceError where there is no value."""
        self.at(u)
        if u in self._profiled:
            return self._provenance[layer, u]
        inside = self.microbatches[0] < u < self.microbatches[-1]
        return Provenance.INTERPOLATED if inside else Provenance.EXTRAPOLATED

    def _line(self, u: int) -> list[int]:
        layers = range(len(next(iter(self._profiled.values()))))
        if u in self._profiled:
            return [self._profiled[u][layer] for layer in layers]
        sizes = self.microbatches
        if u < 1 or not (self._extrapolate or sizes[0] < u < sizes[-1]):
            raise TraceError(
                self._source,
                f"{self._what} of layers 0-{layers[-1]}",
                f"microbatch size {u} is outside the profiled sizes {', '.join(map(str, sizes))}; "
                f"profile it, use another size, or allow guessing with --extrapolate",
            )
        if len(sizes) == 1:
            only = self._profiled[sizes[0]]
            return [_rounded_ratio(only[layer] * u, sizes[0]) for layer in layers]
        right = min(max(bisect_left(sizes, u), 1), len(sizes) - 1)
        u0, u1 = sizes[right - 1], sizes[right]
        low, high = self._profiled[u0], self._profiled[u1]
        return [max(0, low[layer] + _rounded_ratio((high[layer] - low[layer]) * (u - u0), u1 - u0)) for layer in layers]


def time_columns(trace: Trace, source: str, extrapolate: bool) -> dict[Phase, Column]:
    """Durations of forward and backward; both parts of the backward are modelled where none was timed."""
    phases = [phase for phase in Phase if not phase.is_update]
    columns = {phase: Column(f"{phase.value} times", source, extrapolate) for phase in phases}
    for row in trace.times:
        if not row.phase.is_update:
            columns[row.phase].put(row.layer, row.microbatch, row.duration_ns, row.provenance)
    if not any(row.phase.is_part for row in trace.times):
        _model_parts(trace, columns)
    return columns


def _model_parts(trace: Trace, columns: dict[Phase, Column]) -> None:
    for row in trace.times:
        if row.phase is Phase.BACKWARD and row.layer < len(trace.layers):
            parts = modelled_parts_ns(trace.layers[row.layer], row.duration_ns)
            for phase, duration_ns in parts.items():
                where = worst((row.provenance, Provenance.MODELLED))
                columns[phase].put(row.layer, row.microbatch, duration_ns, where)


def size_columns(trace: Trace, source: str, extrapolate: bool) -> dict[str, Column]:
    """Bytes that depend on the microbatch, by their names in the trace."""
    columns = {name: Column("sizes", source, extrapolate) for name in (*_SIZES, *_MODELLED_SIZES)}
    for row in trace.sizes:
        for name in _SIZES:
            provenance = row.memory_provenance if name in _MEMORY_SIZES else None
            columns[name].put(row.layer, row.microbatch, getattr(row, name), provenance or row.provenance)
        if row.layer < len(trace.layers):
            provenance = row.memory_provenance or row.provenance
            for name, modelled in zip(_MODELLED_SIZES, _modelled_bytes(trace, row), strict=True):
                told = getattr(row, name)
                columns[name].put(row.layer, row.microbatch, modelled if told is None else told, provenance)
    return columns


def _modelled_bytes(trace: Trace, row: SizeRow) -> tuple[int, int, int]:
    layer = trace.layers[row.layer]
    remainder = remainder_bytes(trace, row.layer, row.saved_bytes, row.output_bytes - row.relayed_bytes)
    return (
        row.saved_bytes + row.workspace_bytes - remainder,
        modelled_held_bytes(layer, row),
        modelled_parts_workspace_bytes(row),
    )


def remainder_bytes(trace: Trace, layer: int, saved_bytes: int, made_bytes: int) -> int:
    """What a layer's forward leaves alive besides its input: all that it saved, without its output if that is only the
    next layer's input. ``made_bytes``: of the output, what takes memory of its own."""
    given_on = layer < len(trace.layers) - 1 and not trace.layers[layer].saves_output
    return max(0, saved_bytes - made_bytes) if given_on else saved_bytes


def _rounded_ratio(numerator: int, denominator: int) -> int:
    """Nearest integer (halves up) of a ratio with a positive denominator, exact for integers of any size."""
    return (2 * numerator + denominator) // (2 * denominator)
