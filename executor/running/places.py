"""Where every tensor of a step is: on the GPUs, in host buffers, at home in the host store, in the minibatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from sim.schedule import Buffer, Schedule, TaskKind, TensorKind

from ..devices.facade import Devices
from ..errors import NeverFreed
from ..models.layers import LayerModel
from .arena import Arena, Block
from .layout import Layouts, SlotKey
from .passing import Record, Records
from .shards import ShardLayouts
from .store import Home, Minibatch


class Places:
    """Memory of a run. Lanes allocate and free as their tasks say; several at once."""

    def __init__(
        self, schedule: Schedule, model: LayerModel, layouts: Layouts, shards: ShardLayouts, devices: Devices
    ) -> None:
        self.buffers: Sequence[Buffer] = schedule.buffers
        self.layouts = layouts
        self.shards = shards
        self.records = Records(model)
        self._model, self._devices = model, devices
        self._reserved = _reserved(schedule)
        self._arenas = [
            Arena(gpu, schedule.buffers, cap, partial(devices.gpu_bytes, gpu), self._reserved)
            for gpu, cap in enumerate(schedule.memory.gpu_cap_bytes)
        ]
        self._host: dict[int, Block] = {}
        self.shares_home = not schedule.plan.policy.has_private_stores
        copies = 1 if self.shares_home else schedule.plan.gpus
        self.homes = [Home(model, layouts, devices.host_bytes, is_the_models=replica == 0) for replica in range(copies)]
        self.new_minibatch = partial(
            Minibatch, schedule.plan.minibatch, schedule.layers, _sample_bytes(schedule), devices.host_bytes
        )
        self.minibatch = self.new_minibatch()

    def home(self, gpu: int | None) -> Home:
        """The home that a GPU's copies come from and go to (None: what the host itself works on)."""
        return self.homes[self.replica(gpu)]

    def replica(self, gpu: int | None) -> int:
        """Which home that is."""
        return 0 if self.shares_home or gpu is None else gpu

    def changing_buffers(self) -> list[Tensor]:
        """The bytes, in every home, of module buffers that forwards change."""
        changing = [index for index, layer in enumerate(self._model.layers) if layer.changes_buffers]
        return [piece for home in self.homes for layer in changing for piece in home.write(TensorKind.BUFFER, layer)]

    def copy_home(self) -> None:
        """Give every home the weights and buffers of the model's own."""
        for kind in (TensorKind.WEIGHT, TensorKind.BUFFER):
            for target, source in self._beside_own(kind, self.homes[1:]):
                target.copy_(source)

    def homes_agree(self) -> bool:
        """Whether the other homes have the weights of the model's own (they agree with each other)."""
        return all(torch.equal(*pair) for pair in self._beside_own(TensorKind.WEIGHT, self.homes[1:2]))

    def _beside_own(self, kind: TensorKind, homes: Sequence[Home]) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of some homes, and those of the model's own home that correspond."""
        for home in homes:
            for layer in range(len(self._model)):
                yield from zip(home.read(kind, layer), self.homes[0].read(kind, layer), strict=True)

    def allocate(self, number: int) -> int:
        """Take a buffer's memory; its bytes. Raises OutOfArena where the schedule breaks its own plan."""
        buffer = self.buffers[number]
        if buffer.gpu is None:
            self._host[number] = Block(self._devices.host_bytes(buffer.bytes))
            return buffer.bytes
        return self._arenas[buffer.gpu].allocate(buffer)

    def free(self, number: int) -> int:
        """Give a buffer's memory back; its bytes."""
        buffer = self.buffers[number]
        if buffer.gpu is None:
            return self._host.pop(number).bytes.nbytes
        return self._arenas[buffer.gpu].free(buffer)

    def block(self, number: int) -> Block:
        """The memory of a buffer that is held."""
        buffer = self.buffers[number]
        return self._host[number] if buffer.gpu is None else self._arenas[buffer.gpu].block(buffer)

    def is_reserved(self, number: int) -> bool:
        """Whether a buffer of a GPU is a reservation, for what autograd allocates itself."""
        return number in self._reserved

    def check_empty(self) -> None:
        """After a step nothing may be left, neither on the GPUs nor in the host. Raises NeverFreed."""
        left = sorted([*self._host, *(number for arena in self._arenas for number in arena.held())])
        if left:
            raise NeverFreed(tuple(str(self.buffers[number]) for number in left))

    def record(self, buffer: Buffer) -> Record:
        """What lies in a buffer that is cut by samples."""
        if buffer.kind is TensorKind.DATA:
            return self.minibatch.record(buffer.layer_first)
        return self.records.of(buffer)

    def state_views(self, number: int, layer: int) -> dict[SlotKey, Tensor]:
        """A layer's tensors in a buffer of state; trained weights as leaves of autograd."""
        block, buffer = self.block(number), self.buffers[number]
        views: dict[SlotKey, Tensor] | None = block.views.get(layer)
        if views is None:
            layout = self.layouts[buffer.kind]
            views = block.views[layer] = layout.views(block.bytes, buffer.layer_first, layer)
            if buffer.kind is TensorKind.WEIGHT:
                for name in self._model.layers[layer].trainable:
                    views[name, ""].requires_grad_()
        return views

    def clear(self) -> None:
        """Forget all buffers, after a step that was given up."""
        self._host.clear()
        for arena in self._arenas:
            arena.clear()


def _reserved(schedule: Schedule) -> frozenset[int]:
    """Workspaces, and counted buffers of what autograd saved that no task copies elsewhere."""
    calculations = {TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD}
    moved = {
        number for task in schedule.tasks if task.kind not in calculations for number in (*task.reads, *task.writes)
    }
    return frozenset(
        buffer.id
        for buffer in schedule.buffers
        if buffer.kind is TensorKind.WORKSPACE or (buffer.is_saved and buffer.offset is None and buffer.id not in moved)
    )


def _sample_bytes(schedule: Schedule) -> dict[int, int]:
    """Size of a sample of the minibatch's data, by layer."""
    return {
        buffer.layer_first: buffer.bytes // (buffer.samples[1] - buffer.samples[0])
        for buffer in schedule.buffers
        if buffer.kind is TensorKind.DATA and buffer.samples is not None
    }
