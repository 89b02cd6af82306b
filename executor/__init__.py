"""Runs schedules on devices, and measures models and machines. Needs torch (the extra ``executor``)::

    from executor import calibrate, load_workload, profile, run

==============  ========================================================================================
``models/``     a model as a sequence of layers, its data and loss
``measuring/``  ``profile``: a workload → a Trace; ``calibrate``: a described Machine → a measured one
``devices/``    the façade (queues and marks), emulated GPUs with their shared links, CUDA
``running/``    ``run``: a Schedule, a workload and a machine → a measured Timeline
``training/``   ``Trainer``: a model trained by a schedule, in a loop of one's own
==============  ========================================================================================
"""

from .devices.facade import DeviceKind
from .measuring.calibrate import calibrate
from .measuring.profile import profile
from .models.losses import SummedLoss
from .models.workloads import Workload, load_workload
from .running.rules import Skip, UpdateRule
from .running.run import RunResult, run
from .training.trainer import Trainer

__all__ = [
    "DeviceKind",
    "RunResult",
    "Skip",
    "SummedLoss",
    "Trainer",
    "UpdateRule",
    "Workload",
    "calibrate",
    "load_workload",
    "profile",
    "run",
]
