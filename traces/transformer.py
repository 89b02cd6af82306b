"""Modelled traces of the GPT-2 family, for GPUs not at hand. ``python -m traces.transformer`` writes the shipped ones.

The model, in float32 with dropout 0 and attention as separate kernels (PyTorch 1.5 and the GPT-2 code of its time): a
layer's matrix products are bound by arithmetic (operations over the GPU's peak), all other kernels by DRAM (bytes
read and written over its bandwidth), each by an efficiency; every kernel costs a launch. Kernels are counted by hand
below, in multiples of these tensors of one sample (s: sequence, h: hidden size, n: heads, V: vocabulary):

    t = 4·s·h bytes, the hidden state      a = 4·n·s², one tensor of attention scores
    v = 4·s·V, the logits                  the inner tensor of the feed-forward part is 4t

The three efficiencies were set by hand against per-layer times measured on a GTX 1080 Ti; a whole forward and backward
of gpt2-xl and gpt2-10b then comes out within 6 % at microbatches 1 to 8 (gpt2-medium: 18 % low at 1, within 8 % from
2). Embedding, norm and loss alone come out too fast, by up to several times at microbatch 1; they are under 3 % of the
whole.

A backward in two parts does the same kernels, those that only the gradients of parameters need in its second part. It
holds the gradients that come out of layer norms and matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .files import save_trace
from .formula import LayerFormula, Line, SizeFormula, tabulate
from .schema import Layer, TiedWeight, Trace

_FLOAT_BYTES = 4
_TOKEN_BYTES = 8
_ADAM_STATES = 2
_LOSS_OUTPUT_BYTES = 4
SHIPPED_MICROBATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Gpt2:
    """A member of the family. The feed-forward part is four times as wide as the hidden state."""

    name: str
    hidden: int
    blocks: int
    heads: int
    sequence: int = 1024
    vocabulary: int = 50257


GPT2_FAMILY = (
    Gpt2("gpt2", 768, 12, 12),
    Gpt2("gpt2-medium", 1024, 24, 16),
    Gpt2("gpt2-xl", 1600, 48, 25),
    *(Gpt2(f"gpt2-{billions}b", 4096, 5 * billions, 32) for billions in (10, 20, 30, 40, 100)),
)

SHIPPED = GPT2_FAMILY[1:]
"""Whose traces come with Harmony."""

MODELLED_BY = "traces.transformer 1"
"""What traces say that they come from; the number rises whenever they change."""


@dataclass(frozen=True, kw_only=True)
class GpuModel:
    """A GPU and its host's CPU: data-sheet peaks, and what share of them kernels reach.

    ``flops`` and ``dram_bandwidth`` (bytes/s) are peaks. ``matmul_efficiency`` is of the blocks' products,
    ``head_efficiency`` of the one with the vocabulary, ``memory_efficiency`` of kernels bound by DRAM.
    ``adam_bytes`` is the DRAM traffic per parameter of Adam on the GPU (one fused kernel); ``cpu_adam`` is how many
    parameters a second the host updates.
    """

    name: str
    flops: float
    dram_bandwidth: float
    matmul_efficiency: float
    head_efficiency: float
    memory_efficiency: float
    launch_ns: int
    adam_bytes: int
    cpu_adam: float

    def duration_ns(self, work: _Work) -> Line:
        """Time of these kernels in nanoseconds; launches and the traffic of weights do not grow with the microbatch."""
        seconds = work.flops / (self.flops * self.matmul_efficiency)
        seconds += work.head_flops / (self.flops * self.head_efficiency)
        seconds += work.bytes / (self.dram_bandwidth * self.memory_efficiency)
        fixed = work.fixed_bytes / (self.dram_bandwidth * self.memory_efficiency)
        return Line(work.kernels * self.launch_ns + 1e9 * fixed, 1e9 * seconds)


GTX_1080_TI = GpuModel(
    name="gtx-1080-ti",
    flops=11.3e12,
    dram_bandwidth=484e9,
    matmul_efficiency=0.75,
    head_efficiency=0.85,
    memory_efficiency=0.72,
    launch_ns=10_000,
    adam_bytes=28,  # weight, gradient and two moments read, all but the gradient written
    cpu_adam=0.7e9,
)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What kernels do: operations and DRAM bytes per sample, DRAM bytes and launches per call."""

    kernels: int
    bytes: float = 0
    flops: float = 0
    head_flops: float = 0
    fixed_bytes: float = 0


