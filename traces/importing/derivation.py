"""From a LayerProfile to a Trace: which numbers are taken over, and how those that it lacks come about.

    taken over   weights, buffers, optimizer state, inputs; a layer's output is the next one's input
                 forward = FWD, backward = BWD - FWD (a BWD contains the forward), updates
    derived      forward workspace = peak of FWD - weights - buffers - input
                 saved + workspace = peak of BWD - weights - buffers - input =: own(u), gradients included
    modelled     gradient of the input = the input (layer 0: none); of the weights = the weights; the loss: 4 bytes
                 saved, update on the GPU: see below

**Saved.** When a layer's backward begins, what it saved and the gradient of its output are there together, so
``saved(u) + output(u) <= own(u)``. What is saved grows in proportion to the microbatch, so the profiled size v at which
``(own(v) - output(v)) / v`` is least bounds it best, at every size. That bound is taken: memory is never understated,
and swapping what autograd saved is overstated a little. The rest of own(u) is workspace.

**Beyond** the sizes of BWD, memory is continued along its last line; no backward can be planned there.

**Updates on the GPU** take the bytes they move, 2 x (weights + state) + gradients, over what the DRAM achieves.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from fractions import Fraction

from ..errors import TraceError
from ..schema import Layer, Phase, Provenance, SizeRow, TimeRow, Trace
from ..transformer import GTX_1080_TI
from .profile import LayerProfile, Pass

_LOSS_OUTPUT_BYTES = 4
_GPUS = {GTX_1080_TI.name: GTX_1080_TI}


def trace_of(profile: LayerProfile) -> Trace:
    """The trace. Raises TraceError for measurements that contradict each other."""
    last = len(profile.sizes) - 1
    return Trace(
        model=profile.model,
        device=profile.device,
        dtype=profile.dtype,
        optimizer=profile.optimizer,
        label_bytes_per_sample=profile.label_bytes_per_sample,
        layers=tuple(
            Layer(
                name="loss" if number == last else f"layer {number}",
                kind="loss" if number == last else "layer",
                weight_bytes=size.weight_bytes,
                gradient_bytes=size.weight_bytes,
                optimizer_state_bytes=size.optimizer_state_bytes,
                buffer_bytes=size.buffer_bytes,
            )
            for number, size in enumerate(profile.sizes)
        ),
        times=(*_passes(profile), *_updates(profile)),
        sizes=tuple(row for number in range(last + 1) for row in _LayerMemory(profile, number).rows()),
    )


def notes_on(profile: LayerProfile) -> tuple[str, ...]:
    """What whoever uses the trace should know."""
    notes = ["saved and workspace bytes are derived from the peaks of single layers; saved bytes are an upper bound"]
    if profile.update_gpu_ns is None:
        known = profile.device in _GPUS
        how = "are modelled from the bytes they move" if known else f"are not known, nor is a GPU {profile.device!r}"
        notes.append(f"updates on the GPU were not measured: their times {how}")
    if not profile.label_bytes_per_sample:
        notes.append("the size of labels is not known: taken as 0 bytes")
    notes.append("taken as untied, trainable, and independent of how a minibatch is cut: all layers")
    return tuple(notes)


def _passes(profile: LayerProfile) -> Iterator[TimeRow]:
    forward, backward = (profile.times_ns[each] for each in Pass)
    for u in forward.microbatches:
        for number, duration in enumerate(forward[u]):
            yield _time(number, Phase.FORWARD, u, round(duration))
    for u in backward.microbatches:
        for number, (whole, repeated) in enumerate(zip(backward[u], forward[u], strict=True)):
            if whole < repeated:
                raise TraceError(
                    profile.sources.times,
                    f"layer {number}, microbatch {u}",
                    f"BWD takes {whole.normalize():f} ns, less than the {repeated.normalize():f} ns of the FWD in it; "
                    "measure it again",
                )
            yield _time(number, Phase.BACKWARD, u, round(whole - repeated))


def _updates(profile: LayerProfile) -> Iterator[TimeRow]:
    measured = {Phase.UPDATE_CPU: profile.update_cpu_ns, Phase.UPDATE_GPU: profile.update_gpu_ns}
    for phase, durations in measured.items():
        for number, duration in enumerate(durations or ()):
            if profile.sizes[number].weight_bytes:
                yield _time(number, phase, 0, round(duration))
            elif duration:
                raise TraceError(
                    profile.sources.updates,
                    f"layer {number}, {phase.value}",
                    f"takes {duration.normalize():f} ns, but the layer has no weights; write 0",
                )
    gpu = _GPUS.get(profile.device)
    if profile.update_gpu_ns is None and gpu is not None:
        for number, size in enumerate(profile.sizes):
            if size.weight_bytes:
                moved = 3 * size.weight_bytes + 2 * size.optimizer_state_bytes
                duration_ns = round(1e9 * moved / (gpu.dram_bandwidth * gpu.memory_efficiency))
                yield _time(number, Phase.UPDATE_GPU, 0, duration_ns, Provenance.MODELLED)


def _time(layer: int, phase: Phase, u: int, duration_ns: int, provenance: Provenance = Provenance.IMPORTED) -> TimeRow:
    return TimeRow(layer=layer, phase=phase, microbatch=u, duration_ns=duration_ns, provenance=provenance)


class _LayerMemory:
    """Memory of one layer at the sizes at which its inputs are known."""

    def __init__(self, profile: LayerProfile, number: int) -> None:
        self._profile, self._number = profile, number
        self._forward = self._own(Pass.FORWARD)
        self._backward = self._own(Pass.BACKWARD)
        self._saved_per_sample = min(Fraction(own - self._output(u), u) for u, own in self._backward.items())

    def rows(self) -> Iterator[SizeRow]:
        """A row for each size."""
        for u in self._profile.input_bytes.microbatches:
            taken, made = self._input(u), self._output(u)
            saved = max(made, int(self._saved_per_sample * u))
            yield SizeRow(
                layer=self._number,
                microbatch=u,
                input_bytes=taken,
                output_bytes=made,
                input_gradient_bytes=taken if self._number else 0,
                saved_bytes=saved,
                workspace_bytes=max(0, _on_line(self._backward, u) - saved),
                forward_workspace_bytes=max(made, _on_line(self._forward, u)),
                provenance=Provenance.IMPORTED,
                memory_provenance=Provenance.MODELLED,
            )

    def _own(self, each: Pass) -> dict[int, int]:
        """Peak bytes besides weights, buffers and input, by microbatch size."""
        size, peaks = self._profile.sizes[self._number], self._profile.peak_bytes[each]
        found = {}
        for u in peaks.microbatches:
            if u not in self._profile.input_bytes.rows:
                continue
            held = size.weight_bytes + size.buffer_bytes + self._input(u)
            if peaks[u][self._number] < held:
                raise TraceError(
                    self._profile.sources.memory,
                    f"layer {self._number}, phase {each.value}, microbatch {u}",
                    f"the peak is {peaks[u][self._number]} bytes, but weights, buffers and input together take {held}; "
                    "measure it again",
                )
            found[u] = peaks[u][self._number] - held
        return found

    def _input(self, u: int) -> int:
        return self._profile.input_bytes[u][self._number]

    def _output(self, u: int) -> int:
        following = self._number + 1
        return self._profile.input_bytes[u][following] if following < len(self._profile.sizes) else _LOSS_OUTPUT_BYTES


def _on_line(points: dict[int, int], u: int) -> int:
    """The value at u: of a point, or on the straight line through the two nearest; proportional to a single one."""
    if u in points:
        return points[u]
    known = sorted(points)
    if len(known) == 1:
        return points[known[0]] * u // known[0]
    right = min(max(bisect_left(known, u), 1), len(known) - 1)
    u0, u1 = known[right - 1], known[right]
    return points[u0] + (points[u1] - points[u0]) * (u - u0) // (u1 - u0)
