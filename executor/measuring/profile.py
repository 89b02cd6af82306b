"""Profiling: measuring what a model costs, layer by layer, as a Trace.

    check     a small batch through the model; which layers are alike
    sizes     memory of each unlike layer at each microbatch size; which sizes, if nobody says (``grid.py``)
    times     each unlike layer at each size, and its updates, in turn until the budget is spent

Layers that are alike are measured together: each round times another of them, as running them in turn does to
caches. A backward task repeats its forward with recording, which costs a little more than without, so what is timed is
both together, and BACKWARD is that less FORWARD: then FORWARD + BACKWARD is what the task takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from traces.schema import Layer, Phase, SizeRow, TiedWeight, TimeRow, Trace

from ..devices.processor import quiet
from ..errors import WorkloadError
from ..models.workloads import Workload, adam
from ..reporting import Progress, silent
from ..running.compute import Chance, GpuModel, LayerTensors
from ..running.optimizer import OptimizerFactory, PackOptimizer
from .bench import LayerBench, layer_tensors
from .grid import Grid, memory_at_hand
from .instruments import Instruments, instruments_of
from .probe import Found, blamed, probe
from .sampling import Sampled, sample, summarise
from .sizes import LayerBytes, measure_sizes

MEMBERS = 3
"""Of layers that are alike, so many are measured in turn."""

_BEFORE = {
    Phase.BACKWARD: Phase.FORWARD,
    Phase.BACKWARD_INPUT: Phase.FORWARD,
    Phase.BACKWARD_WEIGHT: Phase.BACKWARD_INPUT,
}
"""What is timed together with a phase, and taken off again."""

_SIZES_SHARE = 0.15
"""About the share of the time that checks and sizes take."""

_CPU = torch.device("cpu")


def default_microbatches(minibatch: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, … up to the minibatch, which is always among them; in between, costs are interpolated."""
    steps = {base << shift for base in (1, 3) for shift in range(minibatch.bit_length())}
    return tuple(sorted({size for size in steps if size <= minibatch} | {minibatch}))


def profile(
    workload: Workload,
    *,
    microbatches: Sequence[int] | None = None,
    memory_bytes: int | None = None,
    optimizer: OptimizerFactory = adam,
    device: torch.device = _CPU,
    warmups: int = 1,
    repeats: int = 21,
    budget_s: float = 60.0,
    in_parts: bool = False,
    progress: Progress = silent,
) -> Trace:
    """Measure a workload at these microbatch sizes on a device. The model is not changed.

    Without sizes they are 1, 2, 4, … up to the largest at which a layer's backward fits into ``memory_bytes`` (of the
    GPU that is profiled for; without, what the device has left), as far as the budget goes.

    On the CPU, times are steady CPU time of one thread (``devices/processor.py``), updates on the "GPU" included; on
    CUDA they are the device's own, and updates on the host what passes with all of torch's threads. Each duration is a
    median of up to ``repeats`` rounds: as many as fit into ``budget_s`` seconds, but at least 3. Those that vary much
    get up to as many more, in what is left of the budget. ``in_parts`` also measures backwards in two parts. Raises
    ModelError or WorkloadError for a model, loss or batch that no schedule can run, naming the layer.
    """
    if repeats < 1:
        raise WorkloadError(f"{repeats} repeats leave nothing to measure; give at least 1")
    with quiet() if device.type == "cpu" else torch.cuda.device(device):
        sizes = (
            Grid(memory_bytes or memory_at_hand(device), budget_s * (1 - _SIZES_SHARE))
            if microbatches is None
            else microbatches
        )
        profiler = Profiler(workload, sizes, optimizer, instruments_of(device), in_parts=in_parts)
        return profiler.trace(warmups, repeats, budget_s, progress)


