"""Transfer pass of Harmony plans: walks the compute steps in total order and adds every copy, update and buffer.

Around each compute step, in this order:

1. what it still lacks comes in (weights of its group, its inputs);
2. what may be fetched ahead starts: the inputs of the GPU's next step, and this step's share of the next
   group's weights (spread over the group's microbatches, so that small inputs do not queue behind big weights);
3. the step computes;
4. its outputs leave: to the next pack's GPU, to the host, to the stash; after a group's last microbatch also its
   gradient, followed by the update (``gradients.py``).

Where each of them may go is decided here; how they fit is decided by the memory pass, which may ask for less
prefetching while a group computes (:class:`Ahead`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

from traces.costs import Costs

from ..plan import HarmonyPlan, Pack, StashPlace
from ..schedule import Interval, Lane, TaskKind, TensorKind
from .draft import Draft
from .gradients import GradientPath
from .needs import Need, Needs, Run, home_bytes, runs_where
from .order import Group, Step, is_data_parallel, shard_of
from .residents import Residents


class Ahead(IntEnum):
    """How much may be fetched ahead while a group computes."""

    NOTHING = 0
    INPUTS = 1
    WEIGHTS = 2


def add_transfers(
    plan: HarmonyPlan, costs: Costs, steps: Sequence[Step], ahead: Mapping[int, Ahead], update_order: Sequence[Pack]
) -> Draft:
    """The whole step as a draft. ``ahead`` says, per group index, how much may be fetched while it computes;
    ``update_order`` in which order the host updates packs."""
    return _Walk(plan, costs, steps, ahead, update_order).run()


class _Weights:
    """A group's weights and module buffers on its GPU, and how far those have come in that do not stay there."""

    def __init__(self, group: Group, swapped: Sequence[Run], resident: Sequence[int]) -> None:
        self.next_layer = group.pack[0]
        self.swapped: dict[Run, int | None] = dict.fromkeys(swapped)
        self.resident = resident
        self.buffer: int | None = None

    @property
    def weights(self) -> list[int]:
        return [*self.resident, *(buffer for buffer in self.swapped.values() if buffer is not None)]

    @property
    def ids(self) -> list[int]:
        return self.weights if self.buffer is None else [*self.weights, self.buffer]


class _HomeCopies:
    """Copies from or to the home of module buffers, which forwards change. Those of the same layers stay in order."""

    def __init__(self) -> None:
        self._made: list[tuple[Run, int]] = []

    def add(self, run: Run, copy: int) -> None:
        self._made.append((run, copy))

    def touching(self, run: Run) -> list[int]:
        return [copy for (first, last), copy in self._made if first <= run[1] and run[0] <= last]


