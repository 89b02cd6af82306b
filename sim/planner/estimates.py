"""Bounds from below on the step time of plans, and what they need in memory, without building a schedule.

A group (a pack over all its microbatches on one GPU) is taken as a whole::

    in        W x x x ─┐     W x x x         a group's first microbatch waits for its weights and first input,
    compute     ■ ■ ■  └─►     ■ ■ ■         its last for its last input and for the group that makes that input
    out           y y y dW       y y y dW    what it makes leaves after it
    host                 └─► update          updates follow gradients, in order; or the norm of all gradients

As if every copy were alone and memory had no end, a walk over the groups in order gives the earliest times at which
they start and end, and a walk back the least time that must pass after each. Shared resources are then held against
both: all bytes for the first j groups have to pass, and after the last of them what must follow; and likewise all
that leaves the last groups. The largest figure is the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from traces.costs import Costs

from ..hardware.machine import Machine
from ..plan import HarmonyPlan, PagedPlan, Plan, ShardedPlan
from .group_work import JobMaker
from .jobs import Job, Work
from .paged_estimates import paged_bound_ns
from .sharded_estimates import sharded_bound_ns
from .ways import Ways

_ROUNDING = 1 - 1e-9
"""Bounds are lowered by this factor: more than what rounding to whole nanoseconds and floats add to them."""


class Estimator:
    """Estimates for the plans of one trace on one machine."""

    def __init__(self, costs: Costs, machine: Machine) -> None:
        self._costs, self._machine = costs, machine
        self._ways = Ways(machine)
        self._maker = JobMaker(costs, machine, self._ways)

    def lower_bound_ns(self, plan: Plan) -> int:
        """No schedule of this plan takes less (ns). Raises TraceError where the trace does not cover the plan."""
        match plan:
            case HarmonyPlan():
                jobs = list(self._maker.jobs(plan))
                norm_ns = self._maker.norm_ns(plan)
                times, finish = _earliest(jobs, norm_ns)
                _add_rests(jobs, times, norm_ns)
                spills = plan.slots is not None
                bound = max(finish, _resource_bound_ns(jobs, times, self._ways, spills))
            case PagedPlan():
                bound = paged_bound_ns(plan, self._costs, self._machine, self._ways)
            case ShardedPlan():
                bound = sharded_bound_ns(plan, self._costs, self._machine, self._ways)
        return int(bound * _ROUNDING)


@dataclass(slots=True)
class _Times:
    """Of one group: when its first and last microbatch are handed on and when it ends, at the earliest; and the least
    time that follows the handing on of the last, to the end of the step."""

    first_end: float
    last_end: float
    end: float
    rest: float = 0.0


def _earliest(jobs: list[Job], norm_ns: float | None) -> tuple[list[list[_Times]], float]:
    """Earliest times of every group, and of the end of it all. ``norm_ns``: what comes between all of them and all of
    their updates (None: updates are just in time)."""
    compute: dict[int, float] = {}
    lane_in: dict[int, float] = {}
    lane_out: dict[int, float] = {}
    host = home = all_ready = 0.0
    times: list[list[_Times]] = []

    def update(job: Job, ready: float) -> None:
        nonlocal host, home
        if not job.updaters:
            host = max(host, ready) + job.update_ns
        for gpu in job.updaters:
            lane_in[gpu] += job.state_in_ns
            compute[gpu] = max(ready, lane_in[gpu], compute[gpu]) + job.update_ns
            home = max(home, compute[gpu] + job.after_update_ns)

    for job in jobs:
        before = times[-1] if times else [None] * len(job.works)
        now = []
        for work, previous in zip(job.works, before, strict=True):
            arrived = lane_in.get(work.gpu, 0.0)
            start = max(compute.get(work.gpu, 0.0) + work.again_ns, arrived + work.in_first_ns)
            last_end = arrived + work.in_ns + work.last_ns
            if previous is not None:
                start = max(start, previous.first_end + work.hop_first_ns)
                last_end = max(last_end, previous.last_end + work.hop_last_ns + work.last_ns)
            last_end = max(last_end, start + work.compute_ns - work.late_ns)
            end = max(last_end + work.late_least_ns, start + work.compute_ns)
            own = _Times(start + work.first_ns, last_end, end)
            lane_in[work.gpu] = arrived + work.in_ns
            lane_out[work.gpu] = max(lane_out.get(work.gpu, 0.0), own.first_end) + work.out_ns
            compute[work.gpu] = own.end
            now.append(own)
        ready = max(own.end for own in now) + job.before_update_ns
        all_ready = max(all_ready, ready)
        if norm_ns is None:
            update(job, ready)
        times.append(now)
    if norm_ns is not None:
        host = all_ready + norm_ns
        for job in jobs:
            update(job, host)
    return times, max(host, home, *compute.values(), *lane_in.values(), *lane_out.values())


def _add_rests(jobs: list[Job], times: list[list[_Times]], norm_ns: float | None) -> None:
    """Fill in what must follow each group. ``norm_ns`` as above."""
    following: dict[int, float] = {}  # by GPU: from the start of its next group to the end of the step
    host_updates = 0.0
    at_end = None if norm_ns is None else norm_ns + _updates_ns(jobs)
    consumers: list[tuple[Work, _Times]] = []
    for job, own_times in zip(reversed(jobs), reversed(times), strict=True):
        if at_end is not None:
            update = job.before_update_ns + at_end
        elif not job.updaters:
            host_updates += job.update_ns
            update = job.before_update_ns + host_updates
        else:
            afterwards = max(job.after_update_ns, *(following.get(gpu, 0.0) for gpu in job.updaters))
            update = job.before_update_ns + job.update_ns + afterwards
        started: dict[int, float] = {}
        for at, (work, own) in enumerate(zip(job.works, own_times, strict=True)):
            after = max(update, following.get(work.gpu, 0.0))
            own.rest = work.late_least_ns + after
            if consumers:
                consumer, consumer_times = consumers[at]
                own.rest = max(own.rest, consumer.hop_last_ns + consumer.last_ns + consumer_times.rest)
            started[work.gpu] = work.again_ns + work.compute_ns + max(after, own.rest - work.late_ns)
        following |= started
        consumers = list(zip(job.works, own_times, strict=True))


def _updates_ns(jobs: list[Job]) -> float:
    """Least time of all updates, one after the other on every device."""
    busy: dict[int | None, float] = {}
    for job in jobs:
        for device in job.updaters or (None,):
            busy[device] = busy.get(device, 0.0) + job.update_ns
    return max(busy.values())


def _resource_bound_ns(jobs: list[Job], times: list[list[_Times]], ways: Ways, spills: bool) -> float:
    """Each resource against what must precede or follow the bytes that pass it."""
    pairs = [
        (job, work, own)
        for job, own_times in zip(jobs, times, strict=True)
        for work, own in zip(job.works, own_times, strict=True)
    ]
    works = [work for _, work, _ in pairs]
    gpus = [work.gpu for work in works]
    arriving = np.array([[work.in_bytes] for work in works]) * ways.into_loads[gpus]
    for at, work in enumerate(works):
        if work.source is not None:
            straight = ways.between[work.source, work.gpu].load
            arriving[at] += work.cross_bytes * (ways.either_load(work.source, work.gpu) if spills else straight)
    arrive = ways.drain_ns(arriving)
    leave = ways.drain_ns(np.array([[work.out_bytes] for work in works]) * ways.out_loads[gpus])
    reduced = ways.drain_ns(ways.ring_load(sum(job.sent_bytes for job in jobs)))
    follows = np.array([_after_last_byte(job, work.gpu, work.last_ns + own.rest) for job, work, own in pairs])
    precedes = np.array([own.first_end for _, _, own in pairs])
    follow_least = np.minimum.accumulate(np.where(arrive > 0, follows[:, None], np.inf), axis=0)
    in_time = np.cumsum(arrive, axis=0) + np.where(np.isinf(follow_least), 0.0, follow_least)
    precede_least = np.minimum.accumulate(np.where(leave > 0, precedes[:, None], np.inf)[::-1], axis=0)
    out_time = np.cumsum(leave[::-1], axis=0) + np.where(np.isinf(precede_least), 0.0, precede_least)
    total = arrive.sum(axis=0) + leave.sum(axis=0) + reduced
    return float(max(in_time.max(), out_time.max(), total.max()))


def _after_last_byte(job: Job, gpu: int, after_input_ns: float) -> float:
    """Least time from the arrival of the last byte for a group to the end of the step; it may be optimizer state."""
    return min(after_input_ns, job.update_ns + job.after_update_ns) if gpu in job.updaters else after_input_ns
