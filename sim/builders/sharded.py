"""``zero3-offload``: data parallel over shards, as ZeRO-3 with its CPU offload does (Rajbhandari et al. 2021).

The host has one copy of all state, of which GPU i handles shard i. In a *round* every GPU takes one of its microbatches
through all layers, forward and then backward. For each layer, each way::

    fetch      every GPU brings its shard of the weights in; an all-gather over the GPUs' links makes them whole
    compute    forward; or forward again (recompute) and backward; the whole weights are freed
    reduce     (backward) a reduce-scatter leaves each GPU its shard of the gradient. It is added on the GPU to what the
               rounds before left in the host, which came in for that, and goes out again

What DeepSpeed does by default is done here: a layer's input, its checkpoint, stays on the GPU from forward to backward;
module buffers stay for the whole step; weights are gathered for every use. A GPU without a microbatch in the last round
takes part in its collectives all the same, and adds nothing. When all backwards have ended, the host updates layer by
layer, ascending, with the cores that all ranks would have: any optimizer will do; with ``update_when`` end, after it
has taken the norm of the whole gradient. On one GPU nothing is gathered.

``prefetch_depth``: the fetch for a step (a layer, one way) may start when the step ``depth + 1`` before it has ended.
If the GPUs' memory does not suffice for that, depth is halved until it does, for the whole plan.

In closed form, for R rounds over N GPUs, all together: weights in 2R·W, gathered 2R·(N-1)·W; gradients out R·dW, in
(R-1)·dW, reduced R·(N-1)·dW; data in x(0) and the labels; buffers in N·B, those that forwards change out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from traces.costs import Costs

from ..errors import DoesNotFit
from ..hardware.machine import Machine
from ..plan import ShardedPlan, UpdateWhen, pieces, shares
from ..schedule import Interval, Lane, MemoryPlan, Schedule, TaskKind, TensorKind
from ..shards import Shards
from .draft import Draft, assign_lifetimes, finish
from .memory import Placement, count_host, place
from .store_bytes import store_by_kind


def build_sharded(plan: ShardedPlan, costs: Costs, machine: Machine) -> Schedule:
    """The Schedule of ``zero3-offload``. Raises DoesNotFit if a GPU or the host has too little memory."""
    caps = tuple(gpu.usable_bytes for gpu in machine.gpus)
    _check_memory(plan, costs, caps)
    draft, placed = _fitted(plan, costs, caps)
    store = store_by_kind(costs, plan.minibatch, copies=1)
    held, cap = sum(store.values()) + count_host(draft, plan.gpus), machine.host.memory_bytes
    if cap is not None and held > cap:
        raise DoesNotFit(None, (0, costs.layer_count - 1), "the state and data", held, cap)
    memory = MemoryPlan(
        gpu_peak_bytes=placed.peaks, gpu_cap_bytes=caps, host_store=store, host_peak_bytes=held, host_cap_bytes=cap
    )
    return finish(
        draft, model=costs.trace.model, plan=plan, layers=costs.layer_count, memory=memory, offsets=placed.offsets
    )


def _fitted(plan: ShardedPlan, costs: Costs, caps: tuple[int, ...]) -> tuple[Draft, Placement]:
    """With as much prefetching as fits; at last, with holes taken that make copies wait."""
    depth, tight = plan.prefetch_depth, False
    while True:
        walk = _Walk(plan, costs, depth)
        draft = walk.run()
        assign_lifetimes(draft)
        placed = place(draft, caps, range(len(walk.steps)) if tight else ())
        if not placed.refusals:
            return draft, placed
        if tight:
            raise placed.refusals[0]
        depth, tight = depth // 2, depth == 0


class Turn(NamedTuple):
    """What all GPUs do at a time: one layer forward or backward, in a round."""

    round: int
    kind: TaskKind
    layer: int


def turns(rounds: int, layers: int) -> Iterator[Turn]:
    """All turns, in order."""
    for number in range(rounds):
        yield from (Turn(number, TaskKind.FORWARD, layer) for layer in range(layers))
        yield from (Turn(number, TaskKind.BACKWARD, layer) for layer in reversed(range(layers)))


def microbatches(plan: ShardedPlan) -> list[list[Interval]]:
    """Of each GPU; the first has one in every round."""
    return [pieces(*share, plan.u_fwd) for share in shares(plan.minibatch, plan.gpus)]


class _Walk:
    """What is where at this point of the total order. ``depth``: so many steps ahead are fetched."""

    def __init__(self, plan: ShardedPlan, costs: Costs, depth: int) -> None:
        self._plan, self._costs, self._shards = plan, costs, Shards(costs, plan.gpus)
        self._draft = Draft()
        self._last = costs.layer_count - 1
        self._pieces = microbatches(plan)
        self.steps = list(turns(len(self._pieces[0]), costs.layer_count))
        # What a layer's gradients had come to must be out again before it comes in.
        self._depth = min(depth, 2 * costs.layer_count - 1)
        self._computed: dict[tuple[int, int], int] = {}  # step and GPU -> its compute entry
        self._weights: dict[tuple[int, int], int] = {}  # step and GPU -> whole weights
        self._sums: dict[tuple[int, int], int] = {}  # step and GPU -> what its gradients had come to
        self._gradients: dict[tuple[int, int], int] = {}  # step and GPU -> what its backward adds to
        self._inputs: dict[tuple[TensorKind, int, int, int], int] = {}  # kind, layer, round and GPU -> x, g or labels
        self._buffers: dict[tuple[int, int], int] = {}  # layer and GPU -> module buffers
        self._gradients_out: dict[tuple[int, int], int] = {}  # layer and GPU -> its latest copy
        self._buffers_in: dict[int, list[int]] = {}  # layer -> copies

    def run(self) -> Draft:
        fetched = 0
        for number, step in enumerate(self.steps):
            while fetched < min(number + 1 + self._depth, len(self.steps)):
                self._fetch(fetched, self.steps[fetched])
                fetched += 1
            for gpu, piece in self._at_work(step):
                self._compute(number, step, gpu, piece)
            if step.kind is TaskKind.BACKWARD:
                self._reduce(number, step)
        self._update()
        return self._draft

    def _at_work(self, step: Turn) -> list[tuple[int, Interval]]:
        """GPUs that have a microbatch in this round."""
        return [(gpu, own[step.round]) for gpu, own in enumerate(self._pieces) if step.round < len(own)]

    # Fetching

    def _fetch(self, number: int, step: Turn) -> None:
        run = (step.layer, step.layer)
        at_work = dict(self._at_work(step))
        parts = self._bring(number, TensorKind.WEIGHT, run)
        whole = parts if self._plan.gpus == 1 else self._gather(number, step.layer, parts)
        self._weights.update(((number, gpu), buffer) for gpu, buffer in whole.items())
        for gpu, piece in at_work.items():
            self._fetch_inputs(number, step, gpu, piece)
        if step.kind is TaskKind.BACKWARD and step.round > 0:
            totals = self._bring(number, TensorKind.GRADIENT, run)
            self._sums.update(((number, gpu), buffer) for gpu, buffer in totals.items())

    def _fetch_inputs(self, number: int, step: Turn, gpu: int, piece: Interval) -> None:
        """Module buffers for the whole step; data and labels for the round."""
        layer = step.layer
        if step.kind is TaskKind.BACKWARD:
            return
        size, batch = self._costs.buffer_bytes(layer, layer), piece[1] - piece[0]
        if step.round == 0 and size:
            buffer = self._buffers[layer, gpu] = self._draft.buffer(gpu, TensorKind.BUFFER, (layer, layer), size)
            copy = self._swap_in(number, TensorKind.BUFFER, (layer, layer), gpu, buffer)
            self._buffers_in.setdefault(layer, []).append(copy)
        inputs = {0: self._costs.input_bytes(0, batch)} if layer == 0 else {}
        labels = {layer + 1: self._costs.label_bytes(batch)} if layer == self._last else {}
        for of, size in (inputs | labels).items():
            data = self._tensor(TensorKind.DATA, of, step, gpu, piece, size)
            if data is not None:
                self._swap_in(number, TensorKind.DATA, (of, of), gpu, data)

    def _bring(self, number: int, kind: TensorKind, run: tuple[int, int]) -> dict[int, int]:
        """Of every GPU, its shard of weights or gradients, in a buffer of its own; none where it has no bytes."""
        brought = {}
        for gpu in range(self._plan.gpus):
            size = self._size(kind, run, gpu)
            if size:
                brought[gpu] = self._draft.buffer(gpu, kind, run, size, shard=self._shard(gpu))
                before = [self._gradients_out[run[0], gpu]] if kind is TensorKind.GRADIENT else []
                self._swap_in(number, kind, run, gpu, brought[gpu], before)
        return brought

    def _swap_in(
        self,
        number: int,
        kind: TensorKind,
        run: tuple[int, int],
        gpu: int,
        buffer: int,
        after: Sequence[int] = (),
    ) -> int:
        """It waits for the step ``depth + 1`` before; an idle GPU for what the first one does there."""
        before = number - 1 - self._depth
        awaited = self._computed.get((before, gpu), self._computed.get((before, 0)))
        told = self._draft.buffers[buffer]
        return self._draft.add(
            TaskKind.SWAP_IN, (gpu, Lane.SWAP_IN), run, samples=told.samples,
            microbatch=self.steps[number].round if told.samples else None, tensor_kind=kind, size=told.bytes,
            writes=[buffer], after=[*after, *([] if awaited is None else [awaited])], group=number, shard=told.shard,
        )  # fmt: skip

    def _gather(self, number: int, layer: int, parts: dict[int, int]) -> dict[int, int]:
        size = self._costs.weight_bytes(layer, layer)
        if not size:
            return {}
        gpus = range(self._plan.gpus)
        whole = {gpu: self._draft.buffer(gpu, TensorKind.WEIGHT, (layer, layer), size) for gpu in gpus}
        self._draft.add(
            TaskKind.ALL_GATHER, (None, Lane.COLLECTIVE), (layer, layer), tensor_kind=TensorKind.WEIGHT,
            size=(self._plan.gpus - 1) * size, reads=list(parts.values()), writes=list(whole.values()), group=number,
        )  # fmt: skip
        return whole

    # Computing

    def _compute(self, number: int, step: Turn, gpu: int, piece: Interval) -> None:
        layer, batch = step.layer, piece[1] - piece[0]

        def find(kind: TensorKind, layer: int) -> int | None:
            return self._inputs.get((kind, layer, step.round, gpu))

        buffers = self._buffers.get((layer, gpu))
        reads = [self._weights.get((number, gpu)), buffers, find(TensorKind.STASH if layer else TensorKind.DATA, layer)]
        if layer == self._last:
            reads.append(find(TensorKind.DATA, layer + 1))
        writes: list[int | None] = []
        if step.kind is TaskKind.FORWARD:
            workspace = self._costs.forward_workspace_bytes(layer, layer, batch)
            if layer < self._last:
                size = self._costs.input_bytes(layer + 1, batch)
                writes.append(self._tensor(TensorKind.STASH, layer + 1, step, gpu, piece, size))
            if self._costs.trace.layers[layer].changes_buffers:
                writes.append(buffers)
        else:
            workspace = self._costs.backward_workspace_bytes(layer, layer, batch)
            reads.append(find(TensorKind.ACTIVATION_GRADIENT, layer + 1))
            writes.append(self._gradient(number, layer, gpu))
            if layer > 0:
                size = self._costs.input_gradient_bytes(layer, batch)
                writes.append(self._tensor(TensorKind.ACTIVATION_GRADIENT, layer, step, gpu, piece, size))
        if workspace:
            writes.append(self._draft.buffer(gpu, TensorKind.WORKSPACE, (layer, layer), workspace, piece))
        self._computed[number, gpu] = self._draft.add(
            step.kind, (gpu, Lane.COMPUTE), (layer, layer), samples=piece, microbatch=step.round,
            reads=[each for each in reads if each is not None], writes=[each for each in writes if each is not None],
            group=number,
        )  # fmt: skip
        if step.kind is TaskKind.FORWARD and gpu == 0 and step.round == len(self._pieces[0]) - 1:
            self._buffers_out(number, layer)

    def _tensor(self, kind: TensorKind, layer: int, step: Turn, gpu: int, piece: Interval, size: int) -> int | None:
        """A new buffer of x, g or labels of a microbatch; None if it has no bytes."""
        if not size:
            return None
        buffer = self._draft.buffer(gpu, kind, (layer, layer), size, piece)
        self._inputs[kind, layer, step.round, gpu] = buffer
        return buffer

    def _gradient(self, number: int, layer: int, gpu: int) -> int | None:
        """Where a backward adds: on one GPU, to what the rounds before have come to."""
        size = self._costs.gradient_bytes(layer, layer)
        if not size:
            return None
        held = self._sums.get((number, gpu)) if self._plan.gpus == 1 else None
        if held is None:
            held = self._draft.buffer(gpu, TensorKind.GRADIENT, (layer, layer), size)
        self._gradients[number, gpu] = held
        return held

    def _buffers_out(self, number: int, layer: int) -> None:
        """What forwards changed goes home from the first GPU, when all have read it there."""
        buffer = self._buffers.get((layer, 0))
        if buffer is not None and self._costs.trace.layers[layer].changes_buffers:
            self._draft.add(
                TaskKind.SWAP_OUT, (0, Lane.SWAP_OUT), (layer, layer), tensor_kind=TensorKind.BUFFER,
                size=self._costs.buffer_bytes(layer, layer), reads=[buffer], after=self._buffers_in[layer],
                group=number,
            )  # fmt: skip

    # Reducing and updating

    def _reduce(self, number: int, step: Turn) -> None:
        layer, run = step.layer, (step.layer, step.layer)
        size = self._costs.gradient_bytes(*run)
        if not size:
            return
        gradients = [self._gradients[number, gpu] for gpu, _ in self._at_work(step)]
        if self._plan.gpus == 1:
            sums = {0: gradients[0]}
        else:
            held = {gpu: self._sums[number, gpu] for gpu in range(self._plan.gpus) if (number, gpu) in self._sums}
            sizes = {gpu: self._size(TensorKind.GRADIENT, run, gpu) for gpu in range(self._plan.gpus)}
            sums = held or {
                gpu: self._draft.buffer(gpu, TensorKind.GRADIENT, run, part, shard=gpu)
                for gpu, part in sizes.items()
                if part
            }
            self._draft.add(
                TaskKind.REDUCE_SCATTER, (None, Lane.COLLECTIVE), run, tensor_kind=TensorKind.GRADIENT,
                size=(self._plan.gpus - 1) * size, reads=[*gradients, *held.values()], writes=list(sums.values()),
                group=number,
            )  # fmt: skip
        for gpu, buffer in sums.items():
            self._gradients_out[layer, gpu] = self._draft.add(
                TaskKind.SWAP_OUT, (gpu, Lane.SWAP_OUT), run, tensor_kind=TensorKind.GRADIENT,
                size=self._draft.buffers[buffer].bytes, reads=[buffer], group=number, shard=self._shard(gpu),
            )  # fmt: skip

    def _update(self) -> None:
        """When all backwards have ended, and so nothing reads weights any more."""
        ends = list({gpu: entry for (_, gpu), entry in self._computed.items()}.values())
        if self._plan.update_when is UpdateWhen.END:
            after = [*ends, *self._gradients_out.values()]
            self._draft.add(TaskKind.NORM, (None, Lane.UPDATE), (0, self._last), after=after)
        for layer in filter(self._costs.updates, range(self._last + 1)):
            users = (layer, *self._costs.tied_partners(layer))
            home = [entry for (of, _), entry in self._gradients_out.items() if of in users]
            self._draft.add(TaskKind.UPDATE, (None, Lane.UPDATE), (layer, layer), after=[*ends, *home])

    def _shard(self, gpu: int) -> int | None:
        """Which part of all state a GPU handles; None: the only one has it whole."""
        return gpu if self._plan.gpus > 1 else None

    def _size(self, kind: TensorKind, run: tuple[int, int], gpu: int) -> int:
        shard = self._shard(gpu)
        return self._shards.bytes(kind, run, shard)


def _check_memory(plan: ShardedPlan, costs: Costs, caps: Sequence[int]) -> None:
    """Raises DoesNotFit if a backward needs more than there is, however it is laid out."""
    last, shards = costs.layer_count - 1, Shards(costs, plan.gpus)
    resident = costs.buffer_bytes(0, last)
    for gpu, (own, cap) in enumerate(zip(microbatches(plan), caps, strict=True)):
        for number, (start, stop) in enumerate(own[:2]):
            batch, checkpoints = stop - start, 0
            for layer in range(last + 1):
                checkpoints += costs.input_bytes(layer, batch)
                gradients = costs.gradient_bytes(layer, layer)
                if number and plan.gpus > 1:
                    gradients += shards.bytes(TensorKind.GRADIENT, (layer, layer), gpu)
                around = [at for at in (layer, layer + 1) if 0 < at <= last]
                activations = sum(costs.input_gradient_bytes(at, batch) for at in around)
                activations += costs.label_bytes(batch) if layer == last else 0
                needed = resident + checkpoints + costs.weight_bytes(layer, layer) + gradients + activations
                needed += costs.backward_workspace_bytes(layer, layer, batch)
                if needed > cap:
                    what = (
                        f"the checkpoints of {batch} sample(s) up to there ({checkpoints} B, which stay on the GPU), "
                        f"all module buffers ({resident} B), whole weights and gradients, and the backward's workspace"
                    )
                    raise DoesNotFit(gpu, (layer, layer), what, needed, cap)
