"""What follows a backward pack of a Harmony plan: its gradients are reduced, go home, and the update runs.

================  ==========================================================================================
CPU update        reduced gradient out by the pack's owner, host updates
GPU update        owner fetches the optimizer state, updates, writes weights and state back
``reduce=ring``   all-reduce between the GPUs while the gradients are resident
``=host``         every GPU writes its gradient out, the host adds them in rank order
``=scatter``      reduce-scatter between the GPUs; then every GPU is the owner of its shard: it writes that of
                  the gradient out (one update in the host, of the whole pack, when all are there), or fetches
                  that of the optimizer state, updates, and writes that of weights and state back
tied weights      the pack that does not own them sends its partial gradient home; the owner's update adds it
at the end        all gradients go home as for a CPU update; after the last, the host takes the norm of them all; then
                  come all updates, and those on GPUs fetch weights and gradients too
================  ==========================================================================================

In closed form, for N GPUs together, ``scatter`` moves dW out with a CPU update; K in, W and K out with one on the GPU;
and (N-1)·dW between GPUs, where ``ring`` moves twice that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from traces.costs import Costs

from ..plan import HarmonyPlan, Pack
from ..schedule import Lane, TaskKind, TensorKind
from .copies import Copies
from .draft import Draft
from .needs import Need, Needs, Run, runs_where
from .order import Group, is_data_parallel, shard_of, takes_update


class GradientPath:
    """Gradient buffers on the GPUs, and which gradients are complete at home at this point of the total order."""

    def __init__(
        self,
        plan: HarmonyPlan,
        costs: Costs,
        needs: Needs,
        draft: Draft,
        copies: Copies,
        update_order: Sequence[Pack],
    ) -> None:
        self._plan, self._costs, self._needs, self._draft, self._copies = plan, costs, needs, draft, copies
        self._replicas = plan.gpus if is_data_parallel(plan) else 1
        self._on_gpu: dict[int, int] = {}  # group -> gradient buffer
        self._sums: dict[int, int] = {}  # group -> what holds its GPU's sum over all GPUs: that, or a shard
        self._to_update, self._ready = list(update_order), set[Pack]()
        self._norm: int | None = None
        self._ended: dict[Pack, list[Group]] = {}
        self._written: dict[Pack, list[int]] = {}  # host replicas waiting to be added
        self.updated: dict[int, int] = {}  # layer -> the update that the host makes of it
        self._home: dict[int, list[int]] = {}  # layer -> entries after which its home gradient is complete
        partial = [run for pack in plan.packs_bwd for run in needs.partial_gradients(pack)]
        self._partial = frozenset(layer for first, last in partial for layer in range(first, last + 1))

    def buffer(self, group: Group) -> int | None:
        """The buffer in which the group accumulates; None for packs without gradients."""
        size = self._costs.gradient_bytes(*group.pack)
        if group.index not in self._on_gpu and size:
            self._on_gpu[group.index] = self._draft.buffer(group.gpu, TensorKind.GRADIENT, group.pack, size)
        return self._on_gpu.get(group.index)

    def sum(self, group: Group) -> int | None:
        """The buffer of the reduced gradient, or of its shard, on the group's GPU; None if that has no bytes."""
        return self._sums.get(group.index)

    def home(self, run: Run) -> list[int] | None:
        """Entries after which the home gradients of these layers are complete; None while some are not."""
        layers = [layer for layer in range(run[0], run[1] + 1) if self._costs.gradient_bytes(layer, layer)]
        if not all(layer in self._home for layer in layers):
            return None
        return [entry for layer in layers for entry in self._home[layer]]

    def backward_ended(self, group: Group) -> None:
        """The group has seen its last microbatch: reduce and update as soon as all replicas have."""
        gradient = self._on_gpu.get(group.index)
        if gradient is None:
            return
        ended = self._ended.setdefault(group.pack, [])
        ended.append(group)
        if self._needs.reduced_by_host:
            self._write_replica(group, gradient)
        if len(ended) < self._replicas:
            return
        if self._needs.reduced_by_host:
            self._reduce_on_host(group.pack)
        else:
            self._reduce_on_gpus(sorted(ended, key=lambda group: group.gpu))
        self._ready.add(group.pack)
        if not self._needs.updates_at_end:
            self._update_what_is_ready()

    def all_ended(self) -> list[int]:
        """All backwards have: what updates at the end of the step wait for, which is the norm, added by the first call.
        The host then does its updates. Nothing where packs are updated just in time."""
        if not self._needs.updates_at_end:
            return []
        if self._norm is None:
            home = [entry for entries in self._home.values() for entry in entries]
            ends = {entry.gpu: at for at, entry in enumerate(self._draft.entries) if entry.lane is Lane.COMPUTE}
            layers = 0, self._needs.last_layer
            self._norm = self._draft.add(TaskKind.NORM, (None, Lane.UPDATE), layers, after=[*home, *ends.values()])
            self._update_what_is_ready()
        return [self._norm]

    def _update_what_is_ready(self) -> None:
        while self._to_update and self._to_update[0] in self._ready and self._update_on_host(self._to_update[0]):
            del self._to_update[0]

    def _write_replica(self, group: Group, gradient: int) -> None:
        size = self._costs.gradient_bytes(*group.pack)
        replica = self._draft.buffer(None, TensorKind.GRADIENT, group.pack, size)
        self._copies.send_home(group, Need(TensorKind.GRADIENT, group.pack), gradient, writes=[replica])
        self._written.setdefault(group.pack, []).append(replica)

    def _reduce_on_host(self, pack: Pack) -> None:
        replicas = self._written.pop(pack)
        entry = self._draft.add(
            TaskKind.REDUCE, (None, Lane.UPDATE), pack, tensor_kind=TensorKind.GRADIENT, reads=replicas
        )
        self._complete(pack, entry)

    def _reduce_on_gpus(self, groups: Sequence[Group]) -> None:
        """Add the gradients of a pack's groups; what then leaves for the host goes there."""
        gradients = {group.index: self._on_gpu[group.index] for group in groups}
        if shard_of(self._plan, 0) is not None:
            sums = self._shard_buffers(groups)
            self._add_collective(TaskKind.REDUCE_SCATTER, groups, gradients, sums)
        else:
            sums = gradients
            if len(groups) > 1:
                self._add_collective(TaskKind.ALLREDUCE, groups, gradients, sums)
        self._sums.update(sums)
        for group in groups:
            if takes_update(self._plan, group):
                self._send_home(group)

    def _shard_buffers(self, groups: Sequence[Group]) -> dict[int, int]:
        """By group; where there are more GPUs than grains, some have none."""
        needs = {g: Need(TensorKind.GRADIENT, g.pack, shard=shard_of(self._plan, g.gpu)) for g in groups}
        return {
            group.index: self._draft.buffer(group.gpu, need.kind, need.run, size, shard=need.shard)
            for group, need in needs.items()
            if (size := self._needs.bytes(need))
        }

    def _add_collective(
        self, kind: TaskKind, groups: Sequence[Group], gradients: Mapping[int, int], sums: Mapping[int, int]
    ) -> None:
        """Over a ring each GPU sends (N-1)/N of its gradient, and in an all-reduce as much again."""
        passes = 2 if kind is TaskKind.ALLREDUCE else 1
        pack = groups[0].pack
        self._draft.add(
            kind, (None, Lane.COLLECTIVE), pack, tensor_kind=TensorKind.GRADIENT,
            size=passes * (len(groups) - 1) * self._costs.gradient_bytes(*pack),
            reads=list(gradients.values()), writes=list(sums.values()),
        )  # fmt: skip

    def _send_home(self, group: Group) -> None:
        """All that a GPU has of a gradient; or only what another pack's update adds."""
        whole = self._needs.gradients_go_home
        runs = [group.pack] if whole else runs_where(group.pack, lambda layer: layer in self._partial)
        for run in runs:
            need = Need(TensorKind.GRADIENT, run, shard=shard_of(self._plan, group.gpu))
            if self._needs.bytes(need):
                self._complete(run, self._copies.send_home(group, need, self._sums[group.index]))

    def _complete(self, run: Run, entry: int) -> None:
        for layer in range(run[0], run[1] + 1):
            self._home.setdefault(layer, []).append(entry)

    def _update_on_host(self, pack: Pack) -> bool:
        """Update a pack if there is anything to update; False if gradients that it adds are not home yet."""
        if not any(self._costs.updates(layer) for layer in range(pack[0], pack[1] + 1)):
            return True
        after: list[int] = []
        for run in [pack, *self._needs.partial_gradients(pack)]:
            entries = self.home(run)
            if entries is None:
                return False
            after.extend(entries)
        update = self._draft.add(TaskKind.UPDATE, (None, Lane.UPDATE), pack, after=after)
        self.updated.update((layer, update) for layer in range(pack[0], pack[1] + 1) if self._costs.updates(layer))
        return True
