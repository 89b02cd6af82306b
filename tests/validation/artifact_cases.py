"""A schedule of the artifact as its case files state it, and the tasks that this makes."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from operator import itemgetter
from typing import Literal

import msgspec

from sim.plan import Pack, pieces, shares
from sim.schedule import Interval

from .artifact_profiles import Profile


class Constants(msgspec.Struct, frozen=True):
    """Bandwidths in bytes/s; ``time_del`` is what freeing a task's tensors takes, in seconds."""

    bw_swap: float
    bw_p2p: float
    bw_msg: float
    time_del: float


_NAMES_IN_FILE = {"ranks": "N", "minibatch": "D", "packs_fwd": "pack_fwd", "packs_bwd": "pack_bwd"}


class Case(msgspec.Struct, frozen=True, rename=_NAMES_IN_FILE):
    """What is given. Packs are ``(first layer, last layer)``."""

    id: str
    model: str
    mode: Literal["vDP", "vPP"]
    ranks: int
    minibatch: int
    u_fwd: int
    u_bwd: int
    packs_fwd: list[Pack]
    packs_bwd: list[Pack]
    constants: Constants

    @property
    def pipeline(self) -> bool:
        """True where tasks are dealt over several ranks; one rank alone is simulated as data parallel."""
        return self.mode == "vPP" and self.ranks > 1

    @property
    def replicas(self) -> int:
        """Ranks that run the same tasks, of which only the first is simulated."""
        return self.ranks if self.mode == "vDP" else 1

    @property
    def simulated_ranks(self) -> int:
        """Ranks that predictions are about."""
        return self.ranks if self.pipeline else 1

    @property
    def busy_ranks(self) -> int:
        """Ranks that have any task. Bandwidth to the host is divided by their number, always."""
        return min(self.ranks, len(self.packs_fwd) + len(self.packs_bwd)) if self.pipeline else self.replicas

    @property
    def loss_input_by_message(self) -> bool:
        """Whether the last forward hands its output over through host memory instead of peer to peer."""
        return self.pipeline and bool(self.packs_fwd) and self.u_fwd != self.u_bwd

    @property
    def samples(self) -> Interval:
        """Samples of a simulated rank."""
        return shares(self.minibatch, self.replicas)[0]


class TaskType(Enum):
    """Forward, backward of the pack with the loss (which has no forward), other backward."""

    F = "F"
    C = "C"
    B = "B"


@dataclass(frozen=True)
class ArtifactTask:
    """A pack on a rank, over all microbatches. The optimizer step of a C or B is the task with the next number.

    ``stashes`` are the layers whose input an F keeps for the recompute of a B.
    """

    number: int
    type: TaskType
    rank: int
    first: int
    last: int
    microbatches: list[Interval]
    stashes: tuple[int, ...]

    def size(self, microbatch: int) -> int:
        """Samples of a microbatch."""
        start, stop = self.microbatches[microbatch]
        return stop - start

    def completing(self, stop: int) -> int:
        """The microbatch that completes the samples before ``stop``."""
        return bisect_left(self.microbatches, stop, key=itemgetter(1))

    @property
    def parts(self) -> list[Pack]:
        """The pack cut before every layer whose input is stashed."""
        starts = sorted({self.first, *self.stashes})
        return list(zip(starts, [*(start - 1 for start in starts[1:]), self.last], strict=True))


def artifact_tasks(case: Case) -> list[ArtifactTask]:
    """All F, C and B of the simulated ranks, in order."""
    *others, with_loss = case.packs_bwd
    packs = chain(
        ((TaskType.F, pack) for pack in case.packs_fwd),
        [(TaskType.C, with_loss)],
        ((TaskType.B, pack) for pack in reversed(others)),
    )
    tasks: list[ArtifactTask] = []
    number = 0
    for count, (kind, (first, last)) in enumerate(packs):
        forward = kind is TaskType.F
        tasks.append(
            ArtifactTask(
                number=number,
                type=kind,
                rank=count % case.ranks if case.pipeline else 0,
                first=first,
                last=last,
                microbatches=pieces(*case.samples, case.u_fwd if forward else case.u_bwd),
                stashes=tuple(start for start, _ in others if first <= start <= last) if forward else (),
            )
        )
        number += 1 if forward else 2
    return tasks


def memory_by_rank(case: Case, profile: Profile) -> list[int]:
    """Bytes that each simulated rank needs: the most that one of its tasks alone takes with its first microbatch."""
    needs = [0] * case.simulated_ranks
    for task in artifact_tasks(case):
        needs[task.rank] = max(needs[task.rank], _task_bytes(task, profile))
    return needs


def _task_bytes(task: ArtifactTask, profile: Profile) -> int:
    u, first, last = task.size(0), task.first, task.last
    given, output = profile.input_bytes(first, u), profile.input_bytes(last + 1, u)
    if task.type is TaskType.F:
        kept = sum(profile.input_bytes(layer, u) for layer in task.stashes)
        return given + profile.memory_bytes("FWD", first, last, u) + output + kept
    gradient = given if first > 0 else 0
    return 2 * given + output + profile.memory_bytes("BWD", first, last, u) + gradient
