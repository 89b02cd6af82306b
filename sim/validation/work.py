"""Faults in the work itself: samples and layers left out or done twice, and work in the wrong order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby

from traces.costs import Costs

from ..plan import HarmonyPlan, PagedPlan, ShardedPlan, UpdateWhen
from ..schedule import Interval, Schedule, Task, TaskKind, TensorKind
from .happens_before import HappensBefore

_PARTS = (TaskKind.BACKWARD_INPUT, TaskKind.BACKWARD_WEIGHT)


def fused_layers(schedule: Schedule) -> range:
    """Layers whose only forward is part of their backward: Harmony's last pack."""
    match schedule.plan:
        case HarmonyPlan(packs_bwd=packs):
            first, last = packs[-1]
            return range(first, last + 1)
        case PagedPlan() | ShardedPlan():
            return range(0)


class Passes:
    """The tasks of some kinds, by layer, each layer's in order of samples."""

    def __init__(self, schedule: Schedule, *kinds: TaskKind) -> None:
        self.by_layer: list[list[tuple[Interval, Task]]] = [[] for _ in range(schedule.layers)]
        for task in schedule.copies(*kinds):
            for layer in _known_layers(task, schedule.layers):
                if task.samples is not None:
                    self.by_layer[layer].append((task.samples, task))
        for entries in self.by_layer:
            entries.sort(key=lambda entry: (entry[0], entry[1].id))

    def overlapping(self, layer: int, samples: Interval) -> Iterator[Task]:
        """The tasks that take any of these samples through the layer, if no sample passes it twice."""
        entries = self.by_layer[layer]
        at = max(0, bisect_left(entries, samples[0], key=lambda entry: entry[0][0]) - 1)
        while at < len(entries) and entries[at][0][0] < samples[1]:
            if entries[at][0][1] > samples[0]:
                yield entries[at][1]
            at += 1


def pass_faults(schedule: Schedule) -> Iterator[str]:
    """Samples that pass a layer forward or backward, or a part of that, never or twice."""
    fused = fused_layers(schedule)
    directions = {TaskKind.FORWARD: Passes(schedule, TaskKind.FORWARD)}
    if any(schedule.copies(*_PARTS)):
        directions |= {part: Passes(schedule, TaskKind.BACKWARD, part) for part in _PARTS}
    else:
        directions[TaskKind.BACKWARD] = Passes(schedule, TaskKind.BACKWARD)
    for kind, passes in directions.items():
        expected = [kind is not TaskKind.FORWARD or layer not in fused for layer in range(schedule.layers)]
        # A pack's layers have the same faults; say them once.
        for key, run in groupby(
            range(schedule.layers),
            key=lambda layer: (expected[layer], [(s, task.id) for s, task in passes.by_layer[layer]]),
        ):
            layers = list(run)
            entries = passes.by_layer[layers[0]]
            if not key[0]:
                for _, task in entries:
                    yield f"{task} is one too many: layers {_run(fused)} pass forward inside their backward"
                continue
            yield from _gaps(schedule, kind, _run(layers), entries)


def _gaps(schedule: Schedule, kind: TaskKind, layers: str, entries: Sequence[tuple[Interval, Task]]) -> Iterator[str]:
    reached, latest = 0, None
    for (start, stop), task in entries:
        if start > reached:
            yield f"layers {layers}: {_samples(reached, start)} never pass {kind.value}"
        elif start < reached and latest is not None:
            twice = _samples(start, min(stop, reached))
            yield f"layers {layers}: {twice} pass {kind.value} twice, in {latest} and in {task}"
        if stop > reached:
            reached, latest = stop, task
    if reached < schedule.plan.minibatch:
        yield f"layers {layers}: {_samples(reached, schedule.plan.minibatch)} never pass {kind.value}"


def update_faults(schedule: Schedule, costs: Costs | None) -> Iterator[str]:
    """Layers updated twice or, if it is known which have something to update (``costs``), never."""
    for where, updates in _update_copies(schedule).items():
        by_layer: list[list[Task]] = [[] for _ in range(schedule.layers)]
        for task in updates:
            for layer in _known_layers(task, schedule.layers):
                by_layer[layer].append(task)
        for layer, tasks in enumerate(by_layer):
            if len(tasks) > 1:
                yield f"layer {layer} is updated {len(tasks)} times{where}: {' and '.join(map(str, tasks))}"
            if not tasks and costs is not None and costs.updates(layer):
                yield f"layer {layer} has {costs.owned_weight_bytes(layer)} B to update and is never updated{where}"


def _update_copies(schedule: Schedule) -> dict[str, list[Task]]:
    """Updates by the copy of the state that they change, or the shard of it: one shared copy, or every GPU's own."""
    updates = list(schedule.copies(TaskKind.UPDATE))
    if any(task.shard is not None for task in updates):
        shards = range(schedule.plan.gpus)
        return {f" in shard {shard}": [t for t in updates if t.shard in (None, shard)] for shard in shards}
    if not schedule.plan.policy.has_private_stores:
        return {"": updates}
    return {f" on gpu {gpu}": [t for t in updates if t.gpu == gpu] for gpu in range(schedule.plan.gpus)}


