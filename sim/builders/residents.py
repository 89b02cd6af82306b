"""What stays in GPU memory from step to step: weights and optimizer state of some backward packs.

Weights of a pack stay on the GPU of its backward (in data parallel on all GPUs); neither forwards nor backwards bring
them in there. Optimizer state stays where the update is. An update on a GPU changes what stays there in place; wherever
else the weights stay, they come in again after the update (where each GPU updates a shard, everywhere), so that a step
leaves things as it found them. Updated weights go home only if someone takes them from there.
"""

from __future__ import annotations

from collections.abc import Iterator

from traces.costs import Costs

from ..plan import HarmonyPlan
from ..schedule import TaskKind, TensorKind
from ..shards import Shards
from .needs import Run, runs_where
from .order import Group, place_groups, shard_of, takes_update


class Residents:
    """Answers for one plan and trace."""

    def __init__(self, plan: HarmonyPlan, costs: Costs) -> None:
        self._plan, self._costs = plan, costs
        self._users: list[set[int]] = [set() for _ in range(plan.layer_count)]  # GPUs that a layer runs on
        self._stays: list[set[int]] = [set() for _ in range(plan.layer_count)]  # of these, where its weights stay
        self._held = [0] * plan.gpus
        self._is_empty = not plan.resident_weights
        if plan.resident_weights or plan.resident_state:
            for group in place_groups(plan):
                self._add(group)

    def _add(self, group: Group) -> None:
        layers = range(group.pack[0], group.pack[1] + 1)
        for layer in layers:
            self._users[layer].add(group.gpu)
        if group.kind is not TaskKind.BACKWARD:
            return
        if group.pack_index in self._plan.resident_weights:
            self._held[group.gpu] += self._costs.weight_bytes(*group.pack)
            for layer in layers:
                self._stays[layer].add(group.gpu)
        if group.pack_index in self._plan.resident_state and takes_update(self._plan, group):
            self._held[group.gpu] += self._state_bytes(group)

    def _state_bytes(self, group: Group) -> int:
        """Of the group's pack, or of the shard that its GPU updates."""
        shard = shard_of(self._plan, group.gpu)
        if shard is None:
            return self._costs.optimizer_state_bytes(*group.pack)
        return Shards(self._costs, self._plan.gpus).bytes(TensorKind.OPTIMIZER_STATE, group.pack, shard)

    def weights(self) -> Iterator[tuple[int, int]]:
        """Each pack whose weights stay, and a GPU on which they do; in the order of updates."""
        for index in reversed(self._plan.resident_weights):
            for gpu in sorted(self._stays[self._plan.packs_bwd[index][0]]):
                yield index, gpu

    def held_bytes(self, gpu: int) -> int:
        """What stays on a GPU."""
        return self._held[gpu]

    def swapped_runs(self, gpu: int, run: Run) -> list[Run]:
        """Of some layers those whose weights must come in for a task on this GPU."""
        return [run] if self._is_empty else list(runs_where(run, lambda layer: gpu not in self._stays[layer]))

    def swapped_bytes(self, gpu: int, run: Run) -> int:
        """Bytes of these weights."""
        return sum(self._costs.weight_bytes(*part) for part in self.swapped_runs(gpu, run))

    def go_home(self, gpu: int, layer: int) -> bool:
        """Whether a layer's weights must go home when this GPU has updated them: unless they stay there, and no other
        GPU takes them, and no tied layer; nor will the layer itself, when another one has updated its tied weights."""
        alone = self._stays[layer] == {gpu} == self._users[layer]
        return not alone or bool(self._costs.tied_partners(layer) or self._costs.tied_owners(layer))
