"""The artifact's events: which there are, what each takes, and which it waits for.

Every rank has six in-order streams. Events enter them in the order in which they are made: task by task, and inside a
task microbatch by microbatch. Waits that always hold are stated where an event is made; those that depend on prefetch
are in two functions of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .artifact_cases import ArtifactTask, Case, TaskType, artifact_tasks
from .artifact_profiles import Profile


class Stream(Enum):
    """An in-order queue of a rank."""

    SWAP_IN = "SwapIn"
    SWAP_OUT = "SwapOut"
    P2P_IN = "P2PIn"
    P2P_OUT = "P2POut"
    COMPUTE = "Compute"
    CPU = "CPU"


@dataclass(eq=False, slots=True)
class Event:
    """An entry of a stream. Copies have ``bytes`` and take as long as the link says; others last ``seconds``.

    ``to_rank`` is who gets a message. A copy between ranks is two events, each the ``partner`` of the other: they wait
    for all that either waits for, and start together.
    """

    task: ArtifactTask
    stream: Stream
    kind: str
    layers: tuple[int, int]
    number: int
    microbatch: int | None = None
    size: int | None = None
    bytes: int | None = None
    seconds: float | None = None
    to_rank: int | None = None
    partner: Event | None = None
    waits: list[Event] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.task.rank


@dataclass(eq=False)
class Step:
    """The events of one task, by microbatch where there are several.

    ``inputs`` are X, or sX where a backward begins from a stash; ``outputs`` Y or dX. ``left`` is the task before it
    on its rank.
    """

    task: ArtifactTask
    left: Step | None
    weights: Event = field(init=False)
    inputs: list[Event] = field(default_factory=list)
    gradients: list[Event] = field(default_factory=list)
    computes: list[list[Event]] = field(default_factory=list)
    stashes: list[dict[int, Event]] = field(default_factory=list)
    outputs: list[Event] = field(default_factory=list)
    allreduce: Event | None = None
    weight_gradients: Event | None = None
    freed: Event = field(init=False)


def artifact_events(case: Case, profile: Profile, *, prefetch: bool) -> list[Event]:
    """All events of the simulated ranks; those of each stream in its order."""
    making = _Making(case, profile, prefetch)
    for task in artifact_tasks(case):
        making.step(task)
    return making.events


class _Making:
    def __init__(self, case: Case, profile: Profile, prefetch: bool) -> None:
        self.events: list[Event] = []
        self._case, self._profile, self._prefetch = case, profile, prefetch
        self._steps: list[Step] = []
        self._last_on_rank: dict[int, Step] = {}
        self._messages: dict[tuple[int, int], Event] = {}  # by layer whose input it is, and backward microbatch
        self._backwards = {task.first: task for task in artifact_tasks(case) if task.type is not TaskType.F}

    def step(self, task: ArtifactTask) -> None:
        """Make all events of a task."""
        step = Step(task, self._last_on_rank.get(task.rank))
        input_before_weights = self._prefetch and step.left and (task.type is TaskType.B or not self._case.pipeline)
        if not input_before_weights:
            self._bring_weights(step)
        for i in range(len(task.microbatches)):
            self._bring_input(step, i)
            if task.type is TaskType.B and self._prefetch:
                self._bring_gradient(step, i)
            if input_before_weights and i == 0:
                self._bring_weights(step)
            if task.type is TaskType.F:
                self._forward(step, i)
            else:
                self._backward(step, i)
        if task.type is TaskType.F:
            step.freed = self._free(step)
        else:
            self._finish_backward(step)
        if self._prefetch:
            _wait_with_prefetch(step, self._case)
        else:
            _wait_without_prefetch(step, self._case)
        self._last_on_rank[task.rank] = step
        self._steps.append(step)

    def _bring_weights(self, step: Step) -> None:
        size = self._profile.state_bytes(step.task.first, step.task.last)
        step.weights = self._add(step.task, Stream.SWAP_IN, "WB", bytes=size)

    def _bring_input(self, step: Step, i: int) -> None:
        task = step.task
        kind = "sX" if task.type is TaskType.B else "X"
        if task.type is not TaskType.F and (message := self._messages.get((task.first, i))):
            event = self._copy(task, Stream.SWAP_IN, kind, task.first, i, [message])
        elif self._steps:
            before = self._steps[-1]
            source = before.outputs[before.task.completing(task.microbatches[i][1])]
            event = self._receive(task, kind, task.first, i, source)
        else:
            event = self._copy(task, Stream.SWAP_IN, kind, task.first, i, [])
        step.inputs.append(event)

    def _bring_gradient(self, step: Step, i: int) -> None:
        source = self._steps[-1].outputs[i]
        step.gradients.append(self._receive(step.task, "dY", step.task.last, i, source))

    def _forward(self, step: Step, i: int) -> None:
        task, u = step.task, step.task.size(i)
        parts: list[Event] = []
        step.computes.append(parts)
        step.stashes.append({})
        for first, last in task.parts:
            if first in task.stashes:
                source = parts[-1] if parts else step.inputs[i]
                stash = self._copy(task, Stream.SWAP_OUT, "sX", first, i, [source])
                self._send_messages(stash, first)
                step.stashes[i][first] = stash
            seconds = self._profile.seconds("FWD", first, last, u)
            parts.append(self._compute(step, "FWD", (first, last), i, seconds))
        self._wait_for_arrivals(step, i)
        by_message = self._case.loss_input_by_message and task.last + 1 == self._case.packs_bwd[-1][0]
        stream = Stream.P2P_OUT if self._case.pipeline and not by_message else Stream.SWAP_OUT
        output = self._copy(task, stream, "Y", task.last, i, [parts[-1]])
        step.outputs.append(output)
        if by_message:
            self._send_messages(output, task.last + 1)

    def _backward(self, step: Step, i: int) -> None:
        task, u = step.task, step.task.size(i)
        pack = (task.first, task.last)
        forward = self._profile.seconds("FWD", *pack, u)
        step.computes.append([self._compute(step, "REC", pack, i, forward)])
        self._wait_for_arrivals(step, i)
        if task.type is TaskType.B and not self._prefetch:
            self._bring_gradient(step, i)
        backward = self._compute(step, "BWD", pack, i, self._profile.seconds("BWD", *pack, u) - forward)
        backward.waits += step.gradients[i : i + 1]
        step.computes[i].append(backward)
        if task.first > 0:
            stream = Stream.P2P_OUT if self._case.pipeline else Stream.SWAP_OUT
            step.outputs.append(self._copy(task, stream, "dX", task.first, i, [backward]))

    def _wait_for_arrivals(self, step: Step, i: int) -> None:
        step.computes[i][0].waits += [step.inputs[i]] if i else [step.inputs[i], step.weights]

    def _finish_backward(self, step: Step) -> None:
        task, replicas = step.task, self._case.replicas
        size = self._profile.state_bytes(task.first, task.last)
        waits = [step.computes[-1][-1]]
        if replicas > 1:
            seconds = 2 * (replicas - 1) / replicas * size / self._case.constants.bw_p2p
            step.allreduce = self._add(task, Stream.COMPUTE, "ARD", bytes=size, seconds=seconds)
            waits.append(step.allreduce)
        step.weight_gradients = self._add(task, Stream.SWAP_OUT, "dWB", bytes=size, waits=waits)
        step.freed = self._free(step)
        step.freed.waits.append(step.weight_gradients)
        seconds = self._profile.update_seconds(task.first, task.last)
        update = self._add(task, Stream.CPU, "Update", seconds=seconds, waits=[step.weight_gradients])
        update.number = task.number + 1

    def _free(self, step: Step) -> Event:
        return self._add(step.task, Stream.COMPUTE, "DEL", seconds=self._case.constants.time_del)

    def _send_messages(self, source: Event, layer: int) -> None:
        """Hand over the input of ``layer`` to whoever goes back through it, by backward microbatch."""
        receiver = self._backwards[layer]
        bandwidth = self._case.constants.bw_msg / self._case.busy_ranks
        for j, (start, stop) in enumerate(receiver.microbatches):
            if source.task.completing(stop) == source.microbatch:
                size = self._profile.input_bytes(layer, stop - start)
                self._messages[layer, j] = self._add(
                    source.task,
                    Stream.CPU,
                    f"MSG{source.kind}",
                    layers=source.layers,
                    microbatch=j,
                    size=stop - start,
                    bytes=size,
                    seconds=0.0 if receiver.rank == source.rank else 2 * size / bandwidth,
                    to_rank=receiver.rank,
                    waits=[source],
                )

    def _receive(self, task: ArtifactTask, kind: str, layer: int, i: int, source: Event) -> Event:
        """What the task before has sent: from its rank, or through host memory."""
        if not self._case.pipeline:
            return self._copy(task, Stream.SWAP_IN, kind, layer, i, [source])
        event = self._copy(task, Stream.P2P_IN, kind, layer, i, [])
        event.partner, source.partner = source, event
        return event

    def _copy(self, task: ArtifactTask, stream: Stream, kind: str, layer: int, i: int, waits: list[Event]) -> Event:
        """What lies before ``layer``; Y and dY lie behind it."""
        u = task.size(i)
        size = self._profile.input_bytes(layer + 1 if kind in ("Y", "dY") else layer, u)
        return self._add(task, stream, kind, layers=(layer, layer), microbatch=i, size=u, bytes=size, waits=waits)

    def _compute(self, step: Step, kind: str, layers: tuple[int, int], i: int, seconds: float) -> Event:
        u = step.task.size(i)
        return self._add(step.task, Stream.COMPUTE, kind, layers=layers, microbatch=i, size=u, seconds=seconds)

    def _add(self, task: ArtifactTask, stream: Stream, kind: str, **fields: Any) -> Event:
        event = Event(task, stream, kind, **{"layers": (task.first, task.last), "number": task.number, **fields})
        self.events.append(event)
        return event


def _wait_without_prefetch(step: Step, case: Case) -> None:
    """One thing after the other."""
    if step.left:
        step.weights.waits.append(step.left.freed)
    step.inputs[0].waits.append(step.weights)
    for i, arriving in enumerate(step.inputs[1:]):
        sent = step.outputs[i : i + 1] if not case.pipeline else []
        arriving.waits += sent or [step.computes[i][-1]]
    for gradient, (recompute, _) in zip(step.gradients, step.computes, strict=False):
        gradient.waits.append(recompute)
    for parts, stashes in zip(step.computes, step.stashes, strict=False):
        for part in parts:
            if part.layers[0] in stashes:
                part.waits.append(stashes[part.layers[0]])
    last_output = step.outputs[-1:]
    if step.allreduce:
        step.allreduce.waits += last_output
    elif not case.pipeline:
        (step.weight_gradients or step.freed).waits += last_output


def _wait_with_prefetch(step: Step, case: Case) -> None:
    """Two buffers: what comes next arrives while the one before is computed on."""
    left = step.left
    previous = [events[-1] for events in step.computes]
    before_first: list[Event] = []
    if left:
        step.weights.waits.append(left.computes[-1][-1])
        if len(left.computes) > 1:
            before_first = [left.computes[-2][-1]]
        elif left.left:
            before_first = [left.left.freed]
    step.inputs[0].waits += before_first
    if left and len(step.inputs) > 1:
        step.inputs[1].waits.append(left.freed)
    for arriving, computed in zip(step.inputs[2:], previous, strict=False):
        arriving.waits.append(computed)
    if step.gradients:
        if left and (not case.pipeline or left.task.type is TaskType.B):
            step.gradients[0].waits.append(left.computes[-1][0])
        else:
            step.gradients[0].waits += before_first
        for gradient, (recompute, _) in zip(step.gradients[1:], step.computes, strict=False):
            gradient.waits.append(recompute)
    before_stash = [[left.freed] if left else [], *([computed] for computed in previous)]
    for waits, stashes in zip(before_stash, step.stashes, strict=False):
        if step.task.first in stashes:
            stashes[step.task.first].waits += waits
