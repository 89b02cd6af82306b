"""A LayerProfile: what the public Harmony artifact measures of a model, layer by layer, as plain numbers.

Each layer alone ran one microbatch on an otherwise empty GPU. ``FWD`` is a forward without gradient recording; ``BWD``
a forward *with* it and the backward after it, so it contains the recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Pass(Enum):
    """What was run."""

    FORWARD = "FWD"
    BACKWARD = "BWD"


class LayerSize(NamedTuple):
    """Bytes of a layer that do not depend on the microbatch."""

    weight_bytes: int
    buffer_bytes: int
    optimizer_state_bytes: int


@dataclass(frozen=True)
class BySize(Generic[T]):
    """A figure of every layer at some microbatch sizes, ascending."""

    rows: dict[int, tuple[T, ...]]

    @property
    def microbatches(self) -> tuple[int, ...]:
        """The sizes."""
        return tuple(self.rows)

    def __getitem__(self, u: int) -> tuple[T, ...]:
        return self.rows[u]


class Sources(NamedTuple):
    """Where figures were read, for messages: files, or parts of one."""

    times: str
    memory: str
    updates: str


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """Times in nanoseconds as exact as they were written, sizes in bytes, a figure for each layer.

    ``peak_bytes`` is the most memory that the layer's tensors took, its weights, buffers and input included.
    ``input_bytes`` counts all that the layer takes in for a microbatch, at every size of ``times_ns``.
    ``update_gpu_ns`` is None if updates on the GPU were not measured.
    """

    source: str
    sources: Sources
    model: str
    device: str
    dtype: str
    optimizer: str
    label_bytes_per_sample: int
    sizes: tuple[LayerSize, ...]
    times_ns: dict[Pass, BySize[Decimal]]
    peak_bytes: dict[Pass, BySize[int]]
    input_bytes: BySize[int]
    update_cpu_ns: tuple[Decimal, ...] | None
    update_gpu_ns: tuple[Decimal, ...] | None
