"""The host store: the home of all state, in the layout in which schedules move it.

Harmony plans share one home. Baselines have one per GPU, as separate virtual memories would; the first GPU's is the
model's own. In the model's own home its parameters and buffers *are* views of the store, so the model is always as
current as the last copy that came home. A parameter that several layers use lies in the block of the first of them;
the others read it there, and what they would write goes nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sim.schedule import Interval, TensorKind

from ..errors import DifferentModel, ModelError
from ..models.inputs import Inputs
from ..models.layers import LayerModel
from .layout import Layouts, SlotKey, typed
from .passing import Record

Allocate = Callable[[int], Tensor]
"""bytes → uint8 tensor in host memory."""


class Home:
    """One home of a model's state. With ``is_the_models`` the model's own tensors move into it, else copies do.

    Raises ModelError for a model that is not in host memory.
    """

    def __init__(self, model: LayerModel, layouts: Layouts, allocate: Allocate, *, is_the_models: bool) -> None:
        self._layouts, self._allocate = layouts, allocate
        self._reads: dict[tuple[TensorKind, int], list[Tensor]] = {}
        self._writes: dict[tuple[TensorKind, int], list[Tensor]] = {}
        self._views: dict[tuple[TensorKind, int], dict[SlotKey, Tensor]] = {}
        self._nowhere = torch.empty(0, dtype=torch.uint8)
        _check_in_host_memory(model)
        parameters = [{name: p.tensor for name, p in layer.parameters.items()} for layer in model.layers]
        buffers = [{name: b.tensor for name, b in layer.buffers.items()} for layer in model.layers]
        self._house(TensorKind.WEIGHT, parameters, move=is_the_models)
        self._house(TensorKind.BUFFER, buffers, move=is_the_models)
        for kind in (TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE):
            for layer, size in enumerate(layouts[kind].bytes):
                block = allocate(size).zero_()  # copies may read it before anything is written
                self._reads[kind, layer] = self._writes[kind, layer] = [block]

    def read(self, kind: TensorKind, layer: int) -> list[Tensor]:
        """The bytes of a layer's block, as pieces (uint8) in order."""
        return self._reads[kind, layer]

    def write(self, kind: TensorKind, layer: int) -> list[Tensor]:
        """Where the bytes of a layer's block go, as pieces in order; what another layer owns stays as it is."""
        return self._writes[kind, layer]

    def views(self, kind: TensorKind, layer: int) -> dict[SlotKey, Tensor]:
        """A layer's gradients or optimizer state, typed."""
        views = self._views.get((kind, layer))
        if views is None:
            (block,) = self._reads[kind, layer]
            views = self._views[kind, layer] = self._layouts[kind].views(block, layer, layer)
        return views

    def _house(self, kind: TensorKind, tensors: Sequence[Mapping[str, Tensor]], *, move: bool) -> None:
        """Give each tensor its place in the block of the first layer that uses it."""
        owned: dict[int, Tensor] = {}
        for layer, (slots, by_name) in enumerate(zip(self._layouts[kind].layers, tensors, strict=True)):
            new = [slot for slot in slots if id(by_name[slot.name]) not in owned]
            block = self._allocate(sum(slot.bytes for slot in new))
            reads: list[tuple[Tensor, int, int]] = []  # block, start, stop
            writes: list[tuple[Tensor, int, int]] = []
            used = 0
            for slot in slots:
                tensor = by_name[slot.name]
                if id(tensor) in owned:
                    reads.append((owned[id(tensor)], 0, slot.bytes))
                    writes.append((self._sink(slot.bytes), 0, slot.bytes))
                    continue
                part = (block, used, used + slot.bytes)
                used += slot.bytes
                owned[id(tensor)] = block[part[1] : part[2]]
                reads.append(part)
                writes.append(part)
                view = typed(owned[id(tensor)], slot.dtype, slot.shape)
                view.copy_(tensor.detach())
                if move:
                    tensor.data = view
            self._reads[kind, layer], self._writes[kind, layer] = _joined(reads), _joined(writes)

    def _sink(self, size: int) -> Tensor:
        """Memory that nobody reads."""
        if len(self._nowhere) < size:
            self._nowhere = self._allocate(size)
        return self._nowhere


def _joined(parts: Sequence[tuple[Tensor, int, int]]) -> list[Tensor]:
    """Parts of blocks as slices, neighbours as one."""
    runs: list[tuple[Tensor, int, int]] = []
    for block, start, stop in parts:
        if runs and runs[-1][0] is block and runs[-1][2] == start:
            runs[-1] = (block, runs[-1][1], stop)
        else:
            runs.append((block, start, stop))
    return [block[start:stop] for block, start, stop in runs if stop > start]


def _check_in_host_memory(model: LayerModel) -> None:
    for layer in model.layers:
        parameters = [(p.qualified, p.tensor) for p in layer.parameters.values()]
        buffers = [(b.qualified, b.tensor) for b in layer.buffers.values()]
        for name, tensor in parameters + buffers:
            if tensor.device.type != "cpu":
                raise ModelError(
                    f"{name} is on {tensor.device}; a run keeps all state in host memory and moves it by itself: "
                    "give it the model on the CPU, with its values"
                )


class Minibatch:
    """The data of a step in host memory: inputs (``data`` of layer 0) and labels (of the layer past the last).

    One object serves all steps that run one after the other, each of ``samples`` samples of the same shapes and dtypes.
    ``sample_bytes`` says how large a sample is to be, by layer; what is not there is never read.
    """

    def __init__(self, samples: int, layers: int, sample_bytes: Mapping[int, int], allocate: Allocate) -> None:
        self.samples = samples
        self._layers = layers
        self._sample_bytes = sample_bytes
        self._allocate = allocate
        self._blocks: dict[int, Tensor] = {}
        self._records: dict[int, Record] = {}

    def load(self, inputs: Inputs, labels: Tensor) -> None:
        """Take in the next step's batch. Raises DifferentModel if its size is not the schedule's, or changes."""
        self._load(0, "inputs", inputs.labelled)
        self._load(self._layers, "labels", [("labels", labels)])

    def record(self, layer: int) -> Record:
        """What a sample consists of."""
        return self._records[layer]

    def pieces(self, layer: int, samples: Interval) -> list[Tensor]:
        """The bytes of some samples."""
        return self._records[layer].pieces(self._blocks[layer], (0, self.samples), samples)

    def _load(self, layer: int, what: str, named: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            if tensor.ndim == 0 or len(tensor) != self.samples:
                raise DifferentModel(
                    f"the {name} have shape {tuple(tensor.shape)}; the schedule is for minibatches of {self.samples} "
                    "samples, along the first dimension"
                )
        tensors = [tensor for _, tensor in named]
        record, expected = Record.of(tensors), self._sample_bytes.get(layer)
        if expected is not None and record.sample_bytes != expected:
            raise DifferentModel(
                f"the {what} take {record.sample_bytes} B a sample ({_described(record)}), the schedule was made "
                f"for {expected} B: profile this model with these batches and plan again"
            )
        if layer not in self._blocks:
            self._blocks[layer] = self._allocate(self.samples * record.sample_bytes)
            self._records[layer] = record
        elif self._records[layer] != record:
            raise DifferentModel(
                f"the {what} have {_described(record)} a sample, those of the step before had "
                f"{_described(self._records[layer])}"
            )
        for target, tensor in zip(record.tensors(self._blocks[layer], self.samples), tensors, strict=True):
            target.copy_(tensor)


def _described(record: Record) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in record.specs)
