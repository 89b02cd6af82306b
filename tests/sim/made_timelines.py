"""Timelines of real schedules whose every task lasts as long as the test says."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sim.builders import build
from sim.home import NO_TIES
from sim.plan import HarmonyPlan, PagedPlan, Plan, Policy
from sim.schedule import Schedule, TaskKind
from sim.timelines.replay import StepTimes, in_sequence, replay_times
from sim.timelines.timeline import Source, Timeline, TimelineInfo
from sim.unrolling import split_steps, unroll
from tests.sim.handmade import machine
from traces.synthetic import uniform_trace

MICROSECOND, MILLISECOND = 10**3, 10**6


def pipeline(gpus: int = 2) -> Schedule:
    plan = HarmonyPlan(
        policy=Policy.HARMONY_PP,
        minibatch=4,
        gpus=gpus,
        u_fwd=2,
        u_bwd=2,
        packs_fwd=((0, 1), (2, 3)),
        packs_bwd=((0, 1), (2, 3), (4, 5)),
    )
    return build(plan, uniform_trace(6), machine(gpus=gpus))


def data_parallel() -> Schedule:
    plan = HarmonyPlan(
        policy=Policy.HARMONY_DP, minibatch=4, gpus=2, u_fwd=1, u_bwd=1, packs_fwd=((0, 2),), packs_bwd=((0, 2), (3, 5))
    )
    return build(plan, uniform_trace(6), machine(gpus=2))


def swapping() -> Schedule:
    plan: Plan = PagedPlan(policy=Policy.DP_SWAP, minibatch=4, gpus=2, u_fwd=1, u_bwd=1)
    return build(plan, uniform_trace(6), machine(gpus=2).with_usable_memory(40_000_000))


def durations(schedule: Schedule) -> list[int]:
    """A millisecond for every task and one more for each megabyte that it copies."""
    return [MILLISECOND + task.bytes for task in schedule.tasks]


def timeline(
    schedule: Schedule, *steps: Sequence[int], source: Source = "simulated", warmup_steps: int = 0
) -> Timeline:
    """One step after the other, ``steps`` giving the tasks' durations in each; the default is :func:`durations`."""
    recorded: list[StepTimes] = []
    begin = 0
    for lasting in steps or (durations(schedule),):
        times = replay_times(schedule, lasting)
        recorded.append(StepTimes([t + begin for t in times.start_ns], [t + begin for t in times.end_ns]))
        begin += times.duration_ns
    info = TimelineInfo.of(schedule, "bench", source, steps=len(recorded), warmup_steps=warmup_steps)
    return Timeline.from_times(schedule, info, recorded)


def overlapping(schedule: Schedule, *, factor: int = 1, source: Source = "simulated") -> Timeline:
    """A step alone and three that overlap; tasks last ``factor`` times :func:`durations`."""
    lasting = [factor * duration for duration in durations(schedule)]
    together = split_steps(replay_times(unroll(schedule, 3, NO_TIES), lasting * 3), 3)
    info = TimelineInfo.of(schedule, "bench", source, steps=4)
    runs = [[replay_times(schedule, lasting)], together]
    return Timeline.from_times(schedule, msgspec.structs.replace(info, overlapping=3), in_sequence(runs))


def first_of(schedule: Schedule, kind: TaskKind) -> int:
    return next(task.id for task in schedule.tasks if task.kind is kind)
