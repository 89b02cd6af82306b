"""What steps take besides weights: where it is, and how what one step makes becomes the input of a later one.

Boundary tensors go from GPU to GPU where the receiver has a slot for them, else through the host; stashes where the
plan says. Data, gradients and optimizer state come from home.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import HarmonyPlan, StashPlace
from ..schedule import Interval, TaskKind, TensorKind
from .copies import Copies
from .draft import Draft
from .gradients import GradientPath
from .needs import Need, Needs
from .order import Step, is_data_parallel


class _HostTensor:
    """x(l) or g(l) in dynamic host memory, piece by piece."""

    def __init__(self) -> None:
        self.pieces: list[tuple[Interval, int]] = []

    def covering(self, samples: Interval) -> list[int] | None:
        """Buffers that hold these samples together; None while some are not there yet."""
        found = [(piece, buffer) for piece, buffer in self.pieces if piece[0] < samples[1] and samples[0] < piece[1]]
        held = sum(min(p[1], samples[1]) - max(p[0], samples[0]) for p, _ in found)
        return [buffer for _, buffer in found] if held == samples[1] - samples[0] else None


class Inputs:
    """Where they are at this point of the total order."""

    def __init__(
        self,
        plan: HarmonyPlan,
        needs: Needs,
        draft: Draft,
        copies: Copies,
        gradients: GradientPath,
        steps: Sequence[Step],
    ) -> None:
        self._plan, self._needs, self._draft, self._copies, self._gradients = plan, needs, draft, copies, gradients
        # In a pipeline, the GPU that has the groups of a pack.
        self._runner = {(step.group.kind, step.group.pack_index): step.gpu for step in steps}
        places = {plan.packs_bwd[index][0]: place for index, place in plan.stash_places.items()}
        self._stashes = {layer: place for layer, place in places.items() if place is not StashPlace.RECOMPUTE}
        self._slots = plan.slots or max(-(-plan.minibatch // plan.u_fwd), -(-plan.minibatch // plan.u_bwd))
        self._arrived: dict[tuple[int, Need], int] = {}  # on a GPU, not yet consumed
        self._kept: dict[Need, int] = {}  # stashes on the GPUs of their backwards
        self._received: list[set[int]] = [set() for _ in range(plan.gpus)]  # of those, what other GPUs sent
        self._host: dict[tuple[TensorKind, int], _HostTensor] = {}
        self._backward_from = {first: index for index, (first, _) in enumerate(plan.packs_bwd)}

    def fetch(self, step: Step) -> None:
        """Make sure that all that the step takes, as far as it is there yet, is on its GPU or on its way to it."""
        for need in self._needs.of(step):
            self._fetch(step, need)

    def _fetch(self, step: Step, need: Need) -> None:
        if (step.gpu, need) in self._arrived:
            return
        if need in self._kept:
            self.arrive(step.gpu, need, self._copies.pass_on(step.gpu, need, self._kept[need], step.microbatch))
            return
        if need.kind is TensorKind.STASH and need.run[0] not in self._stashes:
            return  # it is to be made again, even where the host has it as a boundary activation
        sources: list[int] | None = []
        after: list[int] | None = []
        if need.at_boundary:
            sources = self._host_tensor(need).covering(need.samples or (0, 0))
        elif need.kind is TensorKind.GRADIENT:
            after = self._gradients.home(need.run)
        if sources is None or after is None:
            return
        size = self._needs.bytes(need)
        buffer = self._draft.buffer(step.gpu, need.kind, need.run, size, need.samples, shard=need.shard)
        microbatch = step.microbatch if need.samples else None
        self._copies.bring_in(step.gpu, need, buffer, microbatch, sources, after)
        self.arrive(step.gpu, need, buffer)

    def arrive(self, gpu: int, need: Need, buffer: int) -> None:
        """From now on the tensor is in a GPU's buffer, for the next step that takes it."""
        self._arrived[gpu, need] = buffer

    def take(self, step: Step) -> list[int]:
        """The step's input buffers; from now on they count as consumed."""
        taken = [self._arrived.pop((step.gpu, need)) for need in self._needs.of(step)]
        self._received[step.gpu].difference_update(taken)
        return taken

    def receiver(self, step: Step) -> int | None:
        """GPU that gets the step's boundary tensor straight from this one; None: it goes through the host.

        Through the host goes everything data-parallel, what a receiver has no slot for, and the last forward
        pack's output where the backward cuts the minibatch differently.
        """
        index = step.group.pack_index
        if is_data_parallel(self._plan) or (step.kind.goes_back and index == 0):
            return None
        if step.kind.goes_back:
            consumer = (TaskKind.BACKWARD, index - 1)
        elif index + 1 < len(self._plan.packs_fwd):
            consumer = (TaskKind.FORWARD, index + 1)
        elif self._plan.u_fwd == self._plan.u_bwd:
            consumer = (TaskKind.BACKWARD, len(self._plan.packs_bwd) - 1)
        else:
            return None
        gpu = self._runner[consumer]
        return gpu if len(self._received[gpu]) < self._slots else None

    def stashed(self, step: Step, receiver: int | None) -> list[int]:
        """Layers whose inputs a forward leaves as stashes, beside its boundary tensor."""
        first, last = step.group.pack
        layers = [layer for layer in range(first + 1, last + 2) if layer in self._stashes]
        if receiver is None and self._stashes.get(last + 1) is StashPlace.SWAP:
            layers.remove(last + 1)  # a boundary that goes through the host anyway serves as the stash
        return layers

    def stash(self, step: Step, need: Need, buffer: int) -> None:
        """Let a stash go where the plan has it: to the host, or to the GPU of its backward."""
        if self._stashes[need.run[0]] is StashPlace.SWAP:
            self.send(step, need, buffer, None)
            return
        gpu = step.gpu
        if not is_data_parallel(self._plan):
            gpu = self._runner[TaskKind.BACKWARD, self._backward_from[need.run[0]]]
        self._kept[need] = self._copies.pass_on(gpu, need, buffer, step.microbatch)

    def send(self, step: Step, need: Need, buffer: int, receiver: int | None) -> None:
        """Let what a step made go to another GPU (None: to the host)."""
        target = self._copies.pass_on(receiver, need, buffer, step.microbatch)
        if receiver is not None:
            self.arrive(receiver, need, target)
            self._received[receiver].add(target)
        elif need.samples is not None:
            self._host_tensor(need).pieces.append((need.samples, target))

    def _host_tensor(self, need: Need) -> _HostTensor:
        """x(l) is one host tensor, whether it went there as a boundary activation or as a stash."""
        kind = TensorKind.ACTIVATION if need.kind is TensorKind.STASH else need.kind
        return self._host.setdefault((kind, need.run[0]), _HostTensor())
