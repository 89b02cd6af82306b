"""Faults in shards: tasks that take a part of a tensor for the whole, or for another part."""

from __future__ import annotations

from collections.abc import Iterator

from ..schedule import Buffer, Schedule, Task, TaskKind


def shard_faults(schedule: Schedule) -> Iterator[str]:
    """Uses of buffers that hold another shard than the task is of. Whole buffers serve any shard, but only collectives
    make whole tensors of shards, or shards of whole ones."""
    for task in schedule.tasks:
        buffers = [schedule.buffers[number] for number in dict.fromkeys(task.reads + task.writes)]
        match task.kind:
            case TaskKind.ALL_GATHER:
                yield from _part_faults(task, buffers, "reads", task.reads)
            case TaskKind.REDUCE_SCATTER:
                yield from _part_faults(task, buffers, "writes", task.writes)
            case _:
                for buffer in buffers:
                    if buffer.shard is not None and buffer.shard != task.shard:
                        yield f"{task} uses {buffer}, which holds just shard {buffer.shard} of it"


def _part_faults(task: Task, buffers: list[Buffer], verb: str, ids: tuple[int, ...]) -> Iterator[str]:
    """Of a collective, each GPU has its shard on one side, and whole tensors are on the other."""
    for buffer in buffers:
        if buffer.id in ids and buffer.shard != buffer.gpu:
            yield f"{task} {verb} {buffer}, which is not the shard of its gpu"
        if buffer.id not in ids and buffer.shard is not None:
            yield f"{task} uses {buffer}, which holds just shard {buffer.shard} of it"
