"""Home tensors: weights, buffers, gradients and optimizer state in the host store: their bytes, and which tasks touch
them.

No buffer of a schedule stands for them. A copy that names no host buffer is from or to the store; an update on the host
reads gradients and changes weights and optimizer state there; a reduction writes gradients there, a norm reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

from traces.costs import Costs

from .schedule import Schedule, Task, TaskKind, TensorKind

T = TypeVar("T")

_KINDS = (TensorKind.WEIGHT, TensorKind.BUFFER, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE)


class HomeTensor(NamedTuple):
    """A layer's tensor in one copy of the store (of a GPU of its own, or shared: None); where a schedule has shards,
    one of them."""

    gpu: int | None
    kind: TensorKind
    layer: int
    shard: int | None


class Access(NamedTuple):
    """A task's use of a home tensor."""

    task: Task
    writes: bool


class Ties:
    """Layers that share weights. ``users``: by the layer that owns some, the other layers that use them.

    A shared weight lies with its owner, where the others read it too; and the owner's update reads their gradients.
    """

    def __init__(self, users: Mapping[int, Sequence[int]]) -> None:
        self.users = {owner: tuple(layers) for owner, layers in users.items() if layers}
        self.owners: dict[int, tuple[int, ...]] = {}
        for owner, layers in self.users.items():
            for layer in layers:
                self.owners[layer] = (*self.owners.get(layer, ()), owner)


NO_TIES = Ties({})


def tied_layers(costs: Costs) -> Ties:
    """The layers of a trace that share weights."""
    return Ties({layer: costs.tied_partners(layer) for layer in range(costs.layer_count)})


def home_bytes(costs: Costs, kind: TensorKind, run: tuple[int, int]) -> int:
    """Bytes of a run of layers of a tensor that has its home in the host store."""
    match kind:
        case TensorKind.WEIGHT:
            return costs.weight_bytes(*run)
        case TensorKind.BUFFER:
            return costs.buffer_bytes(*run)
        case TensorKind.GRADIENT:
            return costs.gradient_bytes(*run)
        case TensorKind.OPTIMIZER_STATE:
            return costs.optimizer_state_bytes(*run)
        case _:
            raise AssertionError(f"{kind.value} has no home")


def home_accesses(schedule: Schedule, ties: Ties) -> dict[HomeTensor, list[Access]]:
    """Who touches each home tensor, in the total order."""
    accesses: dict[HomeTensor, list[Access]] = {}
    sharded = any(task.shard is not None for task in schedule.tasks)
    shards = range(schedule.plan.gpus) if sharded else (None,)
    for task in schedule.tasks:
        owner = task.gpu if schedule.plan.policy.has_private_stores else None
        for kind, layer, writes in _touched(task, ties):
            for shard in shards if task.shard is None else (task.shard,):
                accesses.setdefault(HomeTensor(owner, kind, layer, shard), []).append(Access(task, writes))
    return accesses


def _touched(task: Task, ties: Ties) -> Iterator[tuple[TensorKind, int, bool]]:
    """Kind and layer of the home tensors that a task reads or, if the flag is set, writes."""
    match task.kind:
        case TaskKind.SWAP_IN if not task.reads:
            kinds = {task.tensor_kind: False}
        case TaskKind.SWAP_OUT if not task.writes:
            kinds = {task.tensor_kind: True}
        case TaskKind.UPDATE if task.gpu is None:
            kinds = {TensorKind.GRADIENT: False, TensorKind.WEIGHT: True, TensorKind.OPTIMIZER_STATE: True}
        case TaskKind.REDUCE:
            kinds = {TensorKind.GRADIENT: True}
        case TaskKind.NORM:
            kinds = {TensorKind.GRADIENT: False}
        case _:
            return
    layers = range(task.layer_first, task.layer_last + 1)
    for kind, writes in kinds.items():
        if kind not in _KINDS:
            continue
        for layer in layers:
            yield kind, layer, writes
            others: tuple[int, ...] = ()
            if kind is TensorKind.WEIGHT and not writes:
                others = ties.owners.get(layer, ())
            elif kind is TensorKind.GRADIENT and task.kind is TaskKind.UPDATE:
                others = ties.users.get(layer, ())
            for other in others:
                if other not in layers:
                    yield kind, other, False


def in_conflict(used: Iterable[tuple[T, bool]]) -> Iterator[tuple[T, T]]:
    """Pairs of a write and another access whose order counts, each in order. ``used``: who touches one tensor, in
    order, and whether it writes. If these pairs keep their order, all others do."""
    writer: list[T] = []
    readers: list[T] = []  # since then
    for user, writes in used:
        for other in [*writer, *(readers if writes else [])]:
            yield other, user
        if writes:
            writer, readers = [user], []
        else:
            readers.append(user)
