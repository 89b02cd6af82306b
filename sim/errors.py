"""Errors of planning and simulating, all of them :class:`~traces.errors.HarmonyError`.

HarmonyError
├── MachineError         a machine file or override is wrong
├── PlanError            a plan contradicts itself, the trace or the machine
├── DoesNotFit           a plan needs more memory than there is: layers, bytes, cap
├── ScheduleError        a schedule is malformed; carries every fault found
├── TimelineError        a timeline file cannot be read
├── DifferentSchedules   two timelines cannot be compared: they are not of one schedule
└── Stalled              a schedule cannot go on; names each blocked task and what it waits for
"""

from __future__ import annotations

from traces.errors import HarmonyError

from .units import format_bytes


class MachineError(HarmonyError):
    """A machine description is wrong: which file, which key, what to write instead."""


class PlanError(HarmonyError):
    """A plan contradicts itself, the trace or the machine."""


class DoesNotFit(HarmonyError):
    """A plan needs more memory than a GPU (or the host, ``gpu=None``) has."""

    def __init__(self, gpu: int | None, layers: tuple[int, int], what: str, needed: int, cap: int) -> None:
        super().__init__(gpu, layers, what, needed, cap)
        self.gpu, self.layers, self.what, self.needed, self.cap = gpu, layers, what, needed, cap

    def __str__(self) -> str:
        where = "the host" if self.gpu is None else f"GPU {self.gpu}"
        first, last = self.layers
        help_ = (
            "use less host memory per step (smaller minibatch), or plan with --host-memory unlimited"
            if self.gpu is None
            else "use smaller packs, a smaller microbatch or more memory (--gpu-memory)"
        )
        return (
            f"does not fit on {where}: layers {first}-{last}, {self.what} need {format_bytes(self.needed)} "
            f"({self.needed} B), the cap is {format_bytes(self.cap)} ({self.cap} B); {help_}"
        )


class ScheduleError(HarmonyError):
    """A schedule is malformed. ``faults`` lists everything found, one sentence each."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        super().__init__(faults)
        self.faults = faults

    def __str__(self) -> str:
        shown = "\n  ".join(self.faults[:20])
        more = f"\n  … and {len(self.faults) - 20} more" if len(self.faults) > 20 else ""
        return f"the schedule has {len(self.faults)} fault(s):\n  {shown}{more}"


class TimelineError(HarmonyError):
    """A timeline file cannot be read."""


class DifferentSchedules(HarmonyError):
    """Two timelines cannot be compared: they are not of one schedule."""


class Stalled(HarmonyError):
    """No task can start any more. ``blocked`` says, task by task, what each head of a lane waits for."""

    def __init__(self, blocked: tuple[str, ...]) -> None:
        super().__init__(blocked)
        self.blocked = blocked

    def __str__(self) -> str:
        return "the schedule stalls; blocked tasks:\n  " + "\n  ".join(self.blocked)