class Profiler:
    """One profile on its way. Raises ModelError or WorkloadError for what cannot be profiled."""

    def __init__(
        self,
        workload: Workload,
        microbatches: Sequence[int] | Grid,
        optimizer: OptimizerFactory,
        instruments: Instruments,
        *,
        in_parts: bool = False,
    ) -> None:
        self._workload = workload
        self._grid = microbatches if isinstance(microbatches, Grid) else None
        self._microbatches = (1,) if isinstance(microbatches, Grid) else tuple(sorted(set(microbatches)))
        if not self._microbatches or self._microbatches[0] < 1:
            raise WorkloadError(f"microbatch sizes are {list(self._microbatches)}; give at least one, each 1 or more")
        self._instruments, self._in_parts = instruments, in_parts
        self._device, self._clock = instruments.device, instruments.clock
        self._model = workload.layers(self._microbatches[0])
        trained = [parameter for parameter in workload.model.parameters() if parameter.requires_grad]
        if not trained:
            what = "every parameter is frozen" if any(True for _ in workload.model.parameters()) else "no parameters"
            raise WorkloadError(f"{workload.name}: {what}; there is nothing to train")
        self._optimizer = PackOptimizer(optimizer(trained))
        self._gpu = GpuModel(self._model)
        self._chance = Chance(instruments.generator, 0, 0, 0)
        self._tensors: dict[int, LayerTensors] = {}

    def trace(self, warmups: int, repeats: int, budget_s: float, progress: Progress) -> Trace:
        """The trace, of so many rounds at most."""
        progress(0.0, "checking the model")
        few = self._microbatches[0]
        inputs, labels = self._workload.checked_batch(few, 0)
        reached = inputs.map(lambda tensor: tensor.to(self._device)).tensors
        found = probe(self._model, reached, labels.to(self._device), self._tensors_of, self._chance.generator)
        sizes = self._sizes(found, progress)
        times, rounds = self._times(found, warmups, repeats, budget_s, progress)
        progress(1.0, "profiled")
        return Trace(
            model=self._workload.name,
            device=self._instruments.name,
            dtype=self._dtype(),
            optimizer=type(self._optimizer.optimizer).__name__,
            label_bytes_per_sample=labels.nbytes // few,
            sample=inputs.sample,
            layers=self._layer_rows(found),
            times=times,
            sizes=sizes,
            framework=f"torch {torch.__version__}",
            threads=torch.get_num_threads(),
            warmups=warmups,
            repeats=rounds,
        )

    def _tensors_of(self, layer: int) -> LayerTensors:
        if layer not in self._tensors:
            self._tensors[layer] = layer_tensors(self._model, layer, self._device)
        return self._tensors[layer]

    def _sizes(self, found: Sequence[Found], progress: Progress) -> tuple[SizeRow, ...]:
        """Memory at each size; finds the sizes, if nobody said."""
        rows: dict[tuple[int, int], LayerBytes] = {}
        waiting, started_s = list(self._microbatches), time.monotonic()
        measured: list[int] = []
        while waiting:
            u = waiting.pop(0)
            progress(_SIZES_SHARE * len(measured) / (1 + len(measured) + len(waiting)), f"memory at {u} samples")
            measured.append(u)
            for kind in found:
                of_kind = self._sizes_of(kind, u)
                rows.update({(layer, u): of_kind for layer in kind.layers})
            if self._grid is not None:
                hungriest = max((self._task_bytes(kind, rows[kind.layers[0], u]) for kind in found), key=sum)
                following = self._grid.after(u, sum(hungriest), hungriest[0], time.monotonic() - started_s)
                waiting = [] if following is None else [following]
        self._microbatches = tuple(measured)
        source = self._instruments.sizes
        return tuple(
            SizeRow(layer=layer, microbatch=u, provenance=source, **asdict(rows[layer, u])) for layer, u in sorted(rows)
        )

    def _sizes_of(self, kind: Found, u: int) -> LayerBytes:
        first = kind.layers[0]
        inputs = kind.inputs_for(u)
        with blamed(self._model.layers[first], inputs):
            return measure_sizes(
                self._model, first, inputs, self._tensors_of(first), self._chance, in_parts=self._in_parts
            )

    def _task_bytes(self, kind: Found, sizes: LayerBytes) -> tuple[int, int]:
        """What a backward of one layer takes: for its state, and for its samples."""
        spec = self._model.layers[kind.layers[0]]
        state = spec.weight_bytes + spec.gradient_bytes + spec.buffer_bytes
        return state, sizes.input_bytes + sizes.saved_bytes + sizes.workspace_bytes

    def _times(
        self, found: Sequence[Found], warmups: int, repeats: int, budget_s: float, progress: Progress
    ) -> tuple[tuple[TimeRow, ...], int]:
        """Rows of all phases, and how many rounds count."""
        pieces: dict[tuple[int, Phase, int], Callable[[int], int]] = {}
        for at, kind in enumerate(found):
            members = kind.layers[:MEMBERS]
            benches = [
                LayerBench(self._model, layer, self._gpu, self._tensors_of(layer), self._chance) for layer in members
            ]
            for u in self._microbatches:
                pieces[at, Phase.FORWARD, u] = self._forward(benches, kind, u)
                pieces[at, Phase.BACKWARD, u] = self._forward_and_backward(benches, kind, u)
                if self._in_parts and self._model.layers[members[0]].trainable:
                    pieces[at, Phase.BACKWARD_INPUT, u] = self._parts(benches, kind, u, both=False)
                    pieces[at, Phase.BACKWARD_WEIGHT, u] = self._parts(benches, kind, u, both=True)
            if self._model.owned(members[0]):
                updates = [self._instruments.updates(self._model, layer, self._optimizer) for layer in members]
                for phase in (Phase.UPDATE_CPU, Phase.UPDATE_GPU):
                    pieces[at, phase, 0] = self._update([each[phase] for each in updates])
        durations = sample(
            list(pieces.values()),
            warmups=warmups,
            repeats=repeats,
            budget_s=budget_s,
            progress=lambda share, what: progress(_SIZES_SHARE + (1 - _SIZES_SHARE) * share, f"times, {what}"),
        )
        sampled = {key: summarise(each) for key, each in zip(pieces, durations, strict=True)}
        lasted = dict(sampled)
        for at, phase, u in pieces:
            if phase in _BEFORE:
                before = lasted[at, _BEFORE[phase], u].median_ns
                each = lasted[at, phase, u]
                sampled[at, phase, u] = Sampled(max(0, each.median_ns - before), each.spread_ns)
        if self._in_parts:
            for at, phase, u in pieces:
                if phase is Phase.BACKWARD and (at, Phase.BACKWARD_INPUT, u) not in pieces:
                    sampled[at, Phase.BACKWARD_INPUT, u] = sampled[at, phase, u]
                    sampled[at, Phase.BACKWARD_WEIGHT, u] = Sampled(0, 0)
        rows = [
            TimeRow(
                layer=layer,
                phase=phase,
                microbatch=u,
                duration_ns=each.median_ns,
                spread_ns=each.spread_ns,
                provenance=self._instruments.times,
            )
            for (at, phase, u), each in sampled.items()
            for layer in found[at].layers
        ]
        order = list(Phase)
        rows.sort(key=lambda row: (order.index(row.phase), row.layer, row.microbatch))
        return tuple(rows), min(len(each) for each in durations)

    def _forward(self, benches: Sequence[LayerBench], kind: Found, u: int) -> Callable[[int], int]:
        def work(number: int) -> int:
            inputs = kind.inputs_for(u)
            with blamed(self._model.layers[kind.layers[0]], inputs):
                return benches[number % len(benches)].forward_ns(inputs, self._clock)

        return work

    def _forward_and_backward(self, benches: Sequence[LayerBench], kind: Found, u: int) -> Callable[[int], int]:
        def work(number: int) -> int:
            inputs, gradient = kind.inputs_for(u), kind.output_gradient_for(u)
            with blamed(self._model.layers[kind.layers[0]], inputs):
                return benches[number % len(benches)].forward_and_backward_ns(inputs, gradient, self._clock)

        return work

    def _parts(self, benches: Sequence[LayerBench], kind: Found, u: int, *, both: bool) -> Callable[[int], int]:
        def work(number: int) -> int:
            inputs, gradient = kind.inputs_for(u), kind.output_gradient_for(u)
            with blamed(self._model.layers[kind.layers[0]], inputs):
                return benches[number % len(benches)].parts_ns(inputs, gradient, self._clock, both=both)

        return work

    def _update(self, updates: Sequence[Callable[[], int]]) -> Callable[[int], int]:
        return lambda number: updates[number % len(updates)]()

    def _layer_rows(self, found: Sequence[Found]) -> tuple[Layer, ...]:
        kind_of = {layer: kind for kind in found for layer in kind.layers}
        tied = {group.name: group for group in self._model.tied}
        rows = []
        for index, spec in enumerate(self._model.layers):
            shared = {named.qualified for named in spec.parameters.values()} & tied.keys()
            rows.append(
                Layer(
                    name=spec.name,
                    kind=spec.kind,
                    weight_bytes=spec.weight_bytes,
                    gradient_bytes=spec.gradient_bytes,
                    optimizer_state_bytes=self._state_bytes(index),
                    buffer_bytes=spec.buffer_bytes,
                    trainable=bool(spec.trainable) or not spec.parameters,
                    tied=tuple(
                        TiedWeight(group=name, weight_bytes=tied[name].parameter.nbytes) for name in sorted(shared)
                    ),
                    changes_buffers=spec.changes_buffers,
                    cut_sensitive=spec.cut_sensitive or kind_of[index].random,
                    saves_output=kind_of[index].saves_output,
                )
            )
        return tuple(rows)

    def _state_bytes(self, layer: int) -> int:
        """Of the optimizer's state, what has the parameter's own shape: that moves with it."""
        return sum(
            named.tensor.numel() * dtype.itemsize
            for named in self._model.owned(layer).values()
            for dtype in self._optimizer.state_entries(named.tensor).values()
        )

    def _dtype(self) -> str:
        """The dtype of most of the parameters' bytes."""
        totals: dict[torch.dtype, int] = {}
        for parameter in self._workload.model.parameters():
            totals[parameter.dtype] = totals.get(parameter.dtype, 0) + parameter.nbytes
        return str(max(totals, key=lambda dtype: totals[dtype])).removeprefix("torch.")
