"""Order and placement passes of Harmony plans: which pack runs where, and one total order of all compute steps.

Harmony-PP deals packs round robin, and the deal goes on from forward into backward (N = 2, three forward packs,
two backward packs; the last backward pack, with the loss, is fused)::

    gpu 0:  F0     F2     B0
    gpu 1:     F1     B1

GPUs get their turns in the plan's ``gpu_order``, here ascending. Harmony-DP runs every pack on every GPU, each on its
own share of the minibatch.

With ``split_backward``, first parts of a group's backwards (``b``) come as soon as they can, second parts (``w``) where
the GPU would wait, and the rest of them before its next group (N = 2, three microbatches)::

    gpu 0:  b0 b1 b2 w0 w1 w2
    gpu 1:     b0 b1 b2 w0 w1 w2

An update on a GPU follows its pack's backward there; at the end of the step, updates are groups of their own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from traces.costs import Costs

from ..plan import HarmonyPlan, Pack, Policy, Reduce, UpdateOn, UpdateWhen, pieces, shares
from ..schedule import Interval, TaskKind


@dataclass(frozen=True, slots=True)
class Group:
    """A pack run over all its microbatches, one after the other, on one GPU. ``index`` counts within the whole plan.
    One of an update at the end of the step has no microbatches."""

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
    """All groups, forward packs first to last and then backward packs last to first, with their GPUs.

    Just before a backward pack whose stash is not kept come the packs that are repeated for it.
    """
    forward, backward = list(enumerate(plan.packs_fwd)), list(reversed(list(enumerate(plan.packs_bwd))))
    jobs = [(TaskKind.FORWARD, plan.u_fwd, *item) for item in forward]
    jobs += [(TaskKind.BACKWARD, plan.u_bwd, *item) for item in backward]
    groups: list[Group] = []
    for position, (kind, size, pack_index, pack) in enumerate(jobs):
        if is_data_parallel(plan):
            runs = list(enumerate(shares(plan.minibatch, plan.gpus)))
        else:
            runs = [(plan.gpu_of_turn(position), (0, plan.minibatch))]
        parts = [(kind, pack_index, pack)]
        if kind is TaskKind.BACKWARD:
            again = plan.packs_again(pack_index)
            parts = [*((TaskKind.RECOMPUTE, index, plan.packs_bwd[index]) for index in again), *parts]
        for part_kind, index, part in parts:
            for gpu, (start, stop) in runs:
                cut = tuple(pieces(start, stop, size))
                groups.append(Group(len(groups), part_kind, part, index, gpu, cut))
    return groups


def shard_of(plan: HarmonyPlan, gpu: int) -> int | None:
    """Which shard of every pack a GPU updates, or hands to the host; None: whole packs."""
    return gpu if plan.reduce is Reduce.SCATTER and plan.policy is Policy.HARMONY_DP and plan.gpus > 1 else None


def takes_update(plan: HarmonyPlan, group: Group) -> bool:
    """Whether the group's GPU updates its pack, or hands the gradient to the host. Of the GPUs that have it, the packs'
    owners take turns; but where each has its shard, all do."""
    if not is_data_parallel(plan) or shard_of(plan, group.gpu) is not None:
        return True
    return plan.gpu_of_turn(group.pack_index) == group.gpu


def split_packs(plan: HarmonyPlan, costs: Costs) -> frozenset[Pack]:
    """Backward packs done in two parts: those that have both gradients, and another pack waiting for the first."""
    if not plan.split_backward or is_data_parallel(plan):
        return frozenset()
    passed = (
        pack for pack in plan.packs_bwd[1:] if costs.input_gradient_bytes(pack[0], min(plan.u_bwd, plan.minibatch))
    )
    return frozenset(pack for pack in passed if costs.gradient_bytes(*pack))


def steps_by_gpu(
    plan: HarmonyPlan, groups: Sequence[Group], updated: frozenset[Pack], split: frozenset[Pack]
) -> list[list[Step]]:
    """Each GPU's compute steps in its order, without the second parts of backwards.

    ``updated`` are the backward packs that have something to update, ``split`` those done in two parts.
    """
    sequences: list[list[Step]] = [[] for _ in range(plan.gpus)]
    for group in groups:
        own = sequences[group.gpu]
        in_parts = group.kind is TaskKind.BACKWARD and group.pack in split
        kind = TaskKind.BACKWARD_INPUT if in_parts else group.kind
        own.extend(Step(kind, group, index, samples) for index, samples in enumerate(group.pieces))
        if plan.update_when is UpdateWhen.JIT and _updates_on_gpu(plan, group, updated):
            own.append(Step(TaskKind.UPDATE, group, len(group.pieces), None))
    return sequences


def updates_at_end(plan: HarmonyPlan, groups: Sequence[Group], updated: frozenset[Pack]) -> list[Step]:
    """Updates on GPUs after everything else, on those that have the packs' gradients (``groups``): in the order of the
    backward, as the first gradients to be home may come in again first. None where packs are updated just in time."""
    if plan.update_when is UpdateWhen.JIT:
        return []
    made = [group for group in groups if _updates_on_gpu(plan, group, updated)]
    return [
        Step(TaskKind.UPDATE, replace(group, index=index, kind=TaskKind.UPDATE, pieces=()), 0, None)
        for index, group in enumerate(made, start=len(groups))
    ]


def _updates_on_gpu(plan: HarmonyPlan, group: Group, updated: frozenset[Pack]) -> bool:
    """Whether the GPU of a group updates its pack when it has that pack's gradient."""
    on_gpu = plan.update is UpdateOn.GPU and group.kind is TaskKind.BACKWARD and group.pack in updated
    return on_gpu and takes_update(plan, group)


