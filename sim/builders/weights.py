"""Weights and module buffers of a Harmony plan on its GPUs: they come in for each group, and go home when changed.

What stays on a GPU from step to step (``residents.py``) need not come in; where it was updated elsewhere, it comes in
again as the last thing of the step. For an update at the end of the step just what it updates comes in: not the weights
that are frozen, and where each GPU updates a shard, that shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from traces.costs import Costs

from ..home import home_bytes
from ..plan import HarmonyPlan
from ..schedule import TaskKind, TensorKind
from .copies import Copies
from .draft import Draft
from .needs import Need, Needs, Run, runs_where
from .order import Group, Step, is_data_parallel, shard_of
from .residents import Residents


class GroupWeights:
    """A group's weights and module buffers on its GPU, and how far those have come in that do not stay there."""

    def __init__(self, group: Group, swapped: Sequence[Run], resident: Sequence[int]) -> None:
        self.next_layer = group.pack[0]
        self.swapped: dict[Run, int | None] = dict.fromkeys(swapped)
        self.resident = resident
        self.module_buffer: int | None = None

    @property
    def weights(self) -> list[int]:
        """The buffers of weights."""
        return [*self.resident, *(buffer for buffer in self.swapped.values() if buffer is not None)]

    @property
    def ids(self) -> list[int]:
        """All of its buffers."""
        return self.weights if self.module_buffer is None else [*self.weights, self.module_buffer]


class _HomeCopies:
    """Copies from or to the home of module buffers, which forwards change. Those of the same layers stay in order."""

    def __init__(self) -> None:
        self._made: list[tuple[Run, int]] = []

    def add(self, run: Run, copy: int) -> None:
        self._made.append((run, copy))

    def touching(self, run: Run) -> list[int]:
        return [copy for (first, last), copy in self._made if first <= run[1] and run[0] <= last]


