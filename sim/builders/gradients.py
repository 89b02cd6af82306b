"""What follows a backward pack of a Harmony plan: its gradients are reduced, go home, and the update runs.

================  ==========================================================================================
CPU update        reduced gradient out by the pack's owner, host updates
GPU update        owner fetches the optimizer state, updates, writes weights and state back
``reduce=ring``   all-reduce between the GPUs while the gradients are resident
``reduce=host``   every GPU writes its gradient out, the host adds them in rank order
tied weights      the pack that does not own them sends its partial gradient home; the owner's update adds it
================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable

from traces.costs import Costs

from ..plan import HarmonyPlan, Pack, UpdateOn
from ..schedule import Lane, TaskKind, TensorKind
from .draft import Draft
from .needs import Needs, Run, home_bytes, runs_where
from .order import Group, is_data_parallel, update_owner


class GradientPath:
    """Gradient buffers on the GPUs, and which gradients are complete at home at this point of the total order."""

    def __init__(self, plan: HarmonyPlan, costs: Costs, needs: Needs, draft: Draft) -> None:
        self._plan, self._costs, self._needs, self._draft = plan, costs, needs, draft
        self._replicas = plan.gpus if is_data_parallel(plan) else 1
        self._on_gpu: dict[int, int] = {}  # group -> gradient buffer
        self._ended: dict[Pack, list[Group]] = {}
        self._written: dict[Pack, list[int]] = {}  # host replicas waiting to be added
        self._home: dict[int, int] = {}  # layer -> entry after which its home gradient is complete
        partial = [run for pack in plan.packs_bwd for run in needs.partial_gradients(pack)]
        self._partial = frozenset(layer for first, last in partial for layer in range(first, last + 1))

    def buffer(self, group: Group) -> int | None:
        """The buffer in which the group accumulates; None for packs without gradients."""
        size = self._costs.gradient_bytes(*group.pack)
        if group.index not in self._on_gpu and size:
            self._on_gpu[group.index] = self._draft.buffer(group.gpu, TensorKind.GRADIENT, group.pack, size)
        return self._on_gpu.get(group.index)

    def home(self, run: Run) -> list[int] | None:
        """Entries after which the home gradients of these layers are complete; None while some are not."""
        layers = [layer for layer in range(run[0], run[1] + 1) if self._costs.gradient_bytes(layer, layer)]
        return [self._home[layer] for layer in layers] if all(layer in self._home for layer in layers) else None

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
            if self._replicas > 1:
                self._all_reduce(ended)
            self._send_home(next(g for g in ended if g.gpu == update_owner(self._plan, g)))
        if self._plan.update is UpdateOn.CPU:
            self._update_on_host(group.pack)

    def _write_replica(self, group: Group, gradient: int) -> None:
        size = self._costs.gradient_bytes(*group.pack)
        replica = self._draft.buffer(None, TensorKind.GRADIENT, group.pack, size)
        self._copy_out(group, group.pack, gradient, [replica])
        self._written.setdefault(group.pack, []).append(replica)

    def _reduce_on_host(self, pack: Pack) -> None:
        replicas = self._written.pop(pack)
        entry = self._draft.add(
            TaskKind.REDUCE, (None, Lane.UPDATE), pack, tensor_kind=TensorKind.GRADIENT, reads=replicas
        )
        self._complete(pack, entry)

    def _all_reduce(self, groups: Iterable[Group]) -> None:
        groups = sorted(groups, key=lambda group: group.gpu)
        gradients = [self._on_gpu[group.index] for group in groups]
        pack = groups[0].pack
        sent = 2 * (len(groups) - 1) * self._costs.gradient_bytes(*pack)
        self._draft.add(
            TaskKind.ALLREDUCE, (None, Lane.COLLECTIVE), pack, tensor_kind=TensorKind.GRADIENT, size=sent,
            reads=gradients, writes=gradients,
        )  # fmt: skip

    def _send_home(self, group: Group) -> None:
        """All of a gradient for a CPU update; for a GPU update only what another pack's update adds."""
        on_cpu = self._plan.update is UpdateOn.CPU
        runs = [group.pack] if on_cpu else runs_where(group.pack, lambda layer: layer in self._partial)
        for run in runs:
            if home_bytes(self._costs, TensorKind.GRADIENT, run):
                self._complete(run, self._copy_out(group, run, self._on_gpu[group.index], []))

    def _copy_out(self, group: Group, run: Run, gradient: int, replica: list[int]) -> int:
        return self._draft.add(
            TaskKind.SWAP_OUT, (group.gpu, Lane.SWAP_OUT), run, tensor_kind=TensorKind.GRADIENT,
            size=home_bytes(self._costs, TensorKind.GRADIENT, run), reads=[gradient], writes=replica, group=group.index,
        )  # fmt: skip

    def _complete(self, run: Run, entry: int) -> None:
        self._home.update((layer, entry) for layer in range(run[0], run[1] + 1))

    def _update_on_host(self, pack: Pack) -> None:
        if not any(self._costs.updates(layer) for layer in range(pack[0], pack[1] + 1)):
            return
        after: list[int] = []
        for run in [pack, *self._needs.partial_gradients(pack)]:
            entries = self.home(run)
            if entries is None:
                raise AssertionError(f"the gradients of layers {run} are not home when pack {pack} is updated")
            after.extend(entries)
        self._draft.add(TaskKind.UPDATE, (None, Lane.UPDATE), pack, after=after)
