"""Costs: every question that planning and simulating ask of a trace, answered fast.

Each column of the trace (forward time, input bytes, …) holds one integer per layer and profiled microbatch size.
A size between two profiled ones is interpolated along a straight line, layer by layer, and rounded to the nearest
integer, so what grows exactly linearly comes out exact. Answers per microbatch size are kept, as prefix sums where
runs of layers are summed and as sparse tables where their maximum is asked, so that a question costs well under a
microsecond. Runs of layers are ``first … last``, both included; ``u`` is a microbatch size in samples.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate

from .checks import check_trace
from .errors import TraceError
from .parts import modelled_held_bytes, modelled_parts_ns, modelled_parts_workspace_bytes
from .schema import Phase, Provenance, SizeRow, Trace

_WORST_LAST = (
    Provenance.MEASURED,
    Provenance.IMPORTED,
    Provenance.MODELLED,
    Provenance.INTERPOLATED,
    Provenance.EXTRAPOLATED,
)


_MEMORY_COLUMNS = frozenset({"saved_bytes", "workspace_bytes", "forward_workspace_bytes"})


def worst(provenances: Iterable[Provenance]) -> Provenance:
    """The least trustworthy of them; of none, MEASURED. Between profiled sizes counts as worse than modelled."""
    return max(provenances, key=_WORST_LAST.index, default=Provenance.MEASURED)


class Costs:
    """What a trace says about runs of layers at any microbatch size.

    ``extrapolate`` also answers outside the profiled sizes, along the line through the two nearest (through the
    origin if only one size was profiled), never below 0. Otherwise such a question raises TraceError.
    """

    def __init__(self, trace: Trace, *, extrapolate: bool = False) -> None:
        self.trace = trace
        self.extrapolate = extrapolate
        self.layer_count = len(trace.layers)
        self._source = f"trace of {trace.model} on {trace.device}"
        times, sizes = self._time_columns(), self._size_columns()
        if not all(column.is_full(self.layer_count) for column in (*times.values(), *sizes.values())):
            check_trace(trace, self._source)
        self._times = times
        self._forward, self._backward = times[Phase.FORWARD], times[Phase.BACKWARD]
        self._backward_input, self._backward_weight = times[Phase.BACKWARD_INPUT], times[Phase.BACKWARD_WEIGHT]
        self._input, self._output = sizes["input_bytes"], sizes["output_bytes"]
        self._input_gradient = sizes["input_gradient_bytes"]
        self._saved, self._workspace = sizes["saved_bytes"], sizes["workspace_bytes"]
        self._forward_workspace = sizes["forward_workspace_bytes"]
        self._relayed = sizes["relayed_bytes"]
        self._unrecomputed = sizes["unrecomputed_workspace_bytes"]
        self._held, self._parts_workspace = sizes["held_bytes"], sizes["parts_workspace_bytes"]
        self._forward_peaks: dict[int, _RangeMaximum] = {}
        self._backward_peaks: dict[int, _RangeMaximum] = {}

        layers = trace.layers
        self._weight = _prefix([layer.weight_bytes for layer in layers])
        self._buffer = _prefix([layer.buffer_bytes for layer in layers])
        self._gradient = _prefix([layer.gradient_bytes for layer in layers])
        self._state = _prefix([layer.optimizer_state_bytes for layer in layers])
        self._owned, self._partners = self._ownership()
        self._update_bytes = _prefix([self._moved_by_update(layer) for layer in range(self.layer_count)])
        self._updates = {phase: self._update_rows(phase) for phase in Phase if phase.is_update}

    # Times, in nanoseconds on the trace's device.

    def forward_ns(self, first: int, last: int, u: int) -> int:
        """One forward of one microbatch through layers ``first … last``."""
        prefix = self._forward.prefix(u)
        return prefix[last + 1] - prefix[first]

    def backward_ns(self, first: int, last: int, u: int) -> int:
        """One backward of one microbatch through layers ``last … first``, without recompute."""
        prefix = self._backward.prefix(u)
        return prefix[last + 1] - prefix[first]

    def backward_input_ns(self, first: int, last: int, u: int) -> int:
        """The part of it that makes the gradient of the input of layer ``first``."""
        prefix = self._backward_input.prefix(u)
        return prefix[last + 1] - prefix[first]

    def backward_weight_ns(self, first: int, last: int, u: int) -> int:
        """The part of it that makes the gradients of the layers' parameters, done apart from the other."""
        prefix = self._backward_weight.prefix(u)
        return prefix[last + 1] - prefix[first]

    def update_ns(self, first: int, last: int, phase: Phase) -> int:
        """The optimizer step of the layers' own weights, on the CPU or the GPU. Layers without any cost nothing."""
        rows = self._updates[phase]
        if rows.missing[last + 1] > rows.missing[first]:
            layer = next(at for at in range(first, last + 1) if rows.missing[at + 1] > rows.missing[at])
            raise TraceError(
                self._source,
                f"times, layer {layer} ({self.trace.layers[layer].name})",
                f"has no {phase.value} row, and it updates {self._owned[layer]} bytes of weights; "
                f"profile that update, or plan updates on the {'GPU' if phase is Phase.UPDATE_CPU else 'CPU'}",
            )
        return rows.total[last + 1] - rows.total[first]

    # Bytes of one microbatch at a layer's boundaries.

    def input_bytes(self, layer: int, u: int) -> int:
        """x(layer): the layer's input."""
        return self._input.at(u)[layer]

    def output_bytes(self, layer: int, u: int) -> int:
        """The layer's output, which is x(layer + 1)."""
        return self._output.at(u)[layer]

    def input_gradient_bytes(self, layer: int, u: int) -> int:
        """g(layer): the gradient with respect to the layer's input."""
        return self._input_gradient.at(u)[layer]

    def label_bytes(self, u: int) -> int:
        """The targets of one microbatch."""
        return self.trace.label_bytes_per_sample * u

    # Bytes of runs of layers that do not depend on the microbatch. Tied parameters count once per use.

    def weight_bytes(self, first: int, last: int) -> int:
        """Parameters that the layers use."""
        return self._weight[last + 1] - self._weight[first]

    def buffer_bytes(self, first: int, last: int) -> int:
        """State that is not trained, such as BatchNorm statistics."""
        return self._buffer[last + 1] - self._buffer[first]

    def gradient_bytes(self, first: int, last: int) -> int:
        """Gradients of the parameters that the layers use."""
        return self._gradient[last + 1] - self._gradient[first]

    def optimizer_state_bytes(self, first: int, last: int) -> int:
        """Optimizer state of the parameters that the layers own."""
        return self._state[last + 1] - self._state[first]

    # Peaks of autograd's own memory.

    def forward_workspace_bytes(self, first: int, last: int, u: int) -> int:
        """Peak of the layers' forward without gradient recording, output included, the run's own input excluded.

        Inside the run, a layer's input is a temporary: max over l of (x(l) unless l is first) + forward workspace(l).
        """
        alone = self._forward_workspace.at(u)
        if last == first:
            return alone[first]
        if u not in self._forward_peaks:
            self._forward_peaks[u] = _RangeMaximum([x + w for x, w in zip(self._input.at(u), alone, strict=True)])
        return max(alone[first], self._forward_peaks[u].over(first + 1, last))

    def saved_bytes(self, first: int, last: int, u: int) -> int:
        """What forward with gradient recording leaves alive: outputs included, inputs and parameters excluded."""
        saved = self._saved.prefix(u)
        return saved[last + 1] - saved[first]

    def remainder_bytes(self, layer: int, u: int) -> int:
        """What a layer's forward leaves alive for its backward besides its input: all that it saved, without its output
        if that is only the next layer's input."""
        made = self.output_bytes(layer, u) - self._relayed.at(u)[layer]
        return _remainder_bytes(self.trace, layer, self.saved_bytes(layer, layer, u), made)

    def unrecomputed_workspace_bytes(self, layer: int, u: int) -> int:
        """Peak of a layer's backward alone, when its forward was recorded and what that saved lies elsewhere. Where a
        trace does not say, the peak of both together, less what was saved."""
        return self._unrecomputed.at(u)[layer]

    def backward_workspace_bytes(self, first: int, last: int, u: int) -> int:
        """Peak of forward with gradient recording and backward: max over l of saved(first … l) + workspace(l)."""
        saved = self._saved.prefix(u)
        if u not in self._backward_peaks:
            totals = [s + w for s, w in zip(saved[1:], self._workspace.at(u), strict=True)]
            self._backward_peaks[u] = _RangeMaximum(totals)
        return self._backward_peaks[u].over(first, last) - saved[first]

    def held_bytes(self, first: int, last: int, u: int) -> int:
        """What a backward in two parts holds from the first to the second, the layers' own input excluded."""
        held = self._held.prefix(u)
        return held[last + 1] - held[first]

    def parts_workspace_bytes(self, first: int, last: int, u: int) -> int:
        """Peak of either part, beside what is held in all: max over l of parts workspace(l)."""
        return max(self._parts_workspace.at(u)[first : last + 1])

    # What the builders of schedules ask about updates.

    def owned_weight_bytes(self, layer: int) -> int:
        """Weight bytes that the layer's update changes: its own, and the tied ones it is the first to use."""
        return self._owned[layer]

    def update_bytes(self, first: int, last: int) -> int:
        """What the update of the layers' own weights moves to and from memory: weights, gradients and optimizer state
        are read, weights and state written."""
        return self._update_bytes[last + 1] - self._update_bytes[first]

    def updates(self, layer: int) -> bool:
        """Whether the layer owns weights that are trained."""
        return self._owned[layer] > 0

    def tied_partners(self, layer: int) -> tuple[int, ...]:
        """Other layers that use tied parameters which this layer owns, ascending; none if it owns no tied ones."""
        return self._partners[layer]

    def tied_owners(self, layer: int) -> tuple[int, ...]:
        """Other layers that own tied parameters which this layer uses, ascending."""
        return tuple(owner for owner in range(layer) if layer in self._partners[owner])

    # Where answers come from.

    def provenance(self, layer: int, phase: Phase, u: int) -> Provenance:
        """Where the duration of this layer and phase comes from (``u`` does not matter for updates)."""
        if phase.is_update:
            return self._updates[phase].provenance.get(layer, Provenance.MEASURED)
        return self._times[phase].provenance(layer, u)

    def size_provenance(self, layer: int, u: int) -> Provenance:
        """Where the bytes of a microbatch at this layer's boundaries come from."""
        return self._input.provenance(layer, u)

    def memory_provenance(self, layer: int, u: int) -> Provenance:
        """Where saved and workspace bytes of a microbatch come from."""
        return self._saved.provenance(layer, u)

    def pack_provenance(self, first: int, last: int, phase: Phase, u: int) -> Provenance:
        """The worst of the run's layers."""
        return worst(self.provenance(layer, phase, u) for layer in range(first, last + 1))

    def tally(self, durations: Iterable[tuple[Phase, int]]) -> dict[Provenance, int]:
        """How many durations come from where, over all layers, for the (phase, microbatch size) pairs that were used.

        Repeated pairs count once; for updates the size does not matter, and layers without one do not count.
        """
        pairs = {(phase, 0 if phase.is_update else u) for phase, u in durations}
        counts: Counter[Provenance] = Counter()
        for phase, u in pairs:
            layers: Iterable[int] = self._updates[phase].provenance if phase.is_update else range(self.layer_count)
            counts.update(self.provenance(layer, phase, u) for layer in layers)
        return {provenance: counts[provenance] for provenance in _WORST_LAST if counts[provenance]}

    def microbatches(self, phase: Phase) -> tuple[int, ...]:
        """Profiled microbatch sizes of forward or backward, ascending."""
        return self._times[phase].microbatches

    def largest_microbatch(self, phase: Phase | None = None) -> int:
        """Largest size answered without extrapolating, for this phase (None: for forward and backward both)."""
        phases = (Phase.FORWARD, Phase.BACKWARD) if phase is None else (phase,)
        return min(self._input.microbatches[-1], *(self._times[each].microbatches[-1] for each in phases))

    # Reading the trace's tables.

    def _time_columns(self) -> dict[Phase, _Column]:
        columns = {
            phase: _Column(f"{phase.value} times", self._source, self.extrapolate)
            for phase in Phase
            if not phase.is_update
        }
        for row in self.trace.times:
            if not row.phase.is_update:
                columns[row.phase].put(row.layer, row.microbatch, row.duration_ns, row.provenance)
        if not any(row.phase.is_part for row in self.trace.times):
            self._model_parts(columns)
        return columns

    def _model_parts(self, columns: dict[Phase, _Column]) -> None:
        for row in self.trace.times:
            if row.phase is Phase.BACKWARD and row.layer < self.layer_count:
                parts = modelled_parts_ns(self.trace.layers[row.layer], row.duration_ns)
                for phase, duration_ns in parts.items():
                    where = worst((row.provenance, Provenance.MODELLED))
                    columns[phase].put(row.layer, row.microbatch, duration_ns, where)

    def _size_columns(self) -> dict[str, _Column]:
        names = (
            "input_bytes",
            "output_bytes",
            "input_gradient_bytes",
            "saved_bytes",
            "workspace_bytes",
            "forward_workspace_bytes",
            "relayed_bytes",
        )
        columns = {name: _Column("sizes", self._source, self.extrapolate) for name in names}
        derived = ("unrecomputed_workspace_bytes", "held_bytes", "parts_workspace_bytes")
        columns |= {name: _Column("sizes", self._source, self.extrapolate) for name in derived}
        for row in self.trace.sizes:
            for name in names:
                provenance = row.memory_provenance if name in _MEMORY_COLUMNS else None
                columns[name].put(row.layer, row.microbatch, getattr(row, name), provenance or row.provenance)
            if row.layer < self.layer_count:
                provenance = row.memory_provenance or row.provenance
                for name, modelled in zip(derived, self._derived_bytes(row), strict=True):
                    told = getattr(row, name)
                    columns[name].put(row.layer, row.microbatch, modelled if told is None else told, provenance)
        return columns

    def _derived_bytes(self, row: SizeRow) -> tuple[int, int, int]:
        """What holds where a row does not say."""
        layer = self.trace.layers[row.layer]
        remainder = _remainder_bytes(self.trace, row.layer, row.saved_bytes, row.output_bytes - row.relayed_bytes)
        return (
            row.saved_bytes + row.workspace_bytes - remainder,
            modelled_held_bytes(layer, row),
            modelled_parts_workspace_bytes(row),
        )

    def _ownership(self) -> tuple[list[int], list[tuple[int, ...]]]:
        """Per layer: weight bytes its update changes, and the other users of tied parameters it owns."""
        layers = self.trace.layers
        groups = self.trace.tied_groups
        owned, partners = [], []
        for index, layer in enumerate(layers):
            borrowed = sum(tied.weight_bytes for tied in layer.tied if groups[tied.group][0] != index)
            owned.append(layer.weight_bytes - borrowed if layer.trainable else 0)
            shared = {user for tied in layer.tied if groups[tied.group][0] == index for user in groups[tied.group]}
            partners.append(tuple(sorted(shared - {index})))
        return owned, partners

    def _moved_by_update(self, index: int) -> int:
        """Of a layer with tied weights of others, the gradient counts in the proportion of its own."""
        layer, owned = self.trace.layers[index], self._owned[index]
        if not owned:
            return 0
        return 2 * (owned + layer.optimizer_state_bytes) + layer.gradient_bytes * owned // layer.weight_bytes

    def _update_rows(self, phase: Phase) -> _Updates:
        rows = {row.layer: row for row in self.trace.times if row.phase is phase}
        durations = [rows[layer].duration_ns if layer in rows else 0 for layer in range(self.layer_count)]
        missing = [int(self.updates(layer) and layer not in rows) for layer in range(self.layer_count)]
        provenance = {layer: row.provenance for layer, row in rows.items() if self.updates(layer)}
        return _Updates(_prefix(durations), _prefix(missing), provenance)


