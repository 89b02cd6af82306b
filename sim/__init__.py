"""Schedules for models larger than the GPUs: build them, simulate them, search for the best, look at timelines.

Everything here is imported when first used, so that ``import sim`` and ``harmony --help`` are immediate and need
neither torch nor pandas::

    import sim
    trace, machine = sim.load_trace("gpt2-xl@gtx-1080-ti"), sim.load_machine("4x1080ti")
    result = sim.search(trace, machine, 64)
    timeline = sim.simulate(result.best.schedule, trace, machine)
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traces.costs import Costs as Costs
    from traces.errors import HarmonyError as HarmonyError
    from traces.files import load_trace as load_trace
    from traces.files import save_trace as save_trace
    from traces.files import shipped_traces as shipped_traces
    from traces.schema import Trace as Trace

    from .build import build as build
    from .chrome_trace import export_chrome as export_chrome
    from .compare import compare as compare
    from .completion import build_choice as build_choice
    from .engine import simulate as simulate
    from .grid import grid as grid
    from .machine import Machine as Machine
    from .machine_files import load_machine as load_machine
    from .machine_files import save_machine as save_machine
    from .machine_files import shipped_machines as shipped_machines
    from .plan import HarmonyPlan as HarmonyPlan
    from .plan import PagedPlan as PagedPlan
    from .plan import Policy as Policy
    from .plan import Reduce as Reduce
    from .plan import Residency as Residency
    from .plan import UpdateOn as UpdateOn
    from .plan import Writeback as Writeback
    from .plan_choice import PlanChoice as PlanChoice
    from .plots import plot_lanes as plot_lanes
    from .plots import plot_memory as plot_memory
    from .plots import plot_swap_bytes as plot_swap_bytes
    from .schedule import Schedule as Schedule
    from .schedule_files import load_schedule as load_schedule
    from .schedule_files import save_schedule as save_schedule
    from .search import search as search
    from .timeline import Timeline as Timeline
    from .timeline import load_timeline as load_timeline
    from .timeline import save_timeline as save_timeline
    from .validate import validate as validate

_HOME = {
    "Costs": "traces.costs",
    "HarmonyError": "traces.errors",
    "HarmonyPlan": "sim.plan",
    "Machine": "sim.machine",
    "PagedPlan": "sim.plan",
    "PlanChoice": "sim.plan_choice",
    "Policy": "sim.plan",
    "Reduce": "sim.plan",
    "Residency": "sim.plan",
    "Schedule": "sim.schedule",
    "Timeline": "sim.timeline",
    "Trace": "traces.schema",
    "UpdateOn": "sim.plan",
    "Writeback": "sim.plan",
    "build": "sim.build",
    "build_choice": "sim.completion",
    "compare": "sim.compare",
    "export_chrome": "sim.chrome_trace",
    "grid": "sim.grid",
    "load_machine": "sim.machine_files",
    "load_schedule": "sim.schedule_files",
    "load_timeline": "sim.timeline",
    "load_trace": "traces.files",
    "plot_lanes": "sim.plots",
    "plot_memory": "sim.plots",
    "plot_swap_bytes": "sim.plots",
    "save_machine": "sim.machine_files",
    "save_schedule": "sim.schedule_files",
    "save_timeline": "sim.timeline",
    "save_trace": "traces.files",
    "search": "sim.search",
    "shipped_machines": "sim.machine_files",
    "shipped_traces": "traces.files",
    "simulate": "sim.engine",
    "validate": "sim.validate",
}
"""Public names, and the module that each comes from."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})


class _Package(ModuleType):
    """Keeps ``sim.search`` the function. Importing a submodule binds its name in the package; some submodules are named
    after the function they hold, and whoever imported them first would otherwise hide it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in _HOME):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