class WeightPath:
    """Which weights are where at this point of the total order."""

    def __init__(self, plan: HarmonyPlan, costs: Costs, needs: Needs, draft: Draft, copies: Copies) -> None:
        self._plan, self._costs, self._needs, self._draft, self._copies = plan, costs, needs, draft, copies
        self._residents = Residents(plan, costs)
        self._groups: dict[int, GroupWeights] = {}
        self._resident: dict[tuple[int, int], int] = {}  # pack and GPU -> buffer
        for index, gpu in self._residents.weights():
            pack, kind = plan.packs_bwd[index], TensorKind.WEIGHT
            if size := home_bytes(costs, kind, pack):
                self._resident[index, gpu] = draft.buffer(gpu, kind, pack, size, resident=True)
        self._updated_on: dict[int, int] = {}  # pack -> the GPU that has updated it
        self._sent_home: dict[int, list[int]] = {}  # layer -> the copies of its updated weights
        self._fetched_to_update: dict[int, list[int]] = {}  # layer -> the copies of its weights, at the end of the step
        self._buffers_read, self._buffers_written = _HomeCopies(), _HomeCopies()

    def of(self, group: Group) -> GroupWeights:
        """What a group has of them."""
        if group.index not in self._groups:
            first, last = group.pack
            packs = [(self._plan.packs_bwd[index], gpu, number) for (index, gpu), number in self._resident.items()]
            resident = [number for (a, b), gpu, number in packs if gpu == group.gpu and a <= last and first <= b]
            runs = [group.pack] if group.kind is not TaskKind.UPDATE else runs_where(group.pack, self._costs.updates)
            swapped = [part for run in runs for part in self._residents.swapped_runs(group.gpu, run)]
            self._groups[group.index] = GroupWeights(group, swapped, resident)
        return self._groups[group.index]

    def fetch(self, group: Group) -> None:
        """Bring in what the group still lacks."""
        self._fetch(group, group.pack[1])

    def fetch_share(self, upcoming: Group, step: Step) -> None:
        """Bring in the share of a later group's that should have started to come in when this microbatch starts."""
        first, last = upcoming.pack
        share = (step.microbatch + 1) / max(1, len(step.group.pieces))
        quota = self._residents.swapped_bytes(step.gpu, upcoming.pack) * share
        layer = first
        while layer < last and self._residents.swapped_bytes(step.gpu, (first, layer)) < quota:
            layer += 1
        self._fetch(upcoming, layer)

    def _fetch(self, group: Group, upto: int) -> None:
        """Bring in the group's weights up to this layer, as one copy, and its module buffers with the first."""
        state = self.of(group)
        first, last = state.next_layer, upto
        if first > last:
            return
        state.next_layer = last + 1
        if first == group.pack[0] and group.kind is not TaskKind.UPDATE:
            state.module_buffer = self._bring_in(group, TensorKind.BUFFER, group.pack, group.pack, None)
        for (start, end), buffer in state.swapped.items():
            run = max(first, start), min(last, end)
            if run[0] <= run[1]:
                state.swapped[start, end] = self._bring_in(group, TensorKind.WEIGHT, (start, end), run, buffer)

    def _bring_in(self, group: Group, kind: TensorKind, whole: Run, run: Run, buffer: int | None) -> int | None:
        """Copy a run of layers of a home tensor into the buffer for ``whole``, made now if there is none yet."""
        to_update = group.kind is TaskKind.UPDATE
        shard = shard_of(self._plan, group.gpu) if to_update else None
        need = Need(kind, run, shard=shard)
        if not self._needs.bytes(need):
            return buffer
        if buffer is None:
            size = self._needs.bytes(need._replace(run=whole))
            buffer = self._draft.buffer(group.gpu, kind, whole, size, shard=shard)
        is_module_buffer = kind is TensorKind.BUFFER
        after = self._buffers_written.touching(run) if is_module_buffer else []
        copy = self._copies.bring_in(group.gpu, need, buffer, after=after)
        if is_module_buffer:
            self._buffers_read.add(run, copy)
        if to_update:
            for layer in range(run[0], run[1] + 1):
                self._fetched_to_update.setdefault(layer, []).append(copy)
        return buffer

    def module_buffers_changed_by(self, step: Step) -> list[int]:
        """The group's, if this step's forward is the one that counts for them (recompute changes none)."""
        buffer = self.of(step.group).module_buffer
        first, last = step.group.pack
        forward = step.kind is TaskKind.FORWARD or (step.kind.goes_back and last == self._needs.last_layer)
        changes = forward and any(self._costs.trace.layers[layer].changes_buffers for layer in range(first, last + 1))
        return [buffer] if buffer is not None and changes else []

    def send_module_buffers_home(self, group: Group) -> None:
        """Write back what the forward changed; of data-parallel replicas the first GPU's is kept."""
        if is_data_parallel(self._plan) and group.gpu != 0:
            return
        layers = self._costs.trace.layers
        for run in runs_where(group.pack, lambda layer: layers[layer].changes_buffers):
            after = self._buffers_read.touching(run)
            copy = self._send_home(group, Need(TensorKind.BUFFER, run), self.of(group).module_buffer, after)
            if copy is not None:
                self._buffers_written.add(run, copy)

    def updated(self, group: Group) -> None:
        """The group's GPU has updated its pack, or its shard of it: what others take goes home."""
        if shard_of(self._plan, group.gpu) is None:
            self._updated_on[group.pack_index] = group.gpu
        goes = self._residents.go_home
        for run in runs_where(group.pack, lambda layer: self._costs.updates(layer) and goes(group.gpu, layer)):
            self._send_weights_home(group, run, self._holding(group, run))

    def _holding(self, group: Group, run: Run) -> int | None:
        """The buffer that has these layers' weights."""
        buffers = [self._draft.buffers[number] for number in self.of(group).weights]
        return next((b.id for b in buffers if b.layer_first <= run[0] and run[1] <= b.layer_last), None)

    def _send_weights_home(self, group: Group, run: Run, buffer: int | None) -> None:
        """Copy updated weights out. Where later layers use them too, after those have read them, and wrote back theirs,
        which are out of date."""
        layers = range(run[0], run[1] + 1)
        partners = {partner for layer in layers for partner in self._costs.tied_partners(layer)}
        others = [self._fetched_to_update, self._sent_home]
        after = [copy for partner in sorted(partners) for made in others for copy in made.get(partner, ())]
        shard = shard_of(self._plan, group.gpu)
        copy = self._send_home(group, Need(TensorKind.WEIGHT, run, shard=shard), buffer, after)
        if copy is not None:
            for layer in layers:
                self._sent_home.setdefault(layer, []).append(copy)

    def _send_home(self, group: Group, need: Need, buffer: int | None, after: Sequence[int]) -> int | None:
        """The copy's index, None if there is nothing to copy."""
        if buffer is None or not self._needs.bytes(need):
            return None
        return self._copies.send_home(group, need, buffer, after=after)

    def refresh_residents(self, host_updates: Mapping[int, int]) -> None:
        """Bring in again, as the last thing of the step, the weights that stay on a GPU and were updated elsewhere.

        ``host_updates``: of the layers that the host updates, the updates.
        """
        # By layer, when its weights at home are new.
        updates = {layer: [entry] for layer, entry in host_updates.items()} | self._sent_home
        for (index, gpu), buffer in self._resident.items():
            in_place = self._updated_on.get(index) == gpu

            def renewals(layer: int, in_place: bool = in_place) -> list[int]:
                """When all its weights are home, its own and tied ones, if some of them are old here."""
                tied = [entry for owner in self._costs.tied_owners(layer) for entry in updates.get(owner, ())]
                return [*tied, *updates.get(layer, ())] if tied or not in_place else []

            for run in runs_where(self._plan.packs_bwd[index], lambda layer: bool(renewals(layer))):
                after = [entry for layer in range(run[0], run[1] + 1) for entry in renewals(layer)]
                self._copies.bring_in(gpu, Need(TensorKind.WEIGHT, run), buffer, after=after)