def order_faults(schedule: Schedule, surely: HappensBefore) -> Iterator[str]:
    """Work that may start before the work that it needs has ended.

    A tied weight is owned by its first user, whose backward comes last; so nothing is said of the others.
    """
    fused = fused_layers(schedule)
    forward, of_inputs, of_weights = (
        Passes(schedule, *kinds)
        for kinds in (
            (TaskKind.FORWARD,),
            (TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT),
            (TaskKind.BACKWARD, TaskKind.BACKWARD_WEIGHT),
        )
    )
    for task in schedule.tasks:
        for before in _needed(task, forward, of_inputs, of_weights, fused):
            if not surely(before.id, task.id):
                yield f"{task} may start before {before} has ended"


def norm_faults(schedule: Schedule, surely: HappensBefore) -> Iterator[str]:
    """Norms that the plan does not ask for, or that are missing; gradients made after a norm, and updates before it."""
    norms = list(schedule.copies(TaskKind.NORM))
    plan = schedule.plan
    at_end = not isinstance(plan, PagedPlan) and plan.update_when is UpdateWhen.END
    if len(norms) != at_end:
        what = f"{len(norms)} norms: {', '.join(map(str, norms))}" if norms else "no norm"
        yield f"there is {what}; a plan that updates at the end has one, and others have none"
        return
    for norm in norms:
        if (norm.layer_first, norm.layer_last) != (0, schedule.layers - 1):
            yield f"{norm} is of layers {norm.layer_first}-{norm.layer_last}; it must be of all {schedule.layers}"
        for task in schedule.tasks:
            if _makes_gradients(task) and not surely(task.id, norm.id):
                yield f"{norm} may start before {task} has ended"
            if task.kind is TaskKind.UPDATE and not surely(norm.id, task.id):
                yield f"{task} may start before {norm} has ended"


def _makes_gradients(task: Task) -> bool:
    """Whether the task brings a gradient on its way home, or there."""
    if task.kind is TaskKind.SWAP_OUT:
        return task.tensor_kind is TensorKind.GRADIENT
    return task.kind in (TaskKind.BACKWARD, *_PARTS, TaskKind.REDUCE, TaskKind.ALLREDUCE, TaskKind.REDUCE_SCATTER)


def loss_faults(schedule: Schedule, surely: HappensBefore) -> Iterator[str]:
    """Updates that may start before every loss of the minibatch is known: a step whose loss is no number must be able
    to leave everything as it was."""
    last = schedule.layers - 1
    kind = TaskKind.BACKWARD if last in fused_layers(schedule) else TaskKind.FORWARD
    kinds = (kind, TaskKind.BACKWARD_INPUT) if kind is TaskKind.BACKWARD else (kind,)
    latest = {task.lanes[0]: task for task in schedule.copies(*kinds) if task.layer_last == last}
    for update in schedule.copies(TaskKind.UPDATE):
        for loss in latest.values():
            needs_it_anyway = update.layer_last >= loss.layer_first
            if not needs_it_anyway and not surely(loss.id, update.id):
                yield f"{update} may start before {loss} has ended, and with it before all losses are known"


def part_faults(schedule: Schedule) -> Iterator[str]:
    """Second parts of backwards that do not follow from a first part: of other layers or samples, on another GPU, or
    without what autograd held."""
    first_parts = {_scope(task): task for task in schedule.copies(TaskKind.BACKWARD_INPUT)}
    for task in schedule.copies(TaskKind.BACKWARD_WEIGHT):
        first = first_parts.get(_scope(task))
        if first is None:
            yield f"{task} has no first part on its gpu, of its layers and samples"
            continue
        kept = [number for number in task.reads if schedule.buffers[number].kind is TensorKind.WORKSPACE]
        if not kept or not set(kept) <= set(first.writes):
            yield f"{task} reads workspace {kept}; it needs what {first} holds for it, and nothing else"


def _scope(task: Task) -> tuple[int | None, int, int, Interval | None]:
    return task.gpu, task.layer_first, task.layer_last, task.samples


def _needed(task: Task, forward: Passes, of_inputs: Passes, of_weights: Passes, fused: range) -> list[Task]:
    """Tasks whose results a forward, backward or update takes, in the total order."""
    needed: dict[int, Task] = {}
    samples = task.samples or (0, 0)
    layers = range(task.layer_first, task.layer_last + 1)
    match task.kind:
        case TaskKind.FORWARD:
            if task.layer_first > 0:
                needed.update((t.id, t) for t in forward.overlapping(task.layer_first - 1, samples))
        case TaskKind.BACKWARD | TaskKind.BACKWARD_INPUT:
            if task.layer_last + 1 < len(of_inputs.by_layer):
                needed.update((t.id, t) for t in of_inputs.overlapping(task.layer_last + 1, samples))
            if task.layer_first in fused and task.layer_first > 0:
                needed.update((t.id, t) for t in forward.overlapping(task.layer_first - 1, samples))
            needed.update((t.id, t) for layer in layers for t in forward.overlapping(layer, samples))
        case TaskKind.BACKWARD_WEIGHT:
            needed.update((t.id, t) for layer in layers for t in of_inputs.overlapping(layer, samples))
        case TaskKind.UPDATE:
            needed.update((t.id, t) for layer in layers for _, t in of_weights.by_layer[layer])
        case _:
            pass
    return [needed[number] for number in sorted(needed)]


def _known_layers(task: Task, count: int) -> range:
    return range(max(task.layer_first, 0), min(task.layer_last + 1, count))


def _run(layers: Sequence[int]) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"


def _samples(start: int, stop: int) -> str:
    return f"samples {start}-{stop - 1}" if stop - start > 1 else f"sample {start}"
