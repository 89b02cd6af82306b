"""Jobs: a Harmony plan without a schedule, as what the groups of each pack have to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

Size = Callable[[int], int]
"""Bytes of a tensor by microbatch size."""


@dataclass(slots=True)
class Work:
    """A group. Before its first microbatch starts, ``in_first_ns`` of the GPU's swap-in lane are over (``state_ns`` for
    weights and buffers), before its last one ``in_ns``; ``out_ns`` leave from the end of its first microbatch on.
    ``held_bytes`` (with ``state_bytes`` of weights and buffers) are what it cannot do without while it computes.
    Forwards that are repeated to make its input are a part of the group: they compute for ``again_ns`` before it.

    A *hop* lies between the end of a microbatch in the group before and the start of the same samples here: of the
    first samples, and of the last. Bytes come in from the host, go out to it, and cross from GPU ``source`` (None:
    nothing does).

    ``first_ns`` and ``last_ns`` are of the first and last microbatch, until they are handed on. Of backwards in two
    parts, of all ``compute_ns`` at most ``late_ns`` come after the last one was, and at least ``late_least_ns``.
    """

    gpu: int
    compute_ns: float
    first_ns: float
    last_ns: float
    state_ns: float
    in_first_ns: float
    in_ns: float
    in_bytes: int
    state_bytes: int
    held_bytes: int
    late_ns: float = 0.0
    late_least_ns: float = 0.0
    again_ns: float = 0.0
    out_ns: float = 0.0
    out_bytes: int = 0
    hop_first_ns: float = 0.0
    hop_last_ns: float = 0.0
    source: int | None = None
    cross_bytes: int = 0


@dataclass(slots=True)
class Job:
    """A pack's groups: one in a pipeline, one on each GPU in data parallel.

    When all of them have ended (where updates are at the end of the step: those of all packs), each GPU of ``updaters``
    (none: the host) updates for at least ``update_ns``; ``before_update_ns`` pass before that (what it takes comes in
    for ``state_in_ns``), ``after_update_ns`` after it.
    ``sent_bytes`` go over the ring of all GPUs before it.
    """

    works: list[Work]
    updaters: tuple[int, ...] = ()
    before_update_ns: float = 0.0
    state_in_ns: float = 0.0
    update_ns: float = 0.0
    after_update_ns: float = 0.0
    sent_bytes: int = 0


class Batches(NamedTuple):
    """The microbatches of a group: ``number`` of them, all but the last of size ``first``."""

    number: int
    first: int
    last: int

    @classmethod
    def of(cls, samples: int, u: int) -> Batches:
        """So many samples in pieces of ``u``; the last may be smaller."""
        number = -(-samples // u)
        return cls(number, min(u, samples), samples - (number - 1) * u)

    def total(self, figure: Callable[[int], float]) -> float:
        """Sum of a figure over the microbatches."""
        return (self.number - 1) * figure(self.first) + figure(self.last)

    def total_bytes(self, size: Size) -> int:
        """Sum of bytes over the microbatches."""
        return (self.number - 1) * size(self.first) + size(self.last)
