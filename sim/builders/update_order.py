"""In which order the host updates packs.

It updates what is ready, in the order of the backward: last pack first. Where steps overlap, the next step needs the
first packs first, whose backward comes last; when they are ready, updates of others may still wait for the host. So in
a pipeline, of those that wait, the first pack goes first. The order is fixed beforehand, so when packs are ready is
guessed, by what computing takes. In data parallel that would be a bad guess: there copies and all-reduces decide it.

At the end of the step all are ready, and the first pack goes first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from traces.costs import Costs
from traces.schema import Phase

from ..hardware.machine import Machine
from ..plan import HarmonyPlan, Pack, UpdateWhen
from ..schedule import TaskKind
from .order import Group, is_data_parallel


def update_order(plan: HarmonyPlan, costs: Costs, machine: Machine, groups: Sequence[Group]) -> list[Pack]:
    """The packs that have gradients, in the order in which the host updates them."""
    in_backward_order = [pack for pack in reversed(plan.packs_bwd) if costs.gradient_bytes(*pack)]
    if plan.update_when is UpdateWhen.END:
        return in_backward_order[::-1]
    if not plan.overlap_steps or is_data_parallel(plan):
        return in_backward_order
    ready = _ready_ns(plan, costs, machine, groups)
    arriving = sorted(in_backward_order, key=lambda pack: ready[pack])
    waiting: list[Pack] = []
    order: list[Pack] = []
    now = 0.0
    while arriving or waiting:
        if not waiting:
            now = max(now, ready[arriving[0]])
        while arriving and ready[arriving[0]] <= now:
            heapq.heappush(waiting, arriving.pop(0))
        order.append(heapq.heappop(waiting))
        now += costs.update_ns(*order[-1], Phase.UPDATE_CPU) / machine.host.speed
    return order


def _ready_ns(plan: HarmonyPlan, costs: Costs, machine: Machine, groups: Sequence[Group]) -> dict[Pack, float]:
    """When the backward of each pack of a pipeline ends, if nothing but computing takes time."""
    free = [0.0] * plan.gpus
    ready: dict[Pack, float] = {}
    before = 0.0  # end of the pack before
    for group in groups:
        speed = machine.gpus[group.gpu].speed
        times = [_compute_ns(group, stop - start, costs) / speed for start, stop in group.pieces]
        free[group.gpu] = before = max(free[group.gpu] + sum(times), before + times[-1])
        if group.kind is TaskKind.BACKWARD:
            ready[group.pack] = before
    return ready


def _compute_ns(group: Group, samples: int, costs: Costs) -> int:
    forward = costs.forward_ns(*group.pack, samples)
    return forward if group.kind is TaskKind.FORWARD else forward + costs.backward_ns(*group.pack, samples)
