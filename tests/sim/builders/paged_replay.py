"""Plays a paged schedule with random timings and follows what every buffer and home tensor holds.

Nothing here is taken from the code under test: it knows only what forward, backward and update mean, and it moves the
contents of tensors as the tasks say.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from sim.plan import PagedPlan, Policy
from sim.schedule import Schedule, Task, TaskKind, TensorKind
from traces.schema import Trace

Name = tuple[TensorKind | Literal["saved"], int]
"""What a task uses, and of which layer."""

Place = tuple[Any, ...]
"""A buffer, ``("buffer", id)``, or a home tensor, ``("home", gpu, kind, layer or tied group, samples)``."""


@dataclass
class Replay:
    """The state while the tasks are played. ``holds``: the contents of every place that has any."""

    schedule: Schedule
    trace: Trace
    holds: dict[Place, Any] = field(default_factory=dict)
    held_bytes: Counter[int | None] = field(default_factory=Counter)
    peak_bytes: Counter[int | None] = field(default_factory=Counter)
    readers: Counter[Place] = field(default_factory=Counter)
    writers: Counter[Place] = field(default_factory=Counter)
    live: set[int] = field(default_factory=set)
    died: set[int] = field(default_factory=set)

    def run(self, seed: int) -> None:
        """Play all tasks; each lasts at random. Contents are taken at its start and there at its end."""
        draw = random.Random(seed)
        ends: list[int] = []
        moments: list[tuple[int, int, int]] = []  # time, 0 for an end, task
        for task, before in zip(self.schedule.tasks, self.schedule.predecessors, strict=True):
            start = max((ends[earlier] for earlier in before), default=0)
            ends.append(start + draw.choice((1, 2, 5, 40)))
            moments += [(start, 1, task.id), (ends[-1], 0, task.id)]
        results: dict[int, dict[Place, Any]] = {}
        for _, is_start, number in sorted(moments):
            task = self.schedule.tasks[number]
            if is_start:
                results[number] = self.start(task)
            else:
                self.end(task, results[number])

    def start(self, task: Task) -> dict[Place, Any]:
        for number in task.allocates:
            buffer = self.schedule.buffers[number]
            assert number not in self.live | self.died
            self.live.add(number)
            self.held_bytes[buffer.gpu] += buffer.bytes
            self.peak_bytes[buffer.gpu] = max(self.peak_bytes[buffer.gpu], self.held_bytes[buffer.gpu])
        reads, writes = self.places(task)
        for place in reads:
            assert not self.writers[place], f"{task} reads {place} while it is written"
            self.readers[place] += 1
        for place in writes:
            others = self.readers[place] - (place in reads)
            assert not others, f"{task} writes {place} while it is read"
            assert not self.writers[place], f"{task} writes {place} while it is written"
            self.writers[place] += 1
        return self.result(task)

    def end(self, task: Task, result: dict[Place, Any]) -> None:
        reads, writes = self.places(task)
        self.readers.subtract(reads)
        self.writers.subtract(writes)
        self.holds.update(result)
        for number in task.frees:
            self.live.remove(number)
            self.died.add(number)
            self.holds.pop(("buffer", number), None)
            self.held_bytes[self.schedule.buffers[number].gpu] -= self.schedule.buffers[number].bytes

    def owner(self, task: Task) -> int | None:
        """Whose store the task's home tensors are in: its GPU's own, or (None) the one of all."""
        return task.gpu if self.schedule.plan.policy is Policy.DP_SWAP else None

    def places(self, task: Task) -> tuple[set[Place], set[Place]]:
        """Everything a task reads and writes, home tensors too."""
        assert set(task.reads + task.writes) <= self.live
        reads: set[Place] = {("buffer", number) for number in task.reads}
        writes: set[Place] = {("buffer", number) for number in task.writes}
        if task.kind is TaskKind.SWAP_IN and not task.reads:
            reads |= self.homes(task)
        if task.kind is TaskKind.SWAP_OUT and not task.writes:
            writes |= self.homes(task)
        return reads, writes

    def homes(self, task: Task) -> set[Place]:
        """The home tensors that a swap copies. A tied weight is one tensor per store."""
        owner, layer, kind = self.owner(task), task.layer_first, task.tensor_kind
        if kind is not TensorKind.WEIGHT or layer == len(self.trace.layers):
            return {("home", owner, kind, layer, task.samples)}
        tied = {("home", owner, kind, each.group, None) for each in self.trace.layers[layer].tied}
        return {("home", owner, kind, layer, None)} | tied

    def result(self, task: Task) -> dict[Place, Any]:
        """What a task leaves where, from what it reads now. Checks that it is what the task should find."""
        match task.kind:
            case TaskKind.SWAP_IN:
                if task.reads:
                    return {("buffer", task.writes[0]): self.holds["buffer", task.reads[0]]}
                return {("buffer", task.writes[0]): {home: self.holds.get(home, 0) for home in self.homes(task)}}
            case TaskKind.SWAP_OUT:
                contents = self.holds["buffer", task.reads[0]]
                return {("buffer", task.writes[0]): contents} if task.writes else dict(contents)
            case TaskKind.P2P:
                return self.pass_on(task)
            case TaskKind.FORWARD:
                return self.forward(task)
            case TaskKind.BACKWARD:
                return self.backward(task)
            case TaskKind.ALLREDUCE:
                return self.all_reduce(task)
            case TaskKind.UPDATE:
                return self.update(task)
        raise AssertionError(f"{task} has no place in a paged schedule")

    def pass_on(self, task: Task) -> dict[Place, Any]:
        """The same tensor on another GPU; what it sends as an activation it receives as the stash of its first
        layer."""
        (read,), (write,) = task.reads, task.writes
        sent, received = self.schedule.buffers[read], self.schedule.buffers[write]
        assert (sent.gpu, received.gpu) == (task.gpu, task.peer)
        assert (sent.layer_first, sent.samples, sent.bytes) == (received.layer_first, received.samples, received.bytes)
        kinds = {TensorKind.ACTIVATION: TensorKind.STASH}
        assert received.kind is kinds.get(sent.kind, sent.kind)
        return {("buffer", write): self.holds["buffer", read]}

    def by_name(self, numbers: tuple[int, ...]) -> dict[Name, int]:
        found: dict[Name, int] = {}
        for number in numbers:
            buffer = self.schedule.buffers[number]
            name = "saved" if buffer.is_saved else buffer.kind
            assert (name, buffer.layer_first) not in found
            found[name, buffer.layer_first] = number
        return found

    def forward(self, task: Task) -> dict[Place, Any]:
        layer, last = task.layer_first, len(self.trace.layers) - 1
        reads, writes = self.by_name(task.reads), self.by_name(task.writes)
        self.expect_inputs(task, reads)
        result: dict[Place, Any] = {}
        if self.trace.layers[layer].changes_buffers and self.trace.layers[layer].buffer_bytes:
            number = writes.pop((TensorKind.BUFFER, layer))
            ((home, count),) = self.holds["buffer", number].items()
            result["buffer", number] = {home: count + 1}
        writes.pop((TensorKind.WORKSPACE, layer))
        if layer < last:
            kind = TensorKind.ACTIVATION if (TensorKind.ACTIVATION, layer + 1) in writes else TensorKind.STASH
            result["buffer", writes.pop((kind, layer + 1))] = ("x", layer + 1, task.samples)
        if not self.recomputes:
            result["buffer", writes.pop(("saved", layer))] = ("saved", layer, task.samples)
        assert not writes
        return result

    @property
    def recomputes(self) -> bool:
        assert isinstance(self.schedule.plan, PagedPlan)
        return self.schedule.plan.recompute

    def backward(self, task: Task) -> dict[Place, Any]:
        layer, last = task.layer_first, len(self.trace.layers) - 1
        reads, writes = self.by_name(task.reads), self.by_name(task.writes)
        accumulated = reads.pop((TensorKind.GRADIENT, layer), None)
        incoming = reads.pop((TensorKind.ACTIVATION_GRADIENT, layer + 1), None)
        if incoming is not None:
            assert self.holds["buffer", incoming] == ("g", layer + 1, task.samples)
        assert (incoming is not None) is (layer < last)
        assert task.recompute is self.recomputes
        if not task.recompute:
            assert self.holds["buffer", reads.pop(("saved", layer))] == ("saved", layer, task.samples)
        self.expect_inputs(task, reads)
        writes.pop((TensorKind.WORKSPACE, layer))
        result: dict[Place, Any] = {}
        if layer > 0:
            result["buffer", writes.pop((TensorKind.ACTIVATION_GRADIENT, layer))] = ("g", layer, task.samples)
        if self.trace.layers[layer].gradient_bytes:
            number = writes.pop((TensorKind.GRADIENT, layer))
            home = ("home", self.owner(task), TensorKind.GRADIENT, layer, None)
            before = self.holds["buffer", number][home] if accumulated is not None else ()
            assert accumulated in (None, number)
            result["buffer", number] = {home: (*before, task.samples)}
        assert not writes
        return result

    def expect_inputs(self, task: Task, reads: dict[Name, int]) -> None:
        """Weights as they were before the step, the layer's buffers, its input and, for the loss, the labels."""
        layer, row = task.layer_first, self.trace.layers[task.layer_first]
        expected: set[Name] = {(TensorKind.DATA if layer == 0 else TensorKind.STASH, layer)}
        if row.weight_bytes:
            expected.add((TensorKind.WEIGHT, layer))
            assert set(self.holds["buffer", reads[TensorKind.WEIGHT, layer]].values()) == {0}
        if row.buffer_bytes:
            expected.add((TensorKind.BUFFER, layer))
        if layer == len(self.trace.layers) - 1:
            expected.add((TensorKind.DATA, layer + 1))
        assert set(reads) == expected
        if layer > 0:
            assert self.holds["buffer", reads[TensorKind.STASH, layer]] == ("x", layer, task.samples)
        for (kind, of_layer), number in reads.items():
            if kind is TensorKind.DATA:
                assert self.holds["buffer", number] == {("home", self.owner(task), kind, of_layer, task.samples): 0}

    def all_reduce(self, task: Task) -> dict[Place, Any]:
        assert task.reads == task.writes
        assert [self.schedule.buffers[number].gpu for number in task.reads] == list(range(self.schedule.plan.gpus))
        total: tuple[Any, ...] = ()
        for number in task.reads:
            (part,) = self.holds["buffer", number].values()
            total += part
        return {("buffer", number): dict.fromkeys(self.holds["buffer", number], total) for number in task.reads}

    def update(self, task: Task) -> dict[Place, Any]:
        """Takes whole gradients of every user of the weights that the layer owns; weights and state become new."""
        layer = task.layer_first
        reads, writes = self.by_name(task.reads), self.by_name(task.writes)
        groups = self.trace.tied_groups
        owned = [name for name, members in groups.items() if members[0] == layer]
        users = {layer, *(user for name in owned for user in groups[name])}
        assert {of for kind, of in reads if kind is TensorKind.GRADIENT} == users
        for user in users:
            (parts,) = self.holds["buffer", reads[TensorKind.GRADIENT, user]].values()
            assert sorted(parts) == sorted(self.all_microbatches())
        result: dict[Place, Any] = {}
        weight = self.holds["buffer", writes[TensorKind.WEIGHT, layer]]
        for home, version in weight.items():
            is_owned = home[3] == layer or home[3] in owned
            assert version == (0 if is_owned else 1), f"{task} finds version {version} of {home}"
        result["buffer", writes[TensorKind.WEIGHT, layer]] = dict.fromkeys(weight, 1)
        state = writes[TensorKind.OPTIMIZER_STATE, layer]
        result["buffer", state] = dict.fromkeys(self.holds["buffer", state], 1)
        return result

    def all_microbatches(self) -> list[Any]:
        return [task.samples for task in self.schedule.tasks if task.kind is TaskKind.FORWARD and task.layer_first == 0]
