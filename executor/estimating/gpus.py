"""GPUs that estimates are made for: their peaks, and what of them operators reach.

Peaks are the manufacturers': dense, tensor cores with sums in float32 where there are any. What is reached was fitted
on the GTX 1080 Ti only, to the per-layer times that Harmony's authors published with their code (msr-fiddle/harmony,
float32, PyTorch 1.5). It gives whole models there, forward and forward with backward, within 14 % at every microbatch.
Models of a family that the coefficients were not fitted to are within 15 %, ResNet within 28 %; at their smallest
microbatch within 42 % (``benchmarks/bench_estimates.py``). For every other GPU what is reached is an assumption, and
each says which; on the RTX 4090 it agrees with published throughput within 18 % (``benchmarks/bench_published.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from ..errors import DeviceError
from .counting import Kind, Stage
from .roofline import Efficiency, Roofline

VERSION = 2
"""Traces name it; it rises whenever a coefficient changes, or how operators are counted."""

_T, _G = 1e12, 1e9

MATMUL = Efficiency(best=0.78, half=2.5e9)
"""Fitted: cuBLAS."""
BATCHED_MATMUL = Efficiency(best=0.80, half=3.3e7)
"""Fitted weakly: in unfused attention, memory is the limit."""
WINOGRAD = Efficiency(best=1.40, half=5.4e9)
"""Fitted: 3x3 convolutions in float32 save multiplications (Winograd's algorithm), so more than the peak is reached."""
WINOGRAD_BACKWARD = Efficiency(best=1.25, half=8.3e9)
"""Fitted: of both gradients."""
FLASH = Efficiency(best=0.50, half=3.3e7)
"""Assumed: of attention in one kernel, half the peak, forward and backward."""
IMPLICIT_GEMM = Efficiency(best=0.60, half=5.4e9)
"""Assumed: convolutions on tensor cores are products of matrices, with rows that must be gathered."""
STREAM = Efficiency(best=0.85, half=1.1e5)
"""Fitted: operators on every element, at the speed of memory."""
SLOW_REDUCTION = Efficiency(best=0.235, half=1.1e5)
"""Fitted: softmax and normalisation in PyTorch 1.5."""
REDUCTION = Efficiency(best=0.60, half=1.1e5)
"""Assumed: the same in today's PyTorch."""
LAUNCH_S = 5e-6
"""Assumed: what lies between two kernels when a program launches them one by one."""


@dataclass(frozen=True)
class KnownGpu:
    """A GPU by its ``name``. ``peaks``: FLOP/s by dtype; ``bandwidth``: of its memory, in bytes/s. ``arithmetic`` and
    ``traffic`` are efficiencies; all that ``arithmetic`` lacks is limited by memory. ``operator_s`` and ``task_s`` are
    seconds beside each operator and each piece of work. ``fused_attention``: whether attention is one kernel."""

    name: str
    peaks: Mapping[str, float]
    bandwidth: float
    arithmetic: Mapping[Kind, Efficiency]
    traffic: Mapping[Kind, Efficiency]
    operator_s: Mapping[Stage, float]
    task_s: Mapping[Stage, float]
    fused_attention: bool

    def roofline(self, dtype: str) -> Roofline:
        """How it works in a dtype. Raises DeviceError if it has none, or its speed is not known."""
        if dtype not in self.peaks:
            raise DeviceError(f"the {self.name} has no known speed in {dtype}; it has one in {', '.join(self.peaks)}")
        return Roofline(self.peaks[dtype], self.bandwidth, self.arithmetic, self.traffic, self.operator_s, self.task_s)


def _traffic(reduction: Efficiency) -> dict[Kind, Efficiency]:
    return dict.fromkeys(Kind, STREAM) | {Kind.REDUCTION: reduction}


_FITTED_ARITHMETIC = {
    Kind.MATMUL: MATMUL,
    Kind.BATCHED_MATMUL: BATCHED_MATMUL,
    Kind.ATTENTION: FLASH,
    Kind.CONVOLUTION: WINOGRAD,
    Kind.CONVOLUTION_BACKWARD: WINOGRAD_BACKWARD,
}

_ASSUMED_ARITHMETIC = _FITTED_ARITHMETIC | {
    Kind.CONVOLUTION: IMPLICIT_GEMM,
    Kind.CONVOLUTION_BACKWARD: IMPLICIT_GEMM,
}

_FITTED = KnownGpu(
    name="GTX 1080 Ti",
    peaks={"float32": 11.3 * _T},
    bandwidth=484 * _G,
    arithmetic=_FITTED_ARITHMETIC,
    traffic=_traffic(SLOW_REDUCTION),
    # Of the measurements: each layer alone, synchronised, its memory allocated anew.
    operator_s={Stage.FORWARD: 1.3e-6, Stage.RECORDING: 3.3e-6, Stage.BACKWARD: 44e-6},
    task_s={Stage.FORWARD: 25e-6, Stage.RECORDING: 220e-6, Stage.BACKWARD: 360e-6},
    fused_attention=False,
)


def _assumed(
    name: str,
    bandwidth_gb: float,
    *,
    float32: float,
    tf32: float | None = None,
    bfloat16: float | None = None,
    float16: float | None = None,
    fused_attention: bool = True,
) -> KnownGpu:
    """Peaks in TFLOP/s; matrix products and elementwise operators as efficient as on the GTX 1080 Ti."""
    peaks = {"float32": float32, "tf32": tf32, "bfloat16": bfloat16, "float16": float16 or bfloat16}
    return KnownGpu(
        name=name,
        peaks={dtype: peak * _T for dtype, peak in peaks.items() if peak is not None},
        bandwidth=bandwidth_gb * _G,
        arithmetic=_ASSUMED_ARITHMETIC,
        traffic=_traffic(REDUCTION),
        operator_s=dict.fromkeys(Stage, LAUNCH_S),
        task_s=dict.fromkeys(Stage, 0.0),
        fused_attention=fused_attention,
    )


GPUS: Mapping[str, KnownGpu] = {
    gpu.name: gpu
    for gpu in (
        _FITTED,
        _assumed("RTX 2080 Ti", 616, float32=13.4, float16=54, fused_attention=False),
        _assumed("RTX 3090", 936, float32=35.6, tf32=36, bfloat16=71),
        _assumed("RTX 4090", 1008, float32=82.6, tf32=83, bfloat16=165),
        _assumed("RTX 5090", 1792, float32=105, tf32=105, bfloat16=210),
        _assumed("RTX A6000", 768, float32=38.7, tf32=77, bfloat16=155),
        _assumed("A100", 2039, float32=19.5, tf32=156, bfloat16=312),
        _assumed("H100", 3350, float32=67, tf32=495, bfloat16=989),
        _assumed("H200", 4800, float32=67, tf32=495, bfloat16=989),
    )
}
"""By name. The A100 is the one with 80 GB and NVLink, the H100 the SXM one."""


def known_gpu(name: str) -> KnownGpu:
    """A GPU by name, spelt in any way (``rtx-4090``, ``4090``). Raises DeviceError if there is none."""
    spelt = _spelt(name)
    for gpu in GPUS.values():
        if spelt in (_spelt(gpu.name), _spelt(gpu.name.split(" ", 1)[-1])):
            return gpu
    near = get_close_matches(spelt, [_spelt(known) for known in GPUS], n=1)
    meant = next((f" (did you mean {known!r}?)" for known in GPUS if near and _spelt(known) == near[0]), "")
    raise DeviceError(f"there is no GPU {name!r}{meant}; known are {', '.join(GPUS)}")


def _spelt(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
