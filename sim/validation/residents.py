"""Faults in what stays on GPUs from step to step: a step must not leave it out of date."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from traces.costs import Costs

from ..schedule import Buffer, Schedule, Task, TaskKind, TensorKind
from .happens_before import HappensBefore


def resident_faults(schedule: Schedule, surely: HappensBefore, costs: Costs) -> Iterator[str]:
    """Weights and optimizer state that stay, and that are not new after the step: their update must change them, or a
    copy from home bring what it changed; and no copy may bring what is older."""
    updates = _by_layer(schedule.copies(TaskKind.UPDATE))
    sent_home = _by_layer(
        task for task in schedule.copies(TaskKind.SWAP_OUT) if task.tensor_kind is TensorKind.WEIGHT and not task.writes
    )
    for buffer in schedule.residents:
        said: set[int] = set()
        copies = _by_layer(
            task for task in schedule.copies(TaskKind.SWAP_IN) if buffer.id in task.writes and not task.reads
        )
        for layer in range(buffer.layer_first, buffer.layer_last + 1):
            for owner, update in ((at, task) for at in _owners(buffer, layer, costs) for task in updates.get(at, ())):
                renewals = [copy for copy in copies.get(layer, ()) if not surely(copy.id, update.id)]
                if update.id in said or (owner == layer and _changes(update, buffer) and not renewals):
                    continue
                sources = [task for task in sent_home.get(owner, ()) if task.gpu == update.gpu]
                source = update if update.gpu is None else sources[-1] if sources else None
                if source is None or not renewals or not surely(source.id, renewals[-1].id):
                    said.add(update.id)
                    yield f"{buffer} is out of date after the step: it lacks what {update} changes of layer {owner}"


def _changes(update: Task, buffer: Buffer) -> bool:
    """Whether the update changes all that it should in the buffer; of another shard's state it should nothing."""
    if buffer.kind is TensorKind.OPTIMIZER_STATE and update.shard != buffer.shard:
        return True
    return buffer.id in update.writes and update.shard == buffer.shard


def _owners(buffer: Buffer, layer: int, costs: Costs) -> list[int]:
    """Layers whose update changes this layer's part of the buffer: itself, and those that own its tied weights."""
    tied = costs.tied_owners(layer) if buffer.kind is TensorKind.WEIGHT else ()
    return [at for at in (*tied, layer) if costs.updates(at)]


def _by_layer(tasks: Iterable[Task]) -> dict[int, list[Task]]:
    found: dict[int, list[Task]] = {}
    for task in tasks:
        for layer in range(task.layer_first, task.layer_last + 1):
            found.setdefault(layer, []).append(task)
    return found
