"""What the commands ``profile``, ``calibrate`` and ``run`` do: words become models, devices and machines, and then they
are measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sim.hardware.files import load_machine
from sim.hardware.machine import Machine
from sim.schedule_files import load_schedule
from sim.validation.validate import validate
from traces.schema import Trace

from .devices.facade import DeviceKind
from .errors import DeviceError
from .estimating.estimate import DTYPES, HOST_BANDWIDTH, estimate
from .estimating.gpus import known_gpu
from .estimating.masters import AdamWithMasters
from .measuring.calibrate import calibrate, cuda_machine
from .measuring.profile import profile
from .models.summary import LayerSummary, summarize_layers
from .models.workloads import adam, load_workload
from .reporting import Progress, silent
from .running.run import RunResult, run

EMULATED_MACHINE = "emulated"
"""The shipped machine that says how this computer plays GPUs."""


def measure_trace(
    model: str,
    *,
    device: str,
    microbatches: Sequence[int] | None,
    memory_bytes: int | None = None,
    repeats: int,
    warmups: int,
    budget_s: float,
    sequence: int | None = None,
    in_parts: bool = False,
    progress: Progress = silent,
) -> Trace:
    """Profile the model that ``model`` names on the CPU (``cpu``) or a CUDA device (``cuda``).

    One that is larger than this machine's memory is measured with made-up values, a few layers at a time.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise DeviceError("there is no CUDA device; profile for emulated GPUs instead (--device cpu)")
    return profile(
        load_workload(model, values=None, sequence=sequence),
        microbatches=microbatches,
        memory_bytes=memory_bytes,
        device=torch.device(device),
        warmups=warmups,
        repeats=repeats,
        budget_s=budget_s,
        in_parts=in_parts,
        progress=progress,
    )


def estimate_trace(
    model: str,
    *,
    gpu: str,
    dtype: str,
    microbatches: Sequence[int],
    sequence: int | None = None,
    host_bandwidth: float | None = None,
    masters: bool = False,
    in_parts: bool = False,
    progress: Progress = silent,
) -> Trace:
    """What the model that ``model`` names would cost on a GPU that is known by name, whether or not it is here.

    ``masters``: Adam updates float32 copies of weights in half precision. Raises DeviceError if they are float32.
    """
    spec = known_gpu(gpu)
    if masters and DTYPES[dtype] is torch.float32:
        raise DeviceError(f"weights in {dtype} are float32 and need no copy in it; choose bfloat16 or float16")
    return estimate(
        load_workload(model, values=False, sequence=sequence),
        spec,
        microbatches=microbatches,
        dtype=dtype,
        optimizer=AdamWithMasters if masters else adam,
        host_bandwidth=host_bandwidth or HOST_BANDWIDTH,
        in_parts=in_parts,
        progress=progress,
    )


def layers_of(model: str, *, sequence: int | None = None) -> list[LayerSummary]:
    """The layers of the model that ``model`` names, which needs no memory for its parameters."""
    return summarize_layers(load_workload(model, values=False, sequence=sequence))


def measure_machine(machine: str | None, *, device: str, progress: Progress = silent) -> Machine:
    """Calibrate a machine; without a name, the shipped emulated one, or whatever CUDA devices there are."""
    kind = DeviceKind(device)
    if machine is not None:
        described = load_machine(machine)
    elif kind is DeviceKind.EMULATED:
        described = load_machine(EMULATED_MACHINE)
    else:
        described = cuda_machine()
    return calibrate(described, kind, progress)


def run_schedule(
    schedule: Path,
    model: str,
    machine: str,
    *,
    device: str,
    steps: int,
    seed: int = 0,
    sequence: int | None = None,
    progress: Progress = silent,
) -> RunResult:
    """Check a schedule file and run it, after one step to warm up, with the model that ``model`` names."""
    checked = load_schedule(schedule)
    validate(checked)
    return run(
        checked,
        load_workload(model, seed=seed, sequence=sequence),
        load_machine(machine),
        device=DeviceKind(device),
        steps=steps,
        seed=seed,
        progress=progress,
    )
