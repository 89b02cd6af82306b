"""Faults in bytes: buffers and copies whose sizes are not what the trace says."""

from __future__ import annotations

from collections.abc import Iterator

from traces.costs import Costs

from ..schedule import Buffer, Schedule, Task, TaskKind, TensorKind
from ..shards import Shards


def byte_faults(schedule: Schedule, costs: Costs) -> Iterator[str]:
    """Buffers, copies and reserved workspaces that disagree with the trace."""
    shards = Shards(costs, schedule.plan.gpus)
    for buffer in schedule.buffers:
        expected = _tensor_bytes(buffer.kind, buffer, costs, shards)
        if expected is not None and buffer.bytes != expected:
            yield f"{buffer} has {buffer.bytes} B, the trace says {expected} B"
    for task in schedule.tasks:
        expected = _copy_bytes(task, costs, shards)
        if expected is not None and task.bytes != expected:
            yield f"{task} copies {task.bytes} B, the trace says {expected} B"
        yield from _workspace_faults(schedule, task, costs)


def _copy_bytes(task: Task, costs: Costs, shards: Shards) -> int | None:
    if not task.kind.is_copy or task.tensor_kind is None:
        return None
    size = _tensor_bytes(task.tensor_kind, task, costs, shards)
    if not task.kind.is_collective or size is None:
        return size
    passes = 2 if task.kind is TaskKind.ALLREDUCE else 1
    return passes * (shards.gpus - 1) * size


def _tensor_bytes(kind: TensorKind, tensor: Buffer | Task, costs: Costs, shards: Shards) -> int | None:
    """Bytes of a tensor, or of what a copy moves of it; None where the trace does not say."""
    first, last = tensor.layer_first, min(tensor.layer_last, costs.layer_count - 1)
    u = tensor.samples[1] - tensor.samples[0] if tensor.samples else 0
    match kind:
        case TensorKind.WEIGHT | TensorKind.BUFFER | TensorKind.GRADIENT | TensorKind.OPTIMIZER_STATE:
            return shards.bytes(kind, (first, last), tensor.shard)
        case TensorKind.STASH if tensor.is_saved:
            return costs.remainder_bytes(first, u) if u else 0
        case TensorKind.STASH | TensorKind.ACTIVATION | TensorKind.DATA:
            if not u:
                return 0
            return costs.label_bytes(u) if tensor.layer_first == costs.layer_count else costs.input_bytes(first, u)
        case TensorKind.ACTIVATION_GRADIENT:
            return costs.input_gradient_bytes(first, u) if u else 0
        case TensorKind.WORKSPACE:
            return None


def _workspace_faults(schedule: Schedule, task: Task, costs: Costs) -> Iterator[str]:
    """A forward or backward must hold its layers' peak as workspace; it may hold more."""
    first, last, u = task.layer_first, task.layer_last, task.batch_size
    match task.kind:
        case TaskKind.FORWARD | TaskKind.RECOMPUTE:
            needed = costs.forward_workspace_bytes(first, last, u)
        case TaskKind.BACKWARD if not task.recompute:
            needed = costs.unrecomputed_workspace_bytes(first, u)
        case TaskKind.BACKWARD:
            needed = costs.backward_workspace_bytes(first, last, u)
        case TaskKind.BACKWARD_INPUT | TaskKind.BACKWARD_WEIGHT:
            needed = costs.held_bytes(first, last, u) + costs.parts_workspace_bytes(first, last, u)
        case _:
            return
    touched = (schedule.buffers[number] for number in dict.fromkeys(task.reads + task.writes))
    held = sum(buffer.bytes for buffer in touched if buffer.kind is TensorKind.WORKSPACE)
    if held < needed:
        yield f"{task} has {held} B of workspace, the trace says {needed} B"
