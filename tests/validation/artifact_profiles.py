"""What the artifact makes of a profile: times, memory and sizes of packs, by its own rules."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sim.units import NS_PER_S
from traces.importing.profile import BySize
from traces.importing.profile_tables import read_profile

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"

Phase = Literal["FWD", "BWD"]


class Profile:
    """Times, memory and sizes of packs. Figures between profiled microbatch sizes lie on a straight line, by layer."""

    def __init__(self, folder: Path) -> None:
        profile = read_profile(folder)
        self._times = {each.value: _Lines(by_size) for each, by_size in profile.times_ns.items()}
        self._memory = {each.value: _Lines(by_size) for each, by_size in profile.peak_bytes.items()}
        self._inputs = _Lines(profile.input_bytes)
        self._state = [size.weight_bytes + size.buffer_bytes for size in profile.sizes]
        self._updates = profile.update_cpu_ns or ()

    def seconds(self, phase: Phase, first: int, last: int, u: int) -> float:
        """One microbatch of ``u`` samples through a pack. BWD contains a forward."""
        return float(sum(self._times[phase].at(u)[first : last + 1])) / NS_PER_S

    def memory_bytes(self, phase: Phase, first: int, last: int, u: int) -> int:
        """A pack's layers, each with its own peak; tensors between two of them count once."""
        own = sum(int(size) for size in self._memory[phase].at(u)[first : last + 1])
        return own - sum(self.input_bytes(layer, u) for layer in range(first + 1, last + 1))

    def input_bytes(self, layer: int, u: int) -> int:
        """Input of a layer; one past the last layer there is none."""
        return int(self._inputs.at(u)[layer]) if layer < len(self._state) else 0

    def state_bytes(self, first: int, last: int) -> int:
        """Weights and buffers of a pack. Its gradients and buffers are as large."""
        return sum(self._state[first : last + 1])

    def update_seconds(self, first: int, last: int) -> float:
        """Optimizer step of a pack on the CPU."""
        return float(sum(self._updates[first : last + 1])) / NS_PER_S


class _Lines:
    """A figure for every layer at any microbatch size between the least and the largest profiled."""

    def __init__(self, profiled: BySize[Any]) -> None:
        self._profiled = profiled.microbatches
        self._by_size: dict[int, Sequence[Any]] = dict(profiled.rows)

    def at(self, u: int) -> Sequence[Any]:
        """The figures at this size, by layer."""
        if u not in self._by_size:
            if not self._profiled[0] < u < self._profiled[-1]:
                raise ValueError(
                    f"microbatch size {u} is outside the profiled {self._profiled[0]}-{self._profiled[-1]}"
                )
            place = bisect_left(self._profiled, u)
            below, above = self._profiled[place - 1 : place + 1]
            self._by_size[u] = [
                low + (high - low) * (u - below) / (above - below)
                for low, high in zip(self._by_size[below], self._by_size[above], strict=True)
            ]
        return self._by_size[u]


@cache
def profile_of(model: str) -> Profile:
    """The profile of one of the artifact's models."""
    return Profile(REFERENCE / "gtx1080ti" / model)
