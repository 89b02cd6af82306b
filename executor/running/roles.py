"""What each buffer is to a forward or backward task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sim.schedule import Buffer, Interval, Task, TensorKind

_INPUTS = (TensorKind.DATA, TensorKind.STASH, TensorKind.ACTIVATION)
_OUTPUTS = (TensorKind.STASH, TensorKind.ACTIVATION)


@dataclass(frozen=True)
class Roles:
    """What each buffer of a forward or backward task is to it (ids)."""

    weights: Mapping[int, int]  # by layer
    buffers: int | None
    inputs: tuple[int, ...]  # x of the first layer; the labels, if the last layer is the loss
    incoming: int | None
    gradient: int | None
    outgoing: int | None
    outputs: dict[int, list[int]]  # where x(l) goes, by l
    saved: int | None  # what autograd saved in a forward that its backward does not repeat
    workspace_bytes: int
    held_bytes: int  # of that, what the task leaves for a later one
    layers: range
    samples: Interval


def find_roles(task: Task, buffers: Sequence[Buffer], loss_layer: int) -> Roles:
    """The roles of the task's buffers, by what they hold."""
    layers, samples = range(task.layer_first, task.layer_last + 1), task.samples
    assert samples is not None
    outputs: dict[int, list[int]] = {}
    for number in task.writes:
        if buffers[number].kind in _OUTPUTS and not buffers[number].is_saved:
            outputs.setdefault(buffers[number].layer_first, []).append(number)

    def find(numbers: Sequence[int], kinds: Sequence[TensorKind], layer: int | None = None) -> int | None:
        """The first buffer of one of these kinds (of x or g of this layer)."""
        of_kind = [n for n in numbers if buffers[n].kind in kinds and not buffers[n].is_saved]
        return next((n for n in of_kind if layer is None or buffers[n].layer_first == layer), None)

    inputs = [find(task.reads, _INPUTS, layers[0])]
    if layers[-1] == loss_layer:
        inputs.append(find(task.reads, (TensorKind.DATA,), layers[-1] + 1))
    workspaces = [number for number in task.writes if buffers[number].kind is TensorKind.WORKSPACE]
    return Roles(
        weights=read_by_layer(task, buffers, TensorKind.WEIGHT),
        buffers=find(task.reads, (TensorKind.BUFFER,)),
        inputs=tuple([number for number in inputs if number is not None]),
        incoming=find(task.reads, (TensorKind.ACTIVATION_GRADIENT,), layers[-1] + 1),
        gradient=find(task.writes, (TensorKind.GRADIENT,)),
        outgoing=find(task.writes, (TensorKind.ACTIVATION_GRADIENT,), layers[0]),
        outputs=outputs,
        saved=next((number for number in (*task.reads, *task.writes) if buffers[number].is_saved), None),
        workspace_bytes=sum(buffers[n].bytes for n in workspaces),
        held_bytes=sum(buffers[n].bytes for n in workspaces if n not in task.frees),
        layers=layers,
        samples=samples,
    )


def read_by_layer(task: Task, buffers: Sequence[Buffer], kind: TensorKind) -> dict[int, int]:
    """By layer, the buffer of this kind that the task reads it from."""
    found: dict[int, int] = {}
    for number in task.reads:
        buffer = buffers[number]
        if buffer.kind is kind:
            found.update(dict.fromkeys(range(buffer.layer_first, buffer.layer_last + 1), number))
    return found
