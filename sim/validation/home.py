"""Faults in the use of home tensors: weights, buffers, gradients and optimizer state in the host store.

No buffer stands for them, so their order is checked here. A copy that names no host buffer is from or to the store; an
update on the host reads gradients and changes weights and optimizer state there; a reduction writes gradients there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from traces.costs import Costs

from ..plan import Policy
from ..schedule import Schedule, Task, TaskKind, TensorKind
from .happens_before import HappensBefore

_KINDS = (TensorKind.WEIGHT, TensorKind.BUFFER, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE)


class _Home(NamedTuple):
    """A layer's tensor in one copy of the store (of a GPU of its own, or shared: None); where a schedule has shards,
    one of them."""

    gpu: int | None
    kind: TensorKind
    layer: int
    shard: int | None


class _Access(NamedTuple):
    task: Task
    writes: bool


def home_faults(schedule: Schedule, surely: HappensBefore, costs: Costs | None) -> Iterator[str]:
    """Tasks that touch a home tensor at the same time as one that writes it, and gradients used before they are there.

    Which layers have gradients is known only with a trace.
    """
    accesses: dict[_Home, list[_Access]] = {}
    sharded = any(task.shard is not None for task in schedule.tasks)
    shards = range(schedule.plan.gpus) if sharded else (None,)
    for task in schedule.tasks:
        for home, writes in _touched(task, schedule.plan.policy, shards if task.shard is None else (task.shard,)):
            accesses.setdefault(home, []).append(_Access(task, writes))
    said: set[tuple[int, int]] = set()  # layers of a pack have the same faults; say them once
    for home, used in accesses.items():
        for other, task in _conflicts(used, surely):
            if (other.id, task.id) not in said:
                said.add((other.id, task.id))
                what = f"{home.kind.value} {home.layer} in the store"
                yield f"{other} and {task} may touch {what} at the same time, and one of them writes it"
        first, writes = used[0]
        if home.kind is TensorKind.GRADIENT and not writes and costs is not None and costs.updates(home.layer):
            yield f"{first} takes gradient {home.layer} from the store before anything has written it there"


def _touched(task: Task, policy: Policy, shards: Iterable[int | None]) -> Iterator[tuple[_Home, bool]]:
    """Home tensors that a task reads or, if the flag is set, writes."""
    match task.kind:
        case TaskKind.SWAP_IN if not task.reads:
            kinds = {task.tensor_kind: False}
        case TaskKind.SWAP_OUT if not task.writes:
            kinds = {task.tensor_kind: True}
        case TaskKind.UPDATE if task.gpu is None:
            kinds = {TensorKind.GRADIENT: False, TensorKind.WEIGHT: True, TensorKind.OPTIMIZER_STATE: True}
        case TaskKind.REDUCE:
            kinds = {TensorKind.GRADIENT: True}
        case _:
            return
    owner = task.gpu if policy.has_private_stores else None
    for kind, writes in kinds.items():
        if kind in _KINDS:
            for layer, shard in product(range(task.layer_first, task.layer_last + 1), shards):
                yield _Home(owner, kind, layer, shard), writes


def _conflicts(used: list[_Access], surely: HappensBefore) -> Iterator[tuple[Task, Task]]:
    """Pairs of a write and another access that no order keeps apart. ``used`` is in the total order."""
    writer: Task | None = None
    readers: list[Task] = []  # since then
    for task, writes in used:
        for other in [*([] if writer is None else [writer]), *(readers if writes else [])]:
            if not surely(other.id, task.id):
                yield other, task
        if writes:
            writer, readers = task, []
        else:
            readers.append(task)