def gpt2_trace(model: Gpt2, gpu: GpuModel, microbatches: tuple[int, ...] = SHIPPED_MICROBATCHES) -> Trace:
    """The modelled trace: embedding, blocks, final norm, head (tied to the token embedding), loss."""
    layers = [
        _embedding(model, gpu),
        *(_block(model, gpu, number) for number in range(model.blocks)),
        _norm(model, gpu),
        _head(model, gpu),
        _loss(model, gpu),
    ]
    return tabulate(
        layers,
        model=model.name,
        device=gpu.name,
        optimizer="adam",
        label_bytes_per_sample=_TOKEN_BYTES * model.sequence,
        microbatches=microbatches,
        sample=f"{model.sequence} tokens",
        modelled_by=MODELLED_BY,
    )


def _embedding(model: Gpt2, gpu: GpuModel) -> LayerFormula:
    """Tokens and positions gathered and added (7t); backward fills a dense gradient, then adds it to the sum so far."""
    t, table = _hidden_bytes(model), _table_bytes(model)
    sizes = SizeFormula(
        input_bytes=_TOKEN_BYTES * model.sequence,
        output_bytes=t,
        input_gradient_bytes=0,
        saved_bytes=t,
        workspace_bytes=Line(table, t),
        forward_workspace_bytes=Line(t, 2 * t),
        held_bytes=2 * t,
        parts_workspace_bytes=Line(table + t, 2 * t),
    )
    layer = _layer("embedding", weights=table + t, updated=table + t, tied=table)
    forward, backward = _Work(kernels=3, bytes=7 * t), _Work(kernels=6, bytes=5 * t, fixed_bytes=4 * (table + t))
    return _formula(gpu, layer, forward, backward, sizes, of_input=_Work(kernels=0))


def _block(model: Gpt2, gpu: GpuModel, number: int) -> LayerFormula:
    """Attention and feed-forward, each after a norm and within a residual.

    Forward traffic: scores written, scaled, masked by multiply and add, softmaxed, read: 10a. Norms 4t, heads split
    6t and merged 2t, residuals 6t, GELU as eight tanh-form kernels 72t. Backward: scores 14a; residuals 6t, GELU
    112t, norms 10t, heads 14t, bias sums 9t. Saved: softmax a; norms 2t, heads 3t, merged t, residual t, GELU and its
    inputs 20t, output t. Backward's peak is in the GELU (incoming t and two of 4t) or, once the feed-forward's 21t
    are freed, in the softmax (3a, incoming t, 3t of heads); forward's in the mask (3a + 6t) or the GELU (18t).
    One gradient at a time waits to be accumulated: at most that of a 4h × h matrix. Only the gradients of parameters
    need a product for each matrix, the bias sums, and 4t of the norms. Held are gradients of 9t behind products and 2t
    behind norms; nothing is freed before the second part, so the first one's peak is in the GELU or the softmax.
    """
    s, h, t = model.sequence, model.hidden, _hidden_bytes(model)
    a = _FLOAT_BYTES * model.heads * s * s
    flops = 24 * s * h * h + 4 * s * s * h
    weights = _FLOAT_BYTES * (12 * h * h + 13 * h)
    sizes = SizeFormula(
        input_bytes=t,
        output_bytes=t,
        input_gradient_bytes=t,
        saved_bytes=a + 28 * t,
        workspace_bytes=Line(_FLOAT_BYTES * 4 * h * h, max(9 * t, 3 * a - 17 * t)),
        forward_workspace_bytes=Line(0, max(3 * a + 6 * t, 18 * t)),
        held_bytes=a + 39 * t,
        parts_workspace_bytes=Line(_FLOAT_BYTES * 4 * h * h, max(9 * t, 3 * a + 4 * t)),
    )
    layer = _layer("block", f"block {number}", weights=weights, updated=weights, buffers=_FLOAT_BYTES * s * s)
    forward = _Work(kernels=26, flops=flops, bytes=10 * a + 90 * t)
    backward = _Work(kernels=60, flops=2 * flops, bytes=14 * a + 151 * t)
    products = 24 * s * h * h
    of_input = _Work(kernels=50, flops=2 * flops - products, bytes=14 * a + 138 * t)
    return _formula(gpu, layer, forward, backward, sizes, of_input=of_input)


def _norm(model: Gpt2, gpu: GpuModel) -> LayerFormula:
    """The final norm: two reads and a write; backward reads input and gradient twice."""
    t, weights = _hidden_bytes(model), _FLOAT_BYTES * 2 * model.hidden
    sizes = SizeFormula(
        input_bytes=t,
        output_bytes=t,
        input_gradient_bytes=t,
        saved_bytes=t,
        workspace_bytes=Line(weights, 2 * t),
        forward_workspace_bytes=Line(0, t),
        held_bytes=2 * t,
        parts_workspace_bytes=Line(weights, 2 * t),
    )
    layer = _layer("norm", weights=weights, updated=weights)
    forward, backward = _Work(kernels=1, bytes=3 * t), _Work(kernels=3, bytes=5 * t)
    return _formula(gpu, layer, forward, backward, sizes, of_input=_Work(kernels=1, bytes=3 * t))


