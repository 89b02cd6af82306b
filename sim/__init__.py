"""Schedules for models larger than the GPUs: build them, simulate them, search for the best, look at timelines.

Everything here is imported when first used, so that ``import sim`` and ``harmony --help`` are immediate and need
neither torch nor pandas::

    import sim
    trace, machine = sim.load_trace("gpt2-xl@gtx-1080-ti"), sim.load_machine("4x1080ti")
    result = sim.search(trace, machine, 64)
    timeline = sim.simulate(result.best.schedule, trace, machine)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traces.costs import Costs as Costs
    from traces.errors import HarmonyError as HarmonyError
    from traces.files import load_trace as load_trace
    from traces.files import save_trace as save_trace
    from traces.files import shipped_traces as shipped_traces
    from traces.schema import Trace as Trace

    from .builders import build as build
    from .engine.simulate import simulate as simulate
    from .hardware.files import load_machine as load_machine
    from .hardware.files import save_machine as save_machine
    from .hardware.files import shipped_machines as shipped_machines
    from .hardware.machine import Machine as Machine
    from .plan import HarmonyPlan as HarmonyPlan
    from .plan import PagedPlan as PagedPlan
    from .plan import Policy as Policy
    from .plan import Reduce as Reduce
    from .plan import Residency as Residency
    from .plan import ShardedPlan as ShardedPlan
    from .plan import UpdateOn as UpdateOn
    from .plan import UpdateWhen as UpdateWhen
    from .plan import Writeback as Writeback
    from .planner.choice import PlanChoice as PlanChoice
    from .planner.completion import build_choice as build_choice
    from .planner.search import search as search
    from .schedule import Schedule as Schedule
    from .schedule_files import load_schedule as load_schedule
    from .schedule_files import save_schedule as save_schedule
    from .timelines.compare import compare as compare
    from .timelines.timeline import Timeline as Timeline
    from .timelines.timeline import load_timeline as load_timeline
    from .timelines.timeline import save_timeline as save_timeline
    from .validation.validate import validate as validate
    from .views.chrome_trace import export_chrome as export_chrome
    from .views.grid import grid as grid
    from .views.plots import plot_lanes as plot_lanes
    from .views.plots import plot_memory as plot_memory
    from .views.plots import plot_swap_bytes as plot_swap_bytes
    from .views.why import why as why

_HOME = {
    "Costs": "traces.costs",
    "HarmonyError": "traces.errors",
    "HarmonyPlan": "sim.plan",
    "Machine": "sim.hardware.machine",
    "PagedPlan": "sim.plan",
    "PlanChoice": "sim.planner.choice",
    "Policy": "sim.plan",
    "Reduce": "sim.plan",
    "Residency": "sim.plan",
    "Schedule": "sim.schedule",
    "ShardedPlan": "sim.plan",
    "Timeline": "sim.timelines.timeline",
    "Trace": "traces.schema",
    "UpdateOn": "sim.plan",
    "UpdateWhen": "sim.plan",
    "Writeback": "sim.plan",
    "build": "sim.builders",
    "build_choice": "sim.planner.completion",
    "compare": "sim.timelines.compare",
    "export_chrome": "sim.views.chrome_trace",
    "grid": "sim.views.grid",
    "load_machine": "sim.hardware.files",
    "load_schedule": "sim.schedule_files",
    "load_timeline": "sim.timelines.timeline",
    "load_trace": "traces.files",
    "plot_lanes": "sim.views.plots",
    "plot_memory": "sim.views.plots",
    "plot_swap_bytes": "sim.views.plots",
    "save_machine": "sim.hardware.files",
    "save_schedule": "sim.schedule_files",
    "save_timeline": "sim.timelines.timeline",
    "save_trace": "traces.files",
    "search": "sim.planner.search",
    "shipped_machines": "sim.hardware.files",
    "shipped_traces": "traces.files",
    "simulate": "sim.engine.simulate",
    "validate": "sim.validation.validate",
    "why": "sim.views.why",
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
