"""What a plan will probably take: the order in which a search tries plans. Not a bound, see ``estimates.py`` for that.

A walk over the groups as for the bound, but the weights of a group come in during the group before only where both
have room in the GPU's memory; otherwise after it. In data parallel all GPUs do the same at the same time, and share
links evenly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from traces.costs import Costs

from ..hardware.machine import Machine
from ..plan import HarmonyPlan
from .group_work import JobMaker
from .jobs import Job, Work
from .ways import Ways


@dataclass(slots=True)
class _Lane:
    """The latest group of a GPU: when it ran, what it held and moved."""

    start: float
    end: float
    held_bytes: int
    inputs_ns: float
    home_ns: float = 0.0


class Expectations:
    """Expected times of plans of one trace on one machine."""

    def __init__(self, costs: Costs, machine: Machine, *, parallel: bool) -> None:
        self._maker = JobMaker(costs, machine, Ways(machine, together=parallel))
        self._caps = [gpu.usable_bytes for gpu in machine.gpus]

    def plan_ns(self, plan: HarmonyPlan) -> float:
        """Of a whole step."""
        return self._walk(self._maker.jobs(plan), self._maker.norm_ns(plan))

    def forward_ns(self, plan: HarmonyPlan) -> float:
        """Of the forward packs alone."""
        return self._walk(islice(self._maker.jobs(plan), len(plan.packs_fwd)), None)

    def backward_ns(self, plan: HarmonyPlan) -> float:
        """Of the backward packs alone, updates included."""
        return self._walk(islice(self._maker.jobs(plan), len(plan.packs_fwd), None), self._maker.norm_ns(plan))

    def _walk(self, jobs: Iterable[Job], norm_ns: float | None) -> float:
        """``norm_ns``: what comes between all groups and all updates (None: updates are just in time)."""
        lanes: dict[int, _Lane] = {}
        before: list[tuple[float, float]] = []  # of the job before: end of the first microbatch, and of all
        host = home = all_ready = 0.0
        postponed: list[Job] = []

        def update(job: Job, ready: float) -> None:
            nonlocal host, home
            if not job.updaters:
                host = max(host, ready) + job.update_ns
            for gpu in job.updaters:
                lane = lanes[gpu]
                lane.end = max(ready, lane.end) + job.state_in_ns + job.update_ns
                lane.home_ns = job.after_update_ns + job.state_in_ns
                home = max(home, lane.end + lane.home_ns)

        for job in jobs:
            before = [self._run(work, lanes, before[at] if before else None) for at, work in enumerate(job.works)]
            ready = max(lanes[work.gpu].end for work in job.works) + job.before_update_ns
            all_ready = max(all_ready, ready)
            if norm_ns is None:
                update(job, ready)
            else:
                postponed.append(job)
        if norm_ns is not None:
            host = all_ready + norm_ns
            for job in postponed:
                update(job, host)
        return max([host, home, *(lane.end for lane in lanes.values())])

    def _run(self, work: Work, lanes: dict[int, _Lane], before: tuple[float, float] | None) -> tuple[float, float]:
        inputs_ns = work.in_ns - work.state_ns
        lane = lanes.get(work.gpu)
        if lane is None:
            start = work.in_first_ns
        elif lane.held_bytes + work.state_bytes <= self._caps[work.gpu]:
            start = max(lane.end, lane.start + lane.inputs_ns + work.state_ns)
        else:
            start = lane.end + lane.home_ns + work.in_first_ns
        start += work.again_ns
        end = start
        if before is not None:
            start = max(start, before[0] + work.hop_first_ns)
            end = before[1] + work.hop_last_ns + work.last_ns
        end = max(end, start + max(work.compute_ns, inputs_ns + work.last_ns, work.first_ns + work.out_ns))
        lanes[work.gpu] = _Lane(start, end, work.held_bytes, inputs_ns)
        return start + work.first_ns, end - work.late_ns