class _HostTensor:
    """x(l) or g(l) in dynamic host memory, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[tuple[Interval, int]] = []

    def covering(self, samples: Interval) -> list[int] | None:
        """Buffers that hold these samples together; None while some are not there yet."""
        found = [(piece, buffer) for piece, buffer in self.pieces if piece[0] < samples[1] and samples[0] < piece[1]]
        held = sum(min(p[1], samples[1]) - max(p[0], samples[0]) for p, _ in found)
        return [buffer for _, buffer in found] if held == samples[1] - samples[0] else None


class _Walk:
    """What is where at this point of the total order."""

    def __init__(
        self,
        plan: HarmonyPlan,
        costs: Costs,
        steps: Sequence[Step],
        ahead: Mapping[int, Ahead],
        update_order: Sequence[Pack],
    ) -> None:
        self.plan, self.costs, self.steps, self.ahead = plan, costs, steps, ahead
        self.draft = Draft()
        self.needs = Needs(plan, costs)
        self.gradients = GradientPath(plan, costs, self.needs, self.draft, update_order)
        places = {plan.packs_bwd[index][0]: place for index, place in plan.stash_places.items()}
        self.stashes = {layer: place for layer, place in places.items() if place is not StashPlace.RECOMPUTE}
        self.slots = plan.slots or max(-(-plan.minibatch // plan.u_fwd), -(-plan.minibatch // plan.u_bwd))
        self.by_gpu: list[list[Step]] = [[] for _ in range(plan.gpus)]
        for step in steps:
            self.by_gpu[step.gpu].append(step)
        self.position = [0] * plan.gpus
        self.current = [own[0].group if own else None for own in self.by_gpu]
        self.weights: dict[int, _Weights] = {}
        self.residents = Residents(plan, costs)
        self.resident_weights: dict[tuple[int, int], int] = {}  # pack and GPU -> buffer
        for index, gpu in self.residents.weights():
            pack, kind = plan.packs_bwd[index], TensorKind.WEIGHT
            if size := home_bytes(costs, kind, pack):
                self.resident_weights[index, gpu] = self.draft.buffer(gpu, kind, pack, size, resident=True)
        self.updated_on: dict[int, int] = {}  # pack -> the GPU that has updated it
        self.arrived: dict[tuple[int, Need], int] = {}  # on a GPU, not yet consumed
        self.kept: dict[Need, int] = {}  # stashes on the GPUs of their backwards
        self.received: list[set[int]] = [set() for _ in range(plan.gpus)]  # of those, what other GPUs sent
        self.host: dict[tuple[TensorKind, int], _HostTensor] = {}
        self.buffers_read, self.buffers_written = _HomeCopies(), _HomeCopies()
        self.weights_out: dict[int, list[int]] = {}  # layer -> the copies of its updated weights
        self.backward_from = {first: index for index, (first, _) in enumerate(plan.packs_bwd)}
        self.left: dict[tuple[int, int], list[int]] = {}  # by group and microbatch: what first parts leave for second
        # pipelines: one GPU per pack
        self.runner = {(step.group.kind, step.group.pack_index): step.gpu for step in steps}

    def run(self) -> Draft:
        for step in self.steps:
            self.current[step.gpu] = step.group
            self._fetch_needed(step)
            self._fetch_ahead(step)
            match step.kind:
                case TaskKind.FORWARD:
                    self._forward(step)
                case TaskKind.BACKWARD:
                    self._backward(step)
                case TaskKind.BACKWARD_INPUT:
                    self._backward_input(step)
                case TaskKind.BACKWARD_WEIGHT:
                    self._backward_weight(step)
                case TaskKind.RECOMPUTE:
                    self._recompute(step)
                case _:
                    self._update_on_gpu(step)
            self.position[step.gpu] += 1
        self._refresh_residents()
        return self.draft

    # 1 and 2: bringing in

    def _fetch_needed(self, step: Step) -> None:
        self._fetch_weights(step.group, step.group.pack[1])
        for need in self.needs.of(step):
            if not self._fetch(step, need):
                raise AssertionError(f"{need} of {step} is nowhere")

    def _fetch_ahead(self, step: Step) -> None:
        allowed = self.ahead[step.group.index]
        following = self.by_gpu[step.gpu][self.position[step.gpu] + 1 :]
        needy = next((other for other in following if other.kind is not TaskKind.BACKWARD_WEIGHT), None)
        if allowed >= Ahead.INPUTS and needy is not None:
            for need in self.needs.of(needy):
                self._fetch(needy, need)
        if allowed >= Ahead.WEIGHTS:
            upcoming = next((other.group for other in following if other.group is not step.group), None)
            if upcoming is not None:
                self._fetch_weights(upcoming, self._share(upcoming, step))

    def _share(self, upcoming: Group, step: Step) -> int:
        """Last layer of the next group that should have started to come in when this microbatch starts."""
        first, last = upcoming.pack
        quota = self.residents.swapped_bytes(step.gpu, upcoming.pack) * (step.microbatch + 1) / len(step.group.pieces)
        layer = first
        while layer < last and self.residents.swapped_bytes(step.gpu, (first, layer)) < quota:
            layer += 1
        return layer

    def _fetch_weights(self, group: Group, upto: int) -> None:
        """Bring in the group's weights up to this layer, as one copy, and its module buffers with the first."""
        if group.index not in self.weights:
            self.weights[group.index] = self._weights_of(group)
        state = self.weights[group.index]
        first, last = state.next_layer, upto
        if first > last:
            return
        state.next_layer = last + 1
        if first == group.pack[0]:
            state.buffer = self._bring_home_tensor(group, TensorKind.BUFFER, group.pack, group.pack, None)
        for (start, end), buffer in state.swapped.items():
            run = max(first, start), min(last, end)
            if run[0] <= run[1]:
                state.swapped[start, end] = self._bring_home_tensor(group, TensorKind.WEIGHT, (start, end), run, buffer)

    def _weights_of(self, group: Group) -> _Weights:
        first, last = group.pack
        packs = [(self.plan.packs_bwd[index], gpu, number) for (index, gpu), number in self.resident_weights.items()]
        resident = [number for (a, b), gpu, number in packs if gpu == group.gpu and a <= last and first <= b]
        return _Weights(group, self.residents.swapped_runs(group.gpu, group.pack), resident)

    def _bring_home_tensor(
        self, group: Group, kind: TensorKind, whole: Run, run: Run, buffer: int | None
    ) -> int | None:
        """Copy a run of layers of a home tensor into the buffer for ``whole``, made now if there is none yet."""
        size = home_bytes(self.costs, kind, run)
        if not size:
            return buffer
        if buffer is None:
            buffer = self.draft.buffer(group.gpu, kind, whole, home_bytes(self.costs, kind, whole))
        is_buffer = kind is TensorKind.BUFFER
        after = self.buffers_written.touching(run) if is_buffer else []
        copy = self._swap_in(group.gpu, Need(kind, run), buffer, size, after=after)
        if is_buffer:
            self.buffers_read.add(run, copy)
        return buffer

    def _fetch(self, step: Step, need: Need) -> bool:
        """Make sure the tensor is on its way to the step's GPU; False if the host does not have it yet."""
        if (step.gpu, need) in self.arrived:
            return True
        if need in self.kept:
            self.arrived[step.gpu, need] = self._copy_to(step.gpu, need, self.kept[need], step.microbatch)
            return True
        if need.kind is TensorKind.STASH and need.run[0] not in self.stashes:
            return False  # it is to be made again, even where the host has it as a boundary activation
        sources: list[int] | None = []
        after: list[int] | None = []
        if need.at_boundary:
            sources = self._host_tensor(need).covering(need.samples or (0, 0))
        elif need.kind is TensorKind.GRADIENT:
            after = self.gradients.home(need.run)
        if sources is None or after is None:
            return False
        size = self.needs.bytes(need)
        buffer = self.draft.buffer(step.gpu, need.kind, need.run, size, need.samples, shard=need.shard)
        microbatch = step.microbatch if need.samples else None
        self._swap_in(step.gpu, need, buffer, size, microbatch, sources, after)
        self.arrived[step.gpu, need] = buffer
        return True

    def _swap_in(
        self,
        gpu: int,
        need: Need,
        buffer: int,
        size: int,
        microbatch: int | None = None,
        sources: Sequence[int] = (),
        after: Sequence[int] = (),
    ) -> int:
        return self.draft.add(
            TaskKind.SWAP_IN, (gpu, Lane.SWAP_IN), need.run, samples=need.samples, microbatch=microbatch,
            tensor_kind=need.kind, size=size, reads=sources, writes=[buffer], after=after, group=self._group_on(gpu),
            shard=need.shard,
        )  # fmt: skip

    def _group_on(self, gpu: int) -> int | None:
        """The group that a GPU is at; what is allocated now is allocated beside it."""
        group = self.current[gpu]
        return group.index if group else None

    def _take_inputs(self, step: Step) -> list[int]:
        """The step's input buffers; from now on they count as consumed."""
        taken = [self.arrived.pop((step.gpu, need)) for need in self.needs.of(step)]
        self.received[step.gpu].difference_update(taken)
        return taken

    def _host_tensor(self, need: Need) -> _HostTensor:
        """x(l) is one host tensor, whether it went there as a boundary activation or as a stash."""
        kind = TensorKind.ACTIVATION if need.kind is TensorKind.STASH else need.kind
        return self.host.setdefault((kind, need.run[0]), _HostTensor())

    # 3 and 4: computing and sending

    def _forward(self, step: Step) -> None:
        first, last = step.group.pack
        out = last + 1
        receiver = self._receiver(step)
        stashed = [layer for layer in range(first + 1, out + 1) if layer in self.stashes]
        if receiver is None and self.stashes.get(out) is StashPlace.SWAP:
            stashed.remove(out)  # a boundary that goes through the host anyway serves as the stash
        leaving = [Need(TensorKind.ACTIVATION, (out, out), step.samples)]
        leaving += [Need(TensorKind.STASH, (layer, layer), step.samples) for layer in stashed]
        outputs = [(need, self._output(step, need)) for need in leaving if self.needs.bytes(need)]
        workspace = self.costs.forward_workspace_bytes(first, last, _batch(step))
        self._compute(step, self._take_inputs(step), [buffer for _, buffer in outputs], workspace)
        for need, buffer in outputs:
            if need.kind is TensorKind.ACTIVATION:
                self._send(step, need, buffer, receiver)
            elif self.stashes[need.run[0]] is StashPlace.SWAP:
                self._send(step, need, buffer, None)
            else:
                self._keep(step, need, buffer)
        if self._is_last(step):
            self._buffers_out(step.group)

    def _recompute(self, step: Step) -> None:
        """Repeat a forward. What comes out stays for the next step that takes it, on this GPU."""
        first, last = step.group.pack
        made = Need(TensorKind.STASH, (last + 1, last + 1), step.samples)
        output = self._output(step, made) if self.needs.bytes(made) else None
        workspace = self.costs.forward_workspace_bytes(first, last, _batch(step))
        self._compute(step, self._take_inputs(step), [] if output is None else [output], workspace)
        if output is not None:
            self.arrived[step.gpu, made] = output

    def _backward(self, step: Step) -> None:
        gradient = self.gradients.buffer(step.group)
        workspace = self.costs.backward_workspace_bytes(*step.group.pack, _batch(step))
        self._go_back(step, [] if gradient is None else [gradient], workspace)
        if self._is_last(step):
            self.gradients.backward_ended(step.group)

    def _backward_input(self, step: Step) -> None:
        """All that it reads, and what it holds of autograd's, stays on the GPU for the second part."""
        pack, u = step.group.pack, _batch(step)
        held = self._workspace(step, self.costs.held_bytes(*pack, u))
        inputs = self._go_back(step, held, self.costs.parts_workspace_bytes(*pack, u))
        self.left[step.group.index, step.microbatch] = [*inputs, *held]

    def _backward_weight(self, step: Step) -> None:
        gradient = self.gradients.buffer(step.group)
        assert gradient is not None, "only packs with gradients are done in two parts"
        left = self.left.pop((step.group.index, step.microbatch))
        workspace = self.costs.parts_workspace_bytes(*step.group.pack, _batch(step))
        self._compute(step, left, [gradient], workspace)
        if self._is_last(step):
            self.gradients.backward_ended(step.group)

    def _go_back(self, step: Step, writes: list[int], workspace: int) -> list[int]:
        """Compute, send the gradient of the pack's input on, and write module buffers back; what was taken in."""
        first, last = step.group.pack
        receiver = self._receiver(step)
        leaving = Need(TensorKind.ACTIVATION_GRADIENT, (first, first), step.samples)
        outgoing = self._output(step, leaving) if first > 0 and self.needs.bytes(leaving) else None
        inputs = self._take_inputs(step)
        self._compute(step, inputs, [*([] if outgoing is None else [outgoing]), *writes], workspace)
        if outgoing is not None:
            self._send(step, leaving, outgoing, receiver)
        if self._is_last(step) and last == self.needs.last_layer:
            self._buffers_out(step.group)
        return inputs

    def _update_on_gpu(self, step: Step) -> None:
        group = step.group
        inputs = self._take_inputs(step)
        states = [b for b in inputs if self.draft.buffers[b].kind is TensorKind.OPTIMIZER_STATE]
        shard = shard_of(self.plan, step.gpu)
        stays = self._resident_state(group, shard)
        if shard is None:
            self.updated_on[group.pack_index] = group.gpu
        own_gradient = self.gradients.sum(group)
        weights = self.weights[group.index]
        read = [*weights.ids, *inputs, *stays, *([] if own_gradient is None else [own_gradient])]
        changed = [*weights.weights, *states, *stays]
        self.draft.add(
            TaskKind.UPDATE, (step.gpu, Lane.COMPUTE), group.pack, reads=read, writes=changed, group=group.index,
            shard=shard,
        )  # fmt: skip
        for run in runs_where(group.pack, lambda at: self.costs.updates(at) and self.residents.go_home(group.gpu, at)):
            self._weights_home(group, run, next(iter(weights.weights), None))
        for state in states:
            self._home_out(group, Need(TensorKind.OPTIMIZER_STATE, group.pack, shard=shard), state)

    def _resident_state(self, group: Group, shard: int | None) -> list[int]:
        """The pack's optimizer state, or the GPU's shard of it, if it stays on the GPU that updates it."""
        kind = TensorKind.OPTIMIZER_STATE
        size = self.needs.bytes(Need(kind, group.pack, shard=shard))
        if group.pack_index not in self.needs.resident_state or not size:
            return []
        return [self.draft.buffer(group.gpu, kind, group.pack, size, shard=shard, resident=True)]

    def _refresh_residents(self) -> None:
        """Bring in again, as the last thing of the step, the weights that stay on a GPU and were updated elsewhere."""
        # By layer, when its weights at home are new.
        updates = {layer: [entry] for layer, entry in self.gradients.updated.items()} | self.weights_out
        for (index, gpu), buffer in self.resident_weights.items():
            in_place = self.updated_on.get(index) == gpu

            def renewals(layer: int, in_place: bool = in_place) -> list[int]:
                """When all its weights are home, its own and tied ones, if some of them are old here."""
                tied = [entry for owner in self.costs.tied_owners(layer) for entry in updates.get(owner, ())]
                return [*tied, *updates.get(layer, ())] if tied or not in_place else []

            for run in runs_where(self.plan.packs_bwd[index], lambda layer: bool(renewals(layer))):
                after = [entry for layer in range(run[0], run[1] + 1) for entry in renewals(layer)]
                size = home_bytes(self.costs, TensorKind.WEIGHT, run)
                self._swap_in(gpu, Need(TensorKind.WEIGHT, run), buffer, size, after=after)

    def _compute(self, step: Step, inputs: list[int], outputs: list[int], workspace: int) -> None:
        weights = self.weights[step.group.index]
        writes = [*outputs, *self._workspace(step, workspace)]
        if weights.buffer is not None and self._changes_buffers(step):
            writes.append(weights.buffer)
        self.draft.add(
            step.kind, (step.gpu, Lane.COMPUTE), step.group.pack, samples=step.samples, microbatch=step.microbatch,
            reads=[*weights.ids, *inputs], writes=writes, group=step.group.index,
        )  # fmt: skip

    def _workspace(self, step: Step, size: int) -> list[int]:
        """A buffer for autograd; none of no bytes."""
        if not size:
            return []
        return [self.draft.buffer(step.gpu, TensorKind.WORKSPACE, step.group.pack, size, step.samples)]

    def _output(self, step: Step, need: Need) -> int:
        return self.draft.buffer(step.gpu, need.kind, need.run, self.needs.bytes(need), need.samples)

    def _receiver(self, step: Step) -> int | None:
        """GPU that gets the step's boundary tensor straight from this one; None: it goes through the host.

        Through the host goes everything data-parallel, what a receiver has no slot for, and the last forward
        pack's output where the backward cuts the minibatch differently.
        """
        index = step.group.pack_index
        if is_data_parallel(self.plan) or (step.kind.goes_back and index == 0):
            return None
        if step.kind.goes_back:
            consumer = (TaskKind.BACKWARD, index - 1)
        elif index + 1 < len(self.plan.packs_fwd):
            consumer = (TaskKind.FORWARD, index + 1)
        elif self.plan.u_fwd == self.plan.u_bwd:
            consumer = (TaskKind.BACKWARD, len(self.plan.packs_bwd) - 1)
        else:
            return None
        gpu = self.runner[consumer]
        return gpu if len(self.received[gpu]) < self.slots else None

    def _keep(self, step: Step, need: Need, buffer: int) -> None:
        """Leave a stash on the GPU of its backward; if that is another one, it goes there now."""
        gpu = step.gpu
        if not is_data_parallel(self.plan):
            gpu = self.runner[TaskKind.BACKWARD, self.backward_from[need.run[0]]]
        self.kept[need] = self._copy_to(gpu, need, buffer, step.microbatch)

    def _send(self, step: Step, need: Need, buffer: int, receiver: int | None) -> None:
        target = self._copy_to(receiver, need, buffer, step.microbatch)
        if receiver is not None:
            self.arrived[receiver, need] = target
            self.received[receiver].add(target)
        elif need.samples is not None:
            self._host_tensor(need).pieces.append((need.samples, target))

    def _copy_to(self, receiver: int | None, need: Need, buffer: int, microbatch: int) -> int:
        """Copy x(l) or g(l) from its GPU to another one (None: to the host), if it is not there; the buffer there."""
        source = self.draft.buffers[buffer].gpu
        if source == receiver:
            return buffer
        if receiver is None:
            lane, kind, gpu = Lane.SWAP_OUT, TaskKind.SWAP_OUT, None
        else:
            lane, kind, gpu = Lane.P2P_OUT, TaskKind.P2P, receiver
        size = self.draft.buffers[buffer].bytes
        target = self.draft.buffer(gpu, need.kind, need.run, size, need.samples)
        self.draft.add(
            kind, (source, lane), need.run, samples=need.samples, microbatch=microbatch, tensor_kind=need.kind,
            size=size, peer=receiver, reads=[buffer], writes=[target],
            group=None if receiver is None else self._group_on(receiver),
        )  # fmt: skip
        return target

    def _changes_buffers(self, step: Step) -> bool:
        """Whether this step's forward is the one that counts for the module buffers (recompute changes none)."""
        first, last = step.group.pack
        forward = step.kind is TaskKind.FORWARD or (step.kind.goes_back and last == self.needs.last_layer)
        return forward and any(self.costs.trace.layers[layer].changes_buffers for layer in range(first, last + 1))

    def _buffers_out(self, group: Group) -> None:
        """Write back what the forward changed; of data-parallel replicas the first GPU's is kept."""
        if is_data_parallel(self.plan) and group.gpu != 0:
            return
        layers = self.costs.trace.layers
        for run in runs_where(group.pack, lambda layer: layers[layer].changes_buffers):
            after = self.buffers_read.touching(run)
            copy = self._home_out(group, Need(TensorKind.BUFFER, run), self.weights[group.index].buffer, after)
            if copy is not None:
                self.buffers_written.add(run, copy)

    def _weights_home(self, group: Group, run: Run, buffer: int | None) -> None:
        """Copy updated weights out. Where later layers use them too, after those wrote back: theirs are out of date."""
        layers = range(run[0], run[1] + 1)
        partners = {partner for layer in layers for partner in self.costs.tied_partners(layer)}
        after = [copy for partner in sorted(partners) for copy in self.weights_out.get(partner, ())]
        copy = self._home_out(group, Need(TensorKind.WEIGHT, run, shard=shard_of(self.plan, group.gpu)), buffer, after)
        if copy is not None:
            for layer in layers:
                self.weights_out.setdefault(layer, []).append(copy)

    def _home_out(self, group: Group, need: Need, buffer: int | None, after: Sequence[int] = ()) -> int | None:
        """Copy a home tensor out; the index of the copy, None if there is nothing to copy."""
        size = self.needs.bytes(need)
        if buffer is None or not size:
            return None
        return self.draft.add(
            TaskKind.SWAP_OUT, (group.gpu, Lane.SWAP_OUT), need.run, tensor_kind=need.kind, size=size,
            reads=[buffer], after=after, group=group.index, shard=need.shard,
        )  # fmt: skip

    def _is_last(self, step: Step) -> bool:
        return step.microbatch == len(step.group.pieces) - 1


def _batch(step: Step) -> int:
    if step.samples is None:
        raise AssertionError(f"{step} has no samples")
    return step.samples[1] - step.samples[0]
