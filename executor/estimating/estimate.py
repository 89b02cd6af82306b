"""Estimating: profiling on the meta device, with a clock that counts operators instead of measuring them."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from sim.units import NS_PER_S
from traces.schema import Phase, Provenance, Trace

from ..measuring.instruments import Instruments, Updates
from ..measuring.profile import Profiler
from ..models.inputs import Inputs
from ..models.layers import LayerModel
from ..models.workloads import Workload, adam
from ..reporting import Progress, silent
from ..running.optimizer import OptimizerFactory, PackOptimizer
from .counting import Kind, Operator, Stage
from .gpus import VERSION, KnownGpu
from .masters import MASTER
from .roofline import Roofline
from .substitutes import CudaFunctions

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What tensors are, by the name of what a GPU calculates in."""

HOST_BANDWIDTH = 20.7e9
"""Bytes/s that updates on the CPU read and write. Harmony's authors measured 0.74 billion parameters/s of Adam, which
moves 28 bytes for each: weight, gradient and two states in, all but the gradient out."""

_META = torch.device("meta")


def estimate(
    workload: Workload,
    gpu: KnownGpu,
    *,
    microbatches: Sequence[int],
    dtype: str = "float32",
    optimizer: OptimizerFactory = adam,
    host_bandwidth: float = HOST_BANDWIDTH,
    in_parts: bool = False,
    progress: Progress = silent,
) -> Trace:
    """What a workload would cost on a GPU that is not at hand; every number says that it is modelled.

    Tensors are of ``dtype``; ``tf32`` are float32 whose products are calculated in TF32. Sizes are those of the
    operators that CUDA would run, without scratch memory inside them. ``host_bandwidth``, in bytes/s, is what updates
    on the CPU read and write. The model is not changed. Raises as :func:`~executor.measuring.profile.profile` does, and
    DeviceError for a dtype in which the GPU has no known speed.
    """
    roofline = gpu.roofline(dtype)
    instruments = Instruments(
        name=gpu.name,
        device=_META,
        clock=roofline.clock,
        updates=_ModelledUpdates(roofline, host_bandwidth),
        generator=torch.default_generator,
        times=Provenance.MODELLED,
        sizes=Provenance.MODELLED,
    )
    shapes = _without_values(workload, DTYPES[dtype])
    choose_attention: Any = getattr(shapes.model, "set_attn_implementation", None)
    if not gpu.fused_attention and choose_attention is not None:
        choose_attention("eager")
    profiler = Profiler(shapes, microbatches, optimizer, instruments, in_parts=in_parts)
    with CudaFunctions(fused_attention=gpu.fused_attention):
        trace = profiler.trace(warmups=0, repeats=1, budget_s=1.0, progress=progress)
    return msgspec.structs.replace(trace, dtype=dtype, threads=0, repeats=0, modelled_by=f"harmony estimate {VERSION}")


def _without_values(workload: Workload, dtype: torch.dtype) -> Workload:
    """The same in another dtype, with shapes instead of values."""

    def batch(samples: int, seed: int) -> tuple[Inputs, Tensor]:
        inputs, labels = workload.checked_batch(samples, seed)
        return inputs.map(cast), cast(labels)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    loss = workload.loss_fn
    if isinstance(loss, nn.Module):
        loss = _shapes(loss, dtype)
    return replace(workload, model=_shapes(workload.model, dtype), loss_fn=loss, batch=batch)


def _shapes(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy on the meta device."""
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device=_META), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device=_META)
    return copy.deepcopy(module, memo).to(dtype)


@dataclass(frozen=True)
class _ModelledUpdates:
    """Updates read weights, gradients and state once, and write weights and state once. Weights that have a copy among
    the state are only written."""

    roofline: Roofline
    host_bandwidth: float

    def __call__(self, model: LayerModel, layer: int, optimizer: PackOptimizer) -> Updates:
        moved = _update_bytes(model, layer, optimizer)
        operator = Operator("update", Kind.ELEMENTWISE, Stage.FORWARD, 0, moved)
        return {
            Phase.UPDATE_CPU: lambda: round(moved / self.host_bandwidth * NS_PER_S),
            Phase.UPDATE_GPU: lambda: round(self.roofline.operator_seconds(operator) * NS_PER_S),
        }


def _update_bytes(model: LayerModel, layer: int, optimizer: PackOptimizer) -> int:
    """Bytes that the update of what a layer owns reads and writes, adding up the gradients of shared ones included."""
    users = {group.name: len(group.layers) for group in model.tied}
    owned = model.owned(layer).values()
    moved = 0
    for named in owned:
        parameter = named.tensor
        entries = optimizer.state_entries(parameter)
        state = sum(parameter.numel() * dtype.itemsize for dtype in entries.values())
        weights = parameter.nbytes * (1 if MASTER in entries else 2)
        added = 3 * parameter.nbytes * (users.get(named.qualified, 1) - 1)
        moved += weights + parameter.nbytes + 2 * state + added
    return moved
