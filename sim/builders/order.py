"""Order and placement passes of Harmony plans: which pack runs where, and one total order of all compute steps.

Harmony-PP deals packs round robin, and the deal goes on from forward into backward (N = 2, three forward packs,
two backward packs; the last backward pack, with the loss, is fused)::

    gpu 0:  F0     F2     B0
    gpu 1:     F1     B1

GPUs get their turns in the plan's ``gpu_order``, here ascending. Harmony-DP runs every pack on every GPU, each on its
own share of the minibatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..plan import HarmonyPlan, Pack, Policy, UpdateOn, pieces, shares
from ..schedule import Interval, TaskKind


@dataclass(frozen=True, slots=True)
class Group:
    """A pack run over all its microbatches, one after the other, on one GPU. ``index`` counts within the whole plan."""

    index: int
    kind: TaskKind
    pack: Pack
    pack_index: int
    gpu: int
    pieces: tuple[Interval, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One compute task: a microbatch of a group, or (``UPDATE``, no samples) the group's update on its GPU."""

    kind: TaskKind
    group: Group
    microbatch: int
    samples: Interval | None

    @property
    def gpu(self) -> int:
        """Where it runs."""
        return self.group.gpu


def is_data_parallel(plan: HarmonyPlan) -> bool:
    """True when every GPU runs all packs. A pipeline over one GPU is data parallel over one GPU."""
    return plan.policy is Policy.HARMONY_DP or plan.gpus == 1


def place_groups(plan: HarmonyPlan) -> list[Group]:
    """All groups, forward packs first to last and then backward packs last to first, with their GPUs."""
    forward, backward = list(enumerate(plan.packs_fwd)), list(reversed(list(enumerate(plan.packs_bwd))))
    jobs = [(TaskKind.FORWARD, plan.u_fwd, *item) for item in forward]
    jobs += [(TaskKind.BACKWARD, plan.u_bwd, *item) for item in backward]
    groups: list[Group] = []
    for position, (kind, size, pack_index, pack) in enumerate(jobs):
        if is_data_parallel(plan):
            runs = list(enumerate(shares(plan.minibatch, plan.gpus)))
        else:
            runs = [(plan.gpu_of_turn(position), (0, plan.minibatch))]
        for gpu, (start, stop) in runs:
            cut = tuple(pieces(start, stop, size))
            groups.append(Group(len(groups), kind, pack, pack_index, gpu, cut))
    return groups


def update_owner(plan: HarmonyPlan, group: Group) -> int:
    """GPU that updates a backward pack, or hands its gradient to the host: the packs' owners take turns."""
    return plan.gpu_of_turn(group.pack_index) if is_data_parallel(plan) else group.gpu


def steps_by_gpu(plan: HarmonyPlan, groups: Sequence[Group], updated: frozenset[Pack]) -> list[list[Step]]:
    """Each GPU's compute steps in its order. ``updated`` are the backward packs that have something to update."""
    sequences: list[list[Step]] = [[] for _ in range(plan.gpus)]
    for group in groups:
        own = sequences[group.gpu]
        own.extend(Step(group.kind, group, index, samples) for index, samples in enumerate(group.pieces))
        on_gpu = plan.update is UpdateOn.GPU and group.kind is TaskKind.BACKWARD and group.pack in updated
        if on_gpu and update_owner(plan, group) == group.gpu:
            own.append(Step(TaskKind.UPDATE, group, len(group.pieces), None))
    return sequences


def linearize(plan: HarmonyPlan, sequences: Sequence[Sequence[Step]]) -> list[Step]:
    """One total order: list scheduling where every step takes one unit of time, GPUs ascending within a unit.

    A step is ready when the steps that produce its input have ended: the previous pack's forward of its samples, the
    next pack's backward of its samples, and, for an update, every backward of its pack.
    """
    done = _Progress(plan)
    heads = [0] * len(sequences)
    order: list[Step] = []
    total = sum(map(len, sequences))
    while len(order) < total:
        batch = []
        for gpu, sequence in enumerate(sequences):
            if heads[gpu] < len(sequence) and done.ready(sequence[heads[gpu]]):
                batch.append(sequence[heads[gpu]])
                heads[gpu] += 1
        if not batch:
            raise AssertionError("no compute step is ready: the placement is not a pipeline")
        for step in batch:
            done.add(step)
        order.extend(batch)
    return order


class _Progress:
    """Samples that each pack has seen, per direction. Microbatches end in order, so a count per share suffices."""

    def __init__(self, plan: HarmonyPlan) -> None:
        self._plan = plan
        self._data_parallel = is_data_parallel(plan)
        self._seen: dict[tuple[TaskKind, int, int], int] = {}

    def add(self, step: Step) -> None:
        if step.samples is not None:
            self._seen[self._key(step.kind, step.group.pack_index, step.gpu)] = step.samples[1]

    def ready(self, step: Step) -> bool:
        if step.samples is None:
            return self._every_gpu_did(step.group)
        stop = step.samples[1]
        if step.kind is TaskKind.FORWARD:
            before = step.group.pack_index - 1
            return before < 0 or self._reached(TaskKind.FORWARD, before, step.gpu, stop)
        after = step.group.pack_index + 1
        if after < len(self._plan.packs_bwd):
            return self._reached(TaskKind.BACKWARD, after, step.gpu, stop)
        last = len(self._plan.packs_fwd) - 1
        return last < 0 or self._reached(TaskKind.FORWARD, last, step.gpu, stop)

    def _every_gpu_did(self, group: Group) -> bool:
        """Whether the group's backward has ended on all GPUs that work on it."""
        if not self._data_parallel:
            return True  # only the update's own GPU does, and it keeps its order
        ends = [stop for _, stop in shares(self._plan.minibatch, self._plan.gpus)]
        return all(self._reached(group.kind, group.pack_index, gpu, stop) for gpu, stop in enumerate(ends))

    def _reached(self, kind: TaskKind, pack_index: int, gpu: int, stop: int) -> bool:
        return self._seen.get(self._key(kind, pack_index, gpu), 0) >= stop

    def _key(self, kind: TaskKind, pack_index: int, gpu: int) -> tuple[TaskKind, int, int]:
        return (kind, pack_index, gpu if self._data_parallel else 0)
