"""Transfer pass of Harmony plans: walks the compute steps in total order and adds every copy, update and buffer.

Around each compute step, in this order:

1. what it still lacks comes in (weights of its group, ``weights.py``; its inputs, ``inputs.py``);
2. what may be fetched ahead starts: the inputs of the GPU's next step, and this step's share of the next
   group's weights (spread over the group's microbatches, so that small inputs do not queue behind big weights);
3. the step computes;
4. its outputs leave: to the next pack's GPU, to the host, to the stash; after a group's last microbatch also its
   gradient, followed by the update (``gradients.py``).

Where each of them may go is decided here; how they fit is decided by the memory pass, which may ask for less
prefetching while a group computes (:class:`Ahead`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import IntEnum

from traces.costs import Costs

from ..plan import HarmonyPlan, Pack
from ..schedule import Lane, TaskKind, TensorKind
from .copies import Copies
from .draft import Draft
from .gradients import GradientPath
from .inputs import Inputs
from .needs import Need, Needs
from .order import Step, shard_of
from .weights import WeightPath


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


class _Walk:
    """What has been done up to this point of the total order."""

    def __init__(
        self,
        plan: HarmonyPlan,
        costs: Costs,
        steps: Sequence[Step],
        ahead: Mapping[int, Ahead],
        update_order: Sequence[Pack],
    ) -> None:
        self._plan, self._costs, self._steps, self._ahead = plan, costs, steps, ahead
        self._draft, self._needs = Draft(), Needs(plan, costs)
        copies = Copies(self._draft, self._needs, steps)
        self._copies = copies
        self._weights = WeightPath(plan, costs, self._needs, self._draft, copies)
        self._gradients = GradientPath(plan, costs, self._needs, self._draft, copies, update_order)
        self._inputs = Inputs(plan, self._needs, self._draft, copies, self._gradients, steps)
        self._following = [deque(step for step in steps if step.gpu == gpu) for gpu in range(plan.gpus)]
        self._left: dict[tuple[int, int], list[int]] = {}  # by group and microbatch: what first parts leave for second

    def run(self) -> Draft:
        for step in self._steps:
            self._copies.come_to(step)
            self._following[step.gpu].popleft()
            self._weights.fetch(step.group)
            self._inputs.fetch(step)
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
        self._gradients.all_ended()
        self._weights.refresh_residents(self._gradients.updated)
        return self._draft

    def _fetch_ahead(self, step: Step) -> None:
        allowed, following = self._ahead[step.group.index], self._following[step.gpu]
        needy = next((other for other in following if other.kind is not TaskKind.BACKWARD_WEIGHT), None)
        if allowed >= Ahead.INPUTS and needy is not None:
            self._inputs.fetch(needy)
        upcoming = next((other.group for other in following if other.group is not step.group), None)
        if allowed >= Ahead.WEIGHTS and upcoming is not None:
            self._weights.fetch_share(upcoming, step)

    def _forward(self, step: Step) -> None:
        receiver = self._inputs.receiver(step)
        out = step.group.pack[1] + 1
        leaving = [Need(TensorKind.ACTIVATION, (out, out), step.samples)]
        stashed = self._inputs.stashed(step, receiver)
        leaving += [Need(TensorKind.STASH, (layer, layer), step.samples) for layer in stashed]
        outputs = [(need, self._buffer(step, need)) for need in leaving if self._needs.bytes(need)]
        self._compute_forward(step, [buffer for _, buffer in outputs])
        for need, buffer in outputs:
            if need.kind is TensorKind.ACTIVATION:
                self._inputs.send(step, need, buffer, receiver)
            else:
                self._inputs.stash(step, need, buffer)
        if _is_last(step):
            self._weights.send_module_buffers_home(step.group)

    def _recompute(self, step: Step) -> None:
        """Repeat a forward. What comes out stays for the next step that takes it, on this GPU."""
        out = step.group.pack[1] + 1
        made = Need(TensorKind.STASH, (out, out), step.samples)
        output = self._buffer(step, made) if self._needs.bytes(made) else None
        self._compute_forward(step, [] if output is None else [output])
        if output is not None:
            self._inputs.arrive(step.gpu, made, output)

    def _backward(self, step: Step) -> None:
        gradient = self._gradients.buffer(step.group)
        workspace = self._costs.backward_workspace_bytes(*step.group.pack, _batch(step))
        self._compute_gradient(step, [] if gradient is None else [gradient], workspace)
        if _is_last(step):
            self._gradients.backward_ended(step.group)

    def _backward_input(self, step: Step) -> None:
        """All that it reads, and what it holds of autograd's, stays on the GPU for the second part."""
        pack, u = step.group.pack, _batch(step)
        held = self._workspace(step, self._costs.held_bytes(*pack, u))
        inputs = self._compute_gradient(step, held, self._costs.parts_workspace_bytes(*pack, u))
        self._left[step.group.index, step.microbatch] = [*inputs, *held]

    def _backward_weight(self, step: Step) -> None:
        gradient = self._gradients.buffer(step.group)
        assert gradient is not None, "only packs with gradients are done in two parts"
        left = self._left.pop((step.group.index, step.microbatch))
        workspace = self._costs.parts_workspace_bytes(*step.group.pack, _batch(step))
        self._compute(step, left, [gradient], workspace)
        if _is_last(step):
            self._gradients.backward_ended(step.group)

    def _compute_forward(self, step: Step, outputs: list[int]) -> None:
        workspace = self._costs.forward_workspace_bytes(*step.group.pack, _batch(step))
        self._compute(step, self._inputs.take(step), outputs, workspace)

    def _compute_gradient(self, step: Step, writes: list[int], workspace: int) -> list[int]:
        """Go back through the pack, send the gradient of its input on, and module buffers home; what was taken in."""
        first, last = step.group.pack
        receiver = self._inputs.receiver(step)
        leaving = Need(TensorKind.ACTIVATION_GRADIENT, (first, first), step.samples)
        outgoing = self._buffer(step, leaving) if first > 0 and self._needs.bytes(leaving) else None
        inputs = self._inputs.take(step)
        self._compute(step, inputs, [*([] if outgoing is None else [outgoing]), *writes], workspace)
        if outgoing is not None:
            self._inputs.send(step, leaving, outgoing, receiver)
        if _is_last(step) and last == self._needs.last_layer:
            self._weights.send_module_buffers_home(step.group)
        return inputs

    def _compute(self, step: Step, inputs: list[int], outputs: list[int], workspace: int) -> None:
        changed = self._weights.module_buffers_changed_by(step)
        self._draft.add(
            step.kind, (step.gpu, Lane.COMPUTE), step.group.pack, samples=step.samples, microbatch=step.microbatch,
            reads=[*self._weights.of(step.group).ids, *inputs],
            writes=[*outputs, *self._workspace(step, workspace), *changed], group=step.group.index,
        )  # fmt: skip

    def _update_on_gpu(self, step: Step) -> None:
        group, weights = step.group, self._weights.of(step.group)
        inputs = self._inputs.take(step)
        swapped = [number for number in inputs if self._draft.buffers[number].kind is TensorKind.OPTIMIZER_STATE]
        state = Need(TensorKind.OPTIMIZER_STATE, group.pack, shard=shard_of(self._plan, step.gpu))
        resident = self._resident_state(step, state)
        gradient = self._gradients.sum(group)
        self._draft.add(
            TaskKind.UPDATE, (step.gpu, Lane.COMPUTE), group.pack,
            reads=[*weights.ids, *inputs, *resident, *([] if gradient is None else [gradient])],
            writes=[*weights.weights, *swapped, *resident], after=self._gradients.all_ended(), group=group.index,
            shard=state.shard,
        )  # fmt: skip
        self._weights.updated(group)
        for buffer in swapped:
            self._copies.send_home(group, state, buffer)

    def _resident_state(self, step: Step, state: Need) -> list[int]:
        """The pack's optimizer state, or the GPU's shard of it, if it stays on the GPU that updates it."""
        size = self._needs.bytes(state)
        if step.group.pack_index not in self._plan.resident_state or not size:
            return []
        return [self._draft.buffer(step.gpu, state.kind, state.run, size, shard=state.shard, resident=True)]

    def _workspace(self, step: Step, size: int) -> list[int]:
        """A buffer for autograd; none of no bytes."""
        if not size:
            return []
        return [self._draft.buffer(step.gpu, TensorKind.WORKSPACE, step.group.pack, size, step.samples)]

    def _buffer(self, step: Step, need: Need) -> int:
        return self._draft.buffer(step.gpu, need.kind, need.run, self._needs.bytes(need), need.samples)


def _is_last(step: Step) -> bool:
    """Of its group's microbatches."""
    return step.microbatch == len(step.group.pieces) - 1


def _batch(step: Step) -> int:
    if step.samples is None:
        raise AssertionError(f"{step} has no samples")
    return step.samples[1] - step.samples[0]