class _Updates:
    """Updates on one device: durations and missing rows as prefix sums, and each row's provenance."""

    def __init__(self, total: list[int], missing: list[int], provenance: dict[int, Provenance]) -> None:
        self.total, self.missing, self.provenance = total, missing, provenance


class _Column:
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
            prefix = self._prefixes[u] = _prefix(self.at(u))
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


class _RangeMaximum:
    """Maximum over any run of a list in constant time, by a sparse table (maxima over runs of 1, 2, 4, … items)."""

    def __init__(self, values: Sequence[int]) -> None:
        self._levels = [list(values)]
        width = 1
        while 2 * width <= len(values):
            previous = self._levels[-1]
            self._levels.append(list(map(max, previous, previous[width:])))
            width *= 2

    def over(self, first: int, last: int) -> int:
        """Maximum of items ``first … last``."""
        level = (last - first + 1).bit_length() - 1
        row = self._levels[level]
        return max(row[first], row[last + 1 - (1 << level)])


def _remainder_bytes(trace: Trace, layer: int, saved_bytes: int, made_bytes: int) -> int:
    """``made_bytes``: of the output, what takes memory of its own."""
    given_on = layer < len(trace.layers) - 1 and not trace.layers[layer].saves_output
    return max(0, saved_bytes - made_bytes) if given_on else saved_bytes


def _prefix(values: Sequence[int]) -> list[int]:
    """Sums over the first 0, 1, … items."""
    return list(accumulate(values, initial=0))


def _rounded_ratio(numerator: int, denominator: int) -> int:
    """Nearest integer (halves up) of a ratio with a positive denominator, exact for integers of any size."""
    return (2 * numerator + denominator) // (2 * denominator)