def contributors(plan: HarmonyPlan, costs: Costs) -> dict[Pack, frozenset[Pack]]:
    """For each backward pack the others that use tied weights which it updates."""

    def partners(pack: Pack) -> set[int]:
        return {partner for layer in range(pack[0], pack[1] + 1) for partner in costs.tied_partners(layer)}

    return {
        pack: frozenset(
            other
            for other in plan.packs_bwd
            if other != pack and not partners(pack).isdisjoint(range(other[0], other[1] + 1))
        )
        for pack in plan.packs_bwd
    }


def linearize(
    plan: HarmonyPlan, sequences: Sequence[Sequence[Step]], adds: Mapping[Pack, frozenset[Pack]]
) -> list[Step]:
    """One total order: list scheduling where every step takes one unit of time, GPUs ascending within a unit.

    Second parts of backwards are put in where a GPU's next step is not ready, or must not come before them.

    A step is ready when the steps that produce its input have ended: the previous pack's forward of its samples, the
    next pack's backward of its samples, and, for an update, every backward of its pack and of those whose gradients it
    ``adds``. What is repeated has its input once the forward has come so far.
    """
    done = _Progress(plan, adds)
    queues = [_Queue(sequence, plan.split_backward) for sequence in sequences]
    order: list[Step] = []
    while any(queues):
        batch = [step for queue in queues if (step := queue.next(done)) is not None]
        if not batch:
            raise AssertionError("no compute step is ready: the placement is not a pipeline")
        for step in batch:
            done.add(step)
        order.extend(batch)
    return order


class _Queue:
    """What a GPU has yet to do: its steps in order, and the second parts of those that it has done a first part of."""

    def __init__(self, steps: Sequence[Step], most_waiting: int) -> None:
        self._steps, self._most_waiting = deque(steps), most_waiting
        self._waiting: deque[Step] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps or self._waiting)

    def next(self, done: _Progress) -> Step | None:
        """Take the step for this unit of time; None if the GPU must wait."""
        if self._steps and not self._must_wait(self._steps[0]) and done.ready(self._steps[0]):
            step = self._steps.popleft()
            if step.kind is TaskKind.BACKWARD_INPUT:
                self._waiting.append(replace(step, kind=TaskKind.BACKWARD_WEIGHT))
            return step
        return self._waiting.popleft() if self._waiting else None

    def _must_wait(self, step: Step) -> bool:
        """Whether second parts come first: too many wait, or they are of the group before, or before its update."""
        if not self._waiting:
            return False
        same_group = step.group is self._waiting[0].group and step.kind is TaskKind.BACKWARD_INPUT
        return not same_group or len(self._waiting) >= self._most_waiting


class _Progress:
    """Samples that each pack has seen, per direction. Microbatches end in order, so a count per share suffices."""

    def __init__(self, plan: HarmonyPlan, adds: Mapping[Pack, frozenset[Pack]]) -> None:
        self._plan, self._adds = plan, adds
        self._with_gradient: set[Pack] = set()
        self._data_parallel = is_data_parallel(plan)
        self._seen: dict[tuple[TaskKind, int, int], int] = {}

    def add(self, step: Step) -> None:
        if step.kind in (TaskKind.BACKWARD, TaskKind.BACKWARD_WEIGHT) and step.samples == step.group.pieces[-1]:
            self._with_gradient.add(step.group.pack)
        if step.samples is not None and step.kind is not TaskKind.BACKWARD_WEIGHT:
            self._seen[self._key(step.group.kind, step.group.pack_index, step.gpu)] = step.samples[1]

    def ready(self, step: Step) -> bool:
        if step.samples is None:
            return self._every_gpu_did(step.group)
        stop = step.samples[1]
        if step.kind is TaskKind.FORWARD:
            before = step.group.pack_index - 1
            return before < 0 or self._reached(TaskKind.FORWARD, before, step.gpu, stop)
        if step.kind is TaskKind.RECOMPUTE:
            first = step.group.pack[0]
            maker = next((index for index, (_, last) in enumerate(self._plan.packs_fwd) if first <= last + 1), 0)
            return first == 0 or self._reached(TaskKind.FORWARD, maker, step.gpu, stop)
        after = step.group.pack_index + 1
        if after < len(self._plan.packs_bwd):
            return self._reached(TaskKind.BACKWARD, after, step.gpu, stop)
        last = len(self._plan.packs_fwd) - 1
        return last < 0 or self._reached(TaskKind.FORWARD, last, step.gpu, stop)

    def _every_gpu_did(self, group: Group) -> bool:
        """Whether the group's backward has ended on all GPUs that work on it, and all whose gradients it adds."""
        if not self._data_parallel:
            return self._adds[group.pack] <= self._with_gradient  # the update's own GPU keeps its order
        ends = [stop for _, stop in shares(self._plan.minibatch, self._plan.gpus)]
        return all(self._reached(group.kind, group.pack_index, gpu, stop) for gpu, stop in enumerate(ends))

    def _reached(self, kind: TaskKind, pack_index: int, gpu: int, stop: int) -> bool:
        return self._seen.get(self._key(kind, pack_index, gpu), 0) >= stop

    def _key(self, kind: TaskKind, pack_index: int, gpu: int) -> tuple[TaskKind, int, int]:
        return (kind, pack_index, gpu if self._data_parallel else 0)
