"""Costs: every question that planning and simulating ask of a trace, answered fast.

Answers per microbatch size (``columns.py``) are kept, as prefix sums where runs of layers are summed and as sparse
tables where their maximum is asked (``runs.py``), so that a question costs well under a microsecond. Runs of layers are
``first … last``, both included; ``u`` is a microbatch size in samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .checks import check_trace
from .columns import remainder_bytes, size_columns, time_columns
from .errors import TraceError
from .runs import RangeMaximum, prefix_sums
from .schema import WORST_LAST, Phase, Provenance, Trace, worst


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
        times = time_columns(trace, self._source, extrapolate)
        sizes = size_columns(trace, self._source, extrapolate)
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
        self._forward_peaks: dict[int, RangeMaximum] = {}
        self._backward_peaks: dict[int, RangeMaximum] = {}

        layers = trace.layers
        self._weight = prefix_sums([layer.weight_bytes for layer in layers])
        self._buffer = prefix_sums([layer.buffer_bytes for layer in layers])
        self._gradient = prefix_sums([layer.gradient_bytes for layer in layers])
        self._state = prefix_sums([layer.optimizer_state_bytes for layer in layers])
        self._owned, self._partners = self._ownership()
        self._update_bytes = prefix_sums([self._moved_by_update(layer) for layer in range(self.layer_count)])
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
            self._forward_peaks[u] = RangeMaximum([x + w for x, w in zip(self._input.at(u), alone, strict=True)])
        return max(alone[first], self._forward_peaks[u].over(first + 1, last))

    def saved_bytes(self, first: int, last: int, u: int) -> int:
        """What forward with gradient recording leaves alive: outputs included, inputs and parameters excluded."""
        saved = self._saved.prefix(u)
        return saved[last + 1] - saved[first]

    def remainder_bytes(self, layer: int, u: int) -> int:
        """What a layer's forward leaves alive for its backward besides its input: all that it saved, without its output
        if that is only the next layer's input."""
        made = self.output_bytes(layer, u) - self._relayed.at(u)[layer]
        return remainder_bytes(self.trace, layer, self.saved_bytes(layer, layer, u), made)

    def unrecomputed_workspace_bytes(self, layer: int, u: int) -> int:
        """Peak of a layer's backward alone, when its forward was recorded and what that saved lies elsewhere. Where a
        trace does not say, the peak of both together, less what was saved."""
        return self._unrecomputed.at(u)[layer]

    def backward_workspace_bytes(self, first: int, last: int, u: int) -> int:
        """Peak of forward with gradient recording and backward: max over l of saved(first … l) + workspace(l)."""
        saved = self._saved.prefix(u)
        if u not in self._backward_peaks:
            totals = [s + w for s, w in zip(saved[1:], self._workspace.at(u), strict=True)]
            self._backward_peaks[u] = RangeMaximum(totals)
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
        return {provenance: counts[provenance] for provenance in WORST_LAST if counts[provenance]}

    def microbatches(self, phase: Phase) -> tuple[int, ...]:
        """Profiled microbatch sizes of forward or backward, ascending."""
        return self._times[phase].microbatches

    def largest_microbatch(self, phase: Phase | None = None) -> int:
        """Largest size answered without extrapolating, for this phase (None: for forward and backward both)."""
        phases = (Phase.FORWARD, Phase.BACKWARD) if phase is None else (phase,)
        return min(self._input.microbatches[-1], *(self._times[each].microbatches[-1] for each in phases))

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
        return _Updates(prefix_sums(durations), prefix_sums(missing), provenance)


class _Updates:
    """Updates on one device: durations and missing rows as prefix sums, and each row's provenance."""

    def __init__(self, total: list[int], missing: list[int], provenance: dict[int, Provenance]) -> None:
        self.total, self.missing, self.provenance = total, missing, provenance
