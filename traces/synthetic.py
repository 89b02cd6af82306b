"""Small made-up traces for tests and demonstrations, whose every number has a closed form.

The last layer is a loss without weights; layer 0's input has no gradient, as token ids have none.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from .formula import LayerFormula, Line, SizeFormula, tabulate
from .schema import Layer, Phase, Provenance, TiedWeight, TimeRow, Trace

_LOSS_OUTPUT_BYTES = 4


def uniform_trace(
    layers: int = 4,
    *,
    microbatches: Sequence[int] = (1, 2, 4, 8),
    weight_bytes: int = 4_000_000,
    sample_bytes: int = 1_000_000,
    sample_ns: int = 1_000_000,
    fixed_ns: int = 100_000,
) -> Trace:
    """``layers - 1`` equal layers and a loss (``layers`` ≥ 2).

    For a microbatch of u samples every layer, the loss included, takes ``fixed_ns + sample_ns × u`` forward and twice
    that backward. Input, output and input gradient are ``sample_bytes × u`` (layer 0: no input gradient), saved bytes
    and the forward workspace three times that (loss: once, and 4 bytes of output per sample). An update takes 1 ns per
    byte of weights on the CPU and a tenth of that on the GPU.
    """
    formulas = []
    for index in range(layers):
        is_loss = index == layers - 1
        formulas.append(
            _formula(
                index,
                weight_bytes=0 if is_loss else weight_bytes,
                buffer_bytes=0,
                input_bytes=sample_bytes,
                output_bytes=_LOSS_OUTPUT_BYTES if is_loss else sample_bytes,
                saved_bytes=sample_bytes if is_loss else 3 * sample_bytes,
                forward_ns=Line(fixed_ns, sample_ns),
                backward_ns=Line(2 * fixed_ns, 2 * sample_ns),
            )
        )
    return _trace(f"uniform-{layers}", formulas, microbatches)


def skewed_trace(seed: int, layers: int = 6, *, microbatches: Sequence[int] = (1, 2, 4, 8)) -> Trace:
    """Layers that differ by up to tenfold in every respect, drawn from ``seed``; some have buffers, some no weights."""
    draw = random.Random(seed)
    boundaries = [draw.randrange(1, 11) * 100_000 for _ in range(layers)] + [_LOSS_OUTPUT_BYTES]
    formulas = []
    for index in range(layers):
        is_loss = index == layers - 1
        has_weights = not is_loss and (index == 0 or draw.random() < 0.8)
        formulas.append(
            _formula(
                index,
                weight_bytes=draw.randrange(1, 11) * 1_000_000 if has_weights else 0,
                buffer_bytes=draw.randrange(1, 11) * 10_000 if draw.random() < 0.3 else 0,
                input_bytes=boundaries[index],
                output_bytes=boundaries[index + 1],
                saved_bytes=boundaries[index + 1] + draw.randrange(10) * 100_000,
                forward_ns=Line(draw.randrange(1, 11) * 50_000, draw.randrange(1, 11) * 200_000),
                backward_ns=Line(draw.randrange(1, 11) * 100_000, draw.randrange(1, 11) * 400_000),
            )
        )
    return _trace(f"skewed-{layers}-{seed}", formulas, microbatches)


def with_tied(trace: Trace, members: Sequence[int], weight_bytes: int) -> Trace:
    """The trace with one more parameter of ``weight_bytes`` that all ``members`` use; the first of them owns it.

    It adds to their weights and gradients, and to the owner's optimizer state and updates as if it had been its own.
    """
    group, owner = f"tied-{'-'.join(map(str, members))}", min(members)
    layers = list(trace.layers)
    for member in members:
        layer = layers[member]
        layers[member] = replace(
            layer,
            weight_bytes=layer.weight_bytes + weight_bytes,
            gradient_bytes=layer.gradient_bytes + weight_bytes,
            optimizer_state_bytes=layer.optimizer_state_bytes + (2 * weight_bytes if member == owner else 0),
            tied=(*layer.tied, TiedWeight(group=group, weight_bytes=weight_bytes)),
        )
    before = {row.phase: row.duration_ns for row in trace.times if row.layer == owner}
    kept = [row for row in trace.times if not (row.layer == owner and row.phase.is_update)]
    updates = [
        TimeRow(
            layer=owner,
            phase=phase,
            microbatch=0,
            duration_ns=before.get(phase, 0) + duration,
            provenance=Provenance.MODELLED,
        )
        for phase, duration in _update_ns(weight_bytes).items()
    ]
    return replace(trace, layers=tuple(layers), times=(*kept, *updates))


def with_frozen(trace: Trace, frozen: Sequence[int]) -> Trace:
    """The trace with these layers frozen: no gradient, optimizer state or update."""
    layers = tuple(
        replace(layer, trainable=False, gradient_bytes=0, optimizer_state_bytes=0) if index in frozen else layer
        for index, layer in enumerate(trace.layers)
    )
    times = tuple(row for row in trace.times if not (row.phase.is_update and row.layer in frozen))
    return replace(trace, layers=layers, times=times)


def _update_ns(weight_bytes: int) -> dict[Phase, int]:
    return {Phase.UPDATE_CPU: weight_bytes, Phase.UPDATE_GPU: weight_bytes // 10}


def _formula(
    index: int,
    *,
    weight_bytes: int,
    buffer_bytes: int,
    input_bytes: int,
    output_bytes: int,
    saved_bytes: int,
    forward_ns: Line,
    backward_ns: Line,
) -> LayerFormula:
    """A layer with Adam's state whose workspace is its weights' gradient, and its input's and output's gradients."""
    input_gradient_bytes = input_bytes if index else 0
    update_ns = _update_ns(weight_bytes)
    return LayerFormula(
        layer=Layer(
            name=f"layer{index}",
            kind="synthetic",
            weight_bytes=weight_bytes,
            gradient_bytes=weight_bytes,
            optimizer_state_bytes=2 * weight_bytes,
            buffer_bytes=buffer_bytes,
        ),
        forward_ns=forward_ns,
        backward_ns=backward_ns,
        update_cpu_ns=update_ns[Phase.UPDATE_CPU],
        update_gpu_ns=update_ns[Phase.UPDATE_GPU],
        sizes=SizeFormula(
            input_bytes=input_bytes,
            output_bytes=output_bytes,
            input_gradient_bytes=input_gradient_bytes,
            saved_bytes=saved_bytes,
            workspace_bytes=Line(weight_bytes, output_bytes + input_gradient_bytes),
            forward_workspace_bytes=Line(0, saved_bytes),
        ),
    )


def _trace(model: str, formulas: Sequence[LayerFormula], microbatches: Sequence[int]) -> Trace:
    return tabulate(
        formulas,
        model=model,
        device="synthetic",
        optimizer="adam",
        label_bytes_per_sample=8,
        microbatches=microbatches,
    )
