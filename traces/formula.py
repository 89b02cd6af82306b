"""Layers whose costs are closed forms of the microbatch size, and the trace that tabulates them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schema import Layer, Phase, Provenance, SizeRow, TimeRow, Trace


class Line(NamedTuple):
    """A straight line in the microbatch size u: ``fixed + per_sample × u``, rounded to an integer."""

    fixed: float
    per_sample: float

    def at(self, u: int) -> int:
        """Its value for a microbatch of ``u`` samples."""
        return round(self.fixed + self.per_sample * u)


@dataclass(frozen=True, kw_only=True)
class SizeFormula:
    """Sizes of one layer that grow with the microbatch, each as the column of that name in :mod:`traces.schema`.

    Those given as one number are bytes per sample, exactly proportional to the microbatch.
    """

    input_bytes: int
    output_bytes: int
    input_gradient_bytes: int
    saved_bytes: int
    workspace_bytes: Line
    forward_workspace_bytes: Line
    held_bytes: int | None = None
    parts_workspace_bytes: Line | None = None


@dataclass(frozen=True, kw_only=True)
class LayerFormula:
    """One layer: durations on the trace's device, and sizes. Updates of 0 ns get no row.

    ``backward_input_ns`` is the part of the backward that makes the input's gradient, the rest that of the parameters;
    None, and no held bytes: nothing is said of a backward in two parts.
    """

    layer: Layer
    forward_ns: Line
    backward_ns: Line
    backward_input_ns: Line | None = None
    update_cpu_ns: int
    update_gpu_ns: int
    sizes: SizeFormula

    def time_rows(self, index: int, microbatches: Sequence[int]) -> list[TimeRow]:
        """Rows of the table ``times`` for this layer as number ``index`` of the model."""
        durations = [(Phase.FORWARD, u, self.forward_ns.at(u)) for u in microbatches]
        durations += [(Phase.BACKWARD, u, self.backward_ns.at(u)) for u in microbatches]
        if self.backward_input_ns is not None:
            parts = [(u, self.backward_input_ns.at(u), self.backward_ns.at(u)) for u in microbatches]
            durations += [(Phase.BACKWARD_INPUT, u, of_input) for u, of_input, _ in parts]
            durations += [(Phase.BACKWARD_WEIGHT, u, both - of_input) for u, of_input, both in parts]
        updates = ((Phase.UPDATE_CPU, self.update_cpu_ns), (Phase.UPDATE_GPU, self.update_gpu_ns))
        durations += [(phase, 0, duration) for phase, duration in updates if duration]
        return [
            TimeRow(layer=index, phase=phase, microbatch=u, duration_ns=duration, provenance=Provenance.MODELLED)
            for phase, u, duration in durations
        ]

    def size_rows(self, index: int, microbatches: Sequence[int]) -> list[SizeRow]:
        """Rows of the table ``sizes`` for this layer as number ``index`` of the model."""
        held, workspace = self.sizes.held_bytes, self.sizes.parts_workspace_bytes
        return [
            SizeRow(
                layer=index,
                microbatch=u,
                input_bytes=self.sizes.input_bytes * u,
                output_bytes=self.sizes.output_bytes * u,
                input_gradient_bytes=self.sizes.input_gradient_bytes * u,
                saved_bytes=self.sizes.saved_bytes * u,
                workspace_bytes=self.sizes.workspace_bytes.at(u),
                forward_workspace_bytes=self.sizes.forward_workspace_bytes.at(u),
                held_bytes=None if held is None else held * u,
                parts_workspace_bytes=None if workspace is None else workspace.at(u),
                provenance=Provenance.MODELLED,
            )
            for u in microbatches
        ]


def tabulate(
    formulas: Sequence[LayerFormula],
    *,
    model: str,
    device: str,
    optimizer: str,
    label_bytes_per_sample: int,
    microbatches: Sequence[int],
    sample: str = "",
    modelled_by: str = "",
) -> Trace:
    """The float32 trace of these layers at these microbatch sizes, every number marked as modelled."""
    return Trace(
        model=model,
        device=device,
        dtype="float32",
        optimizer=optimizer,
        label_bytes_per_sample=label_bytes_per_sample,
        sample=sample,
        modelled_by=modelled_by,
        layers=tuple(formula.layer for formula in formulas),
        times=tuple(row for at, formula in enumerate(formulas) for row in formula.time_rows(at, microbatches)),
        sizes=tuple(row for at, formula in enumerate(formulas) for row in formula.size_rows(at, microbatches)),
    )