def _head(model: Gpt2, gpu: GpuModel) -> LayerFormula:
    """Logits by the token embedding, which the embedding layer owns and updates."""
    t, v, table = _hidden_bytes(model), _logits_bytes(model), _table_bytes(model)
    flops = 2 * model.sequence * model.hidden * model.vocabulary
    sizes = SizeFormula(
        input_bytes=t,
        output_bytes=v,
        input_gradient_bytes=t,
        saved_bytes=v,
        workspace_bytes=Line(table, t + v),
        forward_workspace_bytes=Line(0, v),
        held_bytes=2 * v,
        parts_workspace_bytes=Line(table, t + v),
    )
    layer = _layer("head", weights=table, updated=0, tied=table)
    forward = _Work(kernels=1, head_flops=flops)
    backward = _Work(kernels=3, head_flops=2 * flops, fixed_bytes=3 * table)
    return _formula(gpu, layer, forward, backward, sizes, of_input=_Work(kernels=1, head_flops=flops))


def _loss(model: Gpt2, gpu: GpuModel) -> LayerFormula:
    """Logits shifted by a copy (2v), log-softmax (4v); backward likewise, 8v. Log-probabilities are saved (v); backward
    holds three gradients of their size, forward the copy and the log-probabilities."""
    v = _logits_bytes(model)
    sizes = SizeFormula(
        input_bytes=v,
        output_bytes=_LOSS_OUTPUT_BYTES,
        input_gradient_bytes=v,
        saved_bytes=v + _LOSS_OUTPUT_BYTES,
        workspace_bytes=Line(0, 3 * v),
        forward_workspace_bytes=Line(0, 2 * v + _LOSS_OUTPUT_BYTES),
        held_bytes=v + _LOSS_OUTPUT_BYTES,
        parts_workspace_bytes=Line(0, 3 * v),
    )
    layer = _layer("loss", weights=0, updated=0)
    backward = _Work(kernels=5, bytes=8 * v)
    return _formula(gpu, layer, _Work(kernels=4, bytes=6 * v), backward, sizes, of_input=backward)


def _layer(kind: str, name: str = "", *, weights: int, updated: int, tied: int = 0, buffers: int = 0) -> Layer:
    """A layer using ``weights`` bytes of parameters, ``tied`` of them the token embedding; it updates ``updated``."""
    return Layer(
        name=name or kind,
        kind=kind,
        weight_bytes=weights,
        gradient_bytes=weights,
        optimizer_state_bytes=_ADAM_STATES * updated,
        buffer_bytes=buffers,
        tied=(TiedWeight(group="token embedding", weight_bytes=tied),) if tied else (),
    )


def _formula(
    gpu: GpuModel, layer: Layer, forward: _Work, backward: _Work, sizes: SizeFormula, *, of_input: _Work
) -> LayerFormula:
    """``of_input`` is the part of ``backward`` that makes the gradient of the layer's input."""
    parameters = layer.optimizer_state_bytes // (_ADAM_STATES * _FLOAT_BYTES)
    return LayerFormula(
        layer=layer,
        forward_ns=gpu.duration_ns(forward),
        backward_ns=gpu.duration_ns(backward),
        backward_input_ns=gpu.duration_ns(of_input),
        update_cpu_ns=round(1e9 * parameters / gpu.cpu_adam),
        update_gpu_ns=round(1e9 * parameters * gpu.adam_bytes / (gpu.dram_bandwidth * gpu.memory_efficiency)),
        sizes=sizes,
    )


def _hidden_bytes(model: Gpt2) -> int:
    return _FLOAT_BYTES * model.sequence * model.hidden


def _logits_bytes(model: Gpt2) -> int:
    return _FLOAT_BYTES * model.sequence * model.vocabulary


def _table_bytes(model: Gpt2) -> int:
    return _FLOAT_BYTES * model.vocabulary * model.hidden


def _write_shipped(folder: Path) -> None:
    for model in SHIPPED:
        trace = gpt2_trace(model, GTX_1080_TI)
        save_trace(trace, folder / f"{trace.model}@{trace.device}.json.gz")


if __name__ == "__main__":
    _write_shipped(Path(__file__).parent / "data")
