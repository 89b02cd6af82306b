"""What the artifact knows of a model: its layers, profiled on a GTX 1080 Ti, from the tables beside its predictions."""

from __future__ import annotations

import csv
from bisect import bisect_left
from functools import cache
from pathlib import Path
from typing import Literal

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"

Phase = Literal["FWD", "BWD"]


class Profile:
    """Times, memory and sizes of packs. Figures between profiled microbatch sizes lie on a straight line, by layer."""

    def __init__(self, folder: Path) -> None:
        times, memory = _rows(folder, "layer_time"), _rows(folder, "layer_memory")
        self._seconds = {phase: _Table(_of(times, phase), "gpu_seconds") for phase in ("FWD", "BWD")}
        self._memory = {phase: _Table(_of(memory, phase), "bytes") for phase in ("FWD", "BWD")}
        self._inputs = _Table(_rows(folder, "activation"), "input_bytes")
        self._state = [int(row["weight_bytes"]) + int(row["buffer_bytes"]) for row in _rows(folder, "layer_size")]
        self._updates = [float(row["cpu_seconds"]) for row in _rows(folder, "update_time")]

    def seconds(self, phase: Phase, first: int, last: int, u: int) -> float:
        """One microbatch of ``u`` samples through a pack. BWD contains a forward."""
        return sum(self._seconds[phase].at(u)[first : last + 1])

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
        return sum(self._updates[first : last + 1])


class _Table:
    """A figure for every layer at the profiled microbatch sizes."""

    def __init__(self, rows: list[dict[str, str]], column: str) -> None:
        self._by_size: dict[int, list[float]] = {}
        for row in rows:
            figures = self._by_size.setdefault(int(row["microbatch"]), [])
            assert len(figures) == int(row["layer"])
            figures.append(_number(row[column]))
        self._profiled = sorted(self._by_size)

    def at(self, u: int) -> list[float]:
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


def _rows(folder: Path, table: str) -> list[dict[str, str]]:
    with (folder / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def _of(rows: list[dict[str, str]], phase: str) -> list[dict[str, str]]:
    return [row for row in rows if row["phase"] == phase]


def _number(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)
