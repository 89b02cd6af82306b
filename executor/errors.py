"""Errors of running models, all of them :class:`~traces.errors.HarmonyError`.

HarmonyError
├── ModelError          a model cannot be split into layers, or a layer does what a layer may not
├── WorkloadError       a model, its loss or its batches cannot be loaded
├── DeviceError         the devices asked for are not there
├── DifferentModel      a schedule was made for another model, batch or optimizer than the one at hand
├── OptimizerError      an optimizer cannot update packs one by one
├── OutOfArena          a buffer does not fit where the schedule puts it, or under the cap
├── NeverFreed          a step left buffers behind
├── NotEnoughHostMemory  a run would take more of the host's memory than is left
├── WorkspaceOverrun    autograd took more memory than the schedule reserved
├── RuleError           a rule for updates makes no sense, or asks for what a schedule does not do
├── NonFinite           the loss of a step (NonFiniteLoss) or its gradient (NonFiniteGradient) is not finite
├── CheckpointError     a checkpoint cannot be written, is not whole, or belongs to something else
└── TaskFailed          a task of a run failed; ``__cause__`` is what happened
"""

from __future__ import annotations

from collections.abc import Mapping

from sim.units import format_bytes
from traces.errors import HarmonyError


class ModelError(HarmonyError):
    """A model cannot be split into layers, or a layer does what a layer may not: says which and what to change."""


class WorkloadError(HarmonyError):
    """A model, its loss or its batches cannot be loaded: says from where, and what was expected."""


class DeviceError(HarmonyError):
    """The devices asked for are not there: says how many of which kind there are, and what to use instead."""


class DifferentModel(HarmonyError):
    """A schedule was made for another model, batch or optimizer: says where they differ, with both figures."""


class OptimizerError(HarmonyError):
    """An optimizer cannot update packs one by one, or not on a GPU: says which, why, and what to use."""


class RuleError(HarmonyError):
    """A rule for updates makes no sense, or a schedule does not do what it asks for: says what to plan instead."""


class NonFinite(HarmonyError):
    """A step had a loss or a gradient that is not finite. It updated nothing, and left everything as it was."""


class NonFiniteLoss(NonFinite):
    """The loss of a microbatch, ``samples`` [start, stop) of the minibatch, is not finite."""

    def __init__(self, step: int, samples: tuple[int, int], loss: float) -> None:
        super().__init__(step, samples, loss)
        self.step, self.samples, self.loss = step, samples, loss

    def __str__(self) -> str:
        first, stop = self.samples
        which = f"samples {first}-{stop - 1}" if stop - first > 1 else f"sample {first}"
        return (
            f"step {self.step}: the loss of the microbatch of {which} is {self.loss}; the step changed nothing. Look "
            "at its inputs, lower the learning rate, or let such steps be skipped: UpdateRule(skip=Skip.LOSS)"
        )


class NonFiniteGradient(NonFinite):
    """The norm of the whole gradient is not finite. ``parameter``: the first one that is to blame; None if only all of
    them together are."""

    def __init__(self, step: int, norm: float, parameter: str | None, loss_scale: float) -> None:
        super().__init__(step, norm, parameter, loss_scale)
        self.step, self.norm, self.parameter, self.loss_scale = step, norm, parameter, loss_scale

    def __str__(self) -> str:
        where = f", and first that of {self.parameter}" if self.parameter else ""
        return (
            f"step {self.step}: the norm of the gradient is {self.norm}{where}; the step changed nothing. Use a "
            f"smaller loss_scale (it is {self.loss_scale:g}), lower the learning rate, or let such steps be skipped: "
            "UpdateRule(skip=Skip.GRADIENT)"
        )


class CheckpointError(HarmonyError):
    """A checkpoint cannot be written, is not whole, or belongs to something else: says which file, and why."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"


class OutOfArena(HarmonyError):
    """A buffer does not fit into a GPU's memory: past the cap, or where something else lies."""

    def __init__(self, gpu: int, what: str, needed: int, cap: int, problem: str) -> None:
        super().__init__(gpu, what, needed, cap, problem)
        self.gpu, self.what, self.needed, self.cap, self.problem = gpu, what, needed, cap, problem

    def __str__(self) -> str:
        return (
            f"GPU {self.gpu} has no room for {self.what}, {format_bytes(self.needed)} ({self.needed} B): "
            f"{self.problem}; the cap is {format_bytes(self.cap)} ({self.cap} B). "
            "Build the schedule for this machine's memory"
        )


class NeverFreed(HarmonyError):
    """A step left buffers behind: names them. The next step would find their memory taken."""

    def __init__(self, buffers: tuple[str, ...]) -> None:
        super().__init__(buffers)
        self.buffers = buffers

    def __str__(self) -> str:
        shown = ", ".join(self.buffers[:10])
        more = f" and {len(self.buffers) - 10} more" if len(self.buffers) > 10 else ""
        return f"the step ended and never freed {shown}{more}; build the schedule again, or free them in its tasks"


class WorkspaceOverrun(HarmonyError):
    """The mathematics of a task took more memory than its workspace reserves."""

    def __init__(self, gpu: int, layers: tuple[int, int], used: int, reserved: int) -> None:
        super().__init__(gpu, layers, used, reserved)
        self.gpu, self.layers, self.used, self.reserved = gpu, layers, used, reserved

    def __str__(self) -> str:
        first, last = self.layers
        return (
            f"layers {first}-{last} on GPU {self.gpu} took {format_bytes(self.used)} ({self.used} B) of temporary "
            f"memory, the schedule reserves {format_bytes(self.reserved)} ({self.reserved} B); profile the model again "
            "with this version of torch and this microbatch size"
        )


class NotEnoughHostMemory(HarmonyError):
    """A run would take more memory than this computer has left. ``rows`` say what for."""

    def __init__(self, rows: Mapping[str, int], needed: int, available: int) -> None:
        super().__init__(rows, needed, available)
        self.rows, self.needed, self.available = rows, needed, available

    def __str__(self) -> str:
        largest = sorted(self.rows.items(), key=lambda row: -row[1])[:4]
        return (
            f"the run needs {format_bytes(self.needed)} ({self.needed} B) more of this computer's memory, of which "
            f"{format_bytes(self.available)} ({self.available} B) are left; the most is for "
            f"{', '.join(f'{what} ({format_bytes(size)})' for what, size in largest if size)}. Close other programs, "
            "or plan for a smaller minibatch, a policy with one copy of the state, or an optimizer with less"
        )


class TaskFailed(HarmonyError):
    """A task of a run failed, and with it the run. ``__cause__`` holds the exception itself."""

    def __init__(self, task: str, lane: str, step: int, cause: str) -> None:
        super().__init__(task, lane, step, cause)
        self.task, self.lane, self.step, self.cause = task, lane, step, cause

    def __str__(self) -> str:
        return f"step {self.step}, lane {self.lane}: {self.task} failed: {self.cause}"
