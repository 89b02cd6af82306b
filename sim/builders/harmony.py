"""Builds the schedule of a Harmony plan: place → order → transfers → memory.

The memory pass may find no room. Then the group at whose side it ran out (or one before it) gets less prefetching, and
the transfer and memory passes run again: double buffering happens as memory allows, and a plan fails only if it fails
without.
"""

from __future__ import annotations

from collections.abc import Sequence

from traces.costs import Costs

from ..errors import DoesNotFit
from ..hardware.machine import Machine
from ..plan import HarmonyPlan, UpdateOn
from ..schedule import MemoryPlan, Schedule, TaskKind
from .draft import assign_lifetimes, finish
from .memory import GroupDoesNotFit, count_host, place
from .order import Group, contributors, linearize, place_groups, split_packs, steps_by_gpu, updates_at_end
from .residents import Residents
from .store_bytes import store_by_kind
from .transfers import Ahead, add_transfers
from .update_order import update_order


def build_harmony(plan: HarmonyPlan, costs: Costs, machine: Machine) -> Schedule:
    """Build the schedule. Raises DoesNotFit when a GPU or the host has too little memory for the plan."""
    updated = frozenset(pack for pack in plan.packs_bwd if any(map(costs.updates, range(pack[0], pack[1] + 1))))
    groups = place_groups(plan)
    sequences = steps_by_gpu(plan, groups, updated, split_packs(plan, costs))
    steps = linearize(plan, sequences, contributors(plan, costs))
    updates_last = updates_at_end(plan, groups, updated)
    steps += updates_last
    groups += [step.group for step in updates_last]
    caps = tuple(gpu.usable_bytes for gpu in machine.gpus)
    updates = update_order(plan, costs, machine, groups) if plan.update is UpdateOn.CPU else []
    ahead = _first_guess(plan, costs, groups, caps)
    while True:
        draft = add_transfers(plan, costs, steps, ahead, updates)
        assign_lifetimes(draft)
        placed = place(draft, caps, {group for group, allowed in ahead.items() if allowed is Ahead.NOTHING})
        if not placed.refusals:
            break
        relaxed = [_relax(ahead, groups, refusal) for refusal in _first_of_each_group(placed.refusals)]
        if not any(relaxed):
            raise placed.refusals[0]
    store = store_by_kind(costs, plan.minibatch, copies=1, minibatches=2 if plan.overlap_steps else 1)
    state_bytes = sum(store.values())
    memory = MemoryPlan(
        gpu_peak_bytes=placed.peaks,
        gpu_cap_bytes=caps,
        host_store=store,
        host_peak_bytes=state_bytes + count_host(draft, plan.gpus),
        host_cap_bytes=machine.host.memory_bytes,
    )
    if memory.host_cap_bytes is not None and memory.host_peak_bytes > memory.host_cap_bytes:
        what = f"model state ({state_bytes} B), data and stash"
        raise DoesNotFit(None, (0, costs.layer_count - 1), what, memory.host_peak_bytes, memory.host_cap_bytes)
    return finish(
        draft, model=costs.trace.model, plan=plan, layers=costs.layer_count, memory=memory, offsets=placed.offsets
    )


def _first_of_each_group(refusals: Sequence[GroupDoesNotFit]) -> list[GroupDoesNotFit]:
    return list({(refusal.gpu, refusal.group): refusal for refusal in reversed(refusals)}.values())


def _relax(ahead: dict[int, Ahead], groups: Sequence[Group], refusal: GroupDoesNotFit) -> bool:
    """Prefetch less in the group that found no room or, if it has given up all, in the one before it on that GPU.

    False if no group up to there prefetches anything.
    """
    for group in reversed(groups):
        at_fault = refusal.group is not None and group.gpu == refusal.gpu and group.index <= refusal.group
        if at_fault and ahead[group.index] is not Ahead.NOTHING:
            ahead[group.index] = Ahead(ahead[group.index] - 1)
            return True
    return False


def _first_guess(plan: HarmonyPlan, costs: Costs, groups: list[Group], caps: tuple[int, ...]) -> dict[int, Ahead]:
    """Where to start: no prefetching of weights where the bytes alone already say that it cannot fit."""
    if not plan.prefetch:
        return {group.index: Ahead.NOTHING for group in groups}
    residents = Residents(plan, costs)
    guess: dict[int, Ahead] = {}
    following: dict[int, Group] = {}
    for group in reversed(groups):
        after = following.get(group.gpu)
        upcoming = residents.swapped_bytes(after.gpu, after.pack) + costs.buffer_bytes(*after.pack) if after else 0
        held = residents.held_bytes(group.gpu) + residents.swapped_bytes(group.gpu, group.pack)
        fits = held + _working_set(costs, group) + upcoming <= caps[group.gpu]
        guess[group.index] = Ahead.WEIGHTS if fits else Ahead.INPUTS
        following[group.gpu] = group
    return guess


def _working_set(costs: Costs, group: Group) -> int:
    """Bytes that a group cannot do without, besides weights, while it computes its largest microbatch."""
    first, last = group.pack
    if group.kind is TaskKind.UPDATE:
        return costs.gradient_bytes(first, last) + costs.optimizer_state_bytes(first, last)
    batch = group.pieces[0][1] - group.pieces[0][0]
    held = costs.buffer_bytes(first, last) + costs.input_bytes(first, batch)
    if group.kind is not TaskKind.BACKWARD:
        return held + costs.forward_workspace_bytes(first, last, batch) + costs.output_bytes(last, batch)
    return held + costs.gradient_bytes(first, last) + costs.backward_workspace_bytes(first, last, batch)
