"""The Schedule: a training step, described once. The simulator and the executor both only follow it.

``tasks`` are listed in the one *total order* that the builder fixed; a task's id is its place in it. Each lane runs
its tasks in that order. A task starts when the tasks it ``waits_for`` have ended and its lanes are free. It allocates
its buffers when it starts and frees when it ends. The freeing that an allocation relies on is among ``waits_for``, so
memory never blocks and never exceeds the plan.

Naming of tensors: an ``activation``, ``stash`` or ``data`` tensor of layer ``l`` is x(l), the input of that layer
(``data`` of layer L, one past the last, are the labels); an ``activation_gradient`` of layer ``l`` is g(l), the
gradient with respect to that input. Weights, buffers, gradients and optimizer state name the layers they belong to.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from functools import cached_property

import msgspec

from .errors import ScheduleError
from .plan import Plan

FORMAT = "harmony-schedule"
VERSION = 2

Interval = tuple[int, int]
"""Samples ``[start, stop)`` of the minibatch."""


class _Word(Enum):
    """Members are single objects, so identity is hash enough; they are looked up in tables all the time."""

    __hash__ = object.__hash__


class TensorKind(_Word):
    """What a buffer or a copy holds; every table is split by it."""

    WEIGHT = "weight"
    BUFFER = "buffer"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer_state"
    STASH = "stash"
    ACTIVATION = "activation"
    ACTIVATION_GRADIENT = "activation_gradient"
    DATA = "data"
    WORKSPACE = "workspace"


class TaskKind(_Word):
    """What a task does.

    ``BACKWARD`` repeats the forward of its layers first (recompute; for the layers with the loss it is their forward),
    unless the task says otherwise. In two parts, ``BACKWARD_INPUT`` repeats the forward and makes the gradient of the
    layers' input, and ``BACKWARD_WEIGHT`` adds to those of their parameters from the workspace that the first one left.
    ``RECOMPUTE`` repeats a forward whose output was not kept; it changes no buffers.
    ``REDUCE`` adds the GPUs' gradients in host memory; ``UPDATE`` is on the host (``gpu`` None) or on a GPU. ``NORM``
    takes the norm of the gradient of all layers, in the host, before updates at the end of the step.
    ``ALLREDUCE`` adds them over all GPUs, in place. ``REDUCE_SCATTER`` leaves each GPU its shard of the sum, added to
    what was in the shard's buffer if it reads that too. ``ALL_GATHER`` puts the shards that the GPUs have together, on
    each of them.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    RECOMPUTE = "recompute"
    UPDATE = "update"
    REDUCE = "reduce"
    NORM = "norm"
    ALLREDUCE = "allreduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    P2P = "p2p"

    @property
    def goes_back(self) -> bool:
        """True for backwards that make the gradient of their input: whole ones, and first parts."""
        return self in (TaskKind.BACKWARD, TaskKind.BACKWARD_INPUT)

    @property
    def is_copy(self) -> bool:
        """True for tasks that move bytes between memories."""
        return self in _COPIES

    @property
    def is_collective(self) -> bool:
        """True for what all GPUs do together, over a ring of all of them."""
        return self in _COLLECTIVES


_COLLECTIVES = (TaskKind.ALLREDUCE, TaskKind.REDUCE_SCATTER, TaskKind.ALL_GATHER)
_COPIES = (TaskKind.SWAP_IN, TaskKind.SWAP_OUT, TaskKind.P2P, *_COLLECTIVES)


class Lane(_Word):
    """An in-order queue of a GPU (the last two: of the host, and of all GPUs together)."""

    COMPUTE = "compute"
    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    P2P_IN = "p2p_in"
    P2P_OUT = "p2p_out"
    UPDATE = "update"
    COLLECTIVE = "collective"


LaneKey = tuple[int | None, Lane]
"""A lane of one GPU, or of the host (None)."""


class Buffer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """A piece of GPU memory (or, ``gpu`` None, of dynamic host memory) that holds one tensor for part of the step.

    ``offset`` is its place in the GPU's arena; None: the buffer is counted, not placed (paged plans, host).
    ``layer_last`` differs from ``layer_first`` only for weights, buffers, gradients, optimizer state and workspace.
    ``is_saved``: a stash of what autograd saved in the layer's forward besides its input and its output.
    ``shard``: it holds only this shard of the layers' tensors (``shards.py``); None: all of them.
    ``resident``: weights or optimizer state that stay on the GPU from step to step. No task allocates or frees them.
    """

    id: int
    gpu: int | None
    kind: TensorKind
    layer_first: int
    layer_last: int
    bytes: int
    samples: Interval | None = None
    is_saved: bool = False
    shard: int | None = None
    resident: bool = False
    offset: int | None = None

    def __str__(self) -> str:
        """A buffer as a person reads it: ``buffer 7 (weight 0-3, 400 B at 512 on gpu 0)``."""
        run = f"{self.layer_first}-{self.layer_last}" if self.layer_first != self.layer_last else f"{self.layer_first}"
        where = "the host" if self.gpu is None else f"gpu {self.gpu}"
        part = "" if self.shard is None else f" shard {self.shard}"
        at = "" if self.offset is None else f" at {self.offset}"
        return f"buffer {self.id} ({self.kind.value} {run}{part}, {self.bytes} B{at} on {where})"


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One entry of the total order.

    ``gpu`` None is the host (updates, reductions, norms) or, for a collective, all GPUs. A P2P copy is one task on the
    sender's ``p2p_out`` lane and, as ``peer`` names the receiver, also takes its place in the receiver's ``p2p_in``.
    ``bytes`` (copies only) are counted once per copy; of a collective, as sent by all GPUs together.
    ``reads``, ``writes``, ``allocates``, ``frees`` are buffer ids. Home tensors (weights, gradients, optimizer state,
    buffers and data in the host store) are not buffers; a swap without a host buffer copies from or to them.
    ``microbatch`` counts within its GPU's share. ``recompute`` is of backwards, ``is_saved`` as of buffers. ``shard``:
    it copies or updates only this shard of its layers' tensors.
    """

    id: int
    kind: TaskKind
    gpu: int | None
    lane: Lane
    layer_first: int
    layer_last: int
    samples: Interval | None = None
    microbatch: int | None = None
    tensor_kind: TensorKind | None = None
    bytes: int = 0
    is_saved: bool = False
    shard: int | None = None
    peer: int | None = None
    recompute: bool = True
    waits_for: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    allocates: tuple[int, ...] = ()
    frees: tuple[int, ...] = ()

    @property
    def lanes(self) -> tuple[LaneKey, ...]:
        """Lanes in which this task has its place; the first one runs it."""
        own = (self.gpu, self.lane)
        return (own, (self.peer, Lane.P2P_IN)) if self.peer is not None else (own,)

    @property
    def batch_size(self) -> int:
        """Samples of the microbatch (0: none)."""
        return self.samples[1] - self.samples[0] if self.samples else 0

    def __str__(self) -> str:
        """A short name that a person can read, such as ``forward 0-3 m1 on gpu 0 compute (task 12)``."""
        what = f"{self.kind.value} {self.tensor_kind.value}" if self.tensor_kind else self.kind.value
        run = f"{self.layer_first}-{self.layer_last}" if self.layer_last != self.layer_first else f"{self.layer_first}"
        part = f" m{self.microbatch}" if self.microbatch is not None else ""
        part += f" shard {self.shard}" if self.shard is not None else ""
        where = "host" if self.gpu is None else f"gpu {self.gpu}"
        return f"{what} {run}{part} on {where} {self.lane.value} (task {self.id})"


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the schedule holds at most, by plan: per GPU against its cap, and in the host.

    ``host_store`` is held throughout: bytes of weights, gradients, optimizer state, buffers and data.
    ``host_peak_bytes`` adds the most that dynamic host buffers reach. ``host_cap_bytes`` None: unlimited.
    """

    gpu_peak_bytes: tuple[int, ...]
    gpu_cap_bytes: tuple[int, ...]
    host_store: dict[TensorKind, int]
    host_peak_bytes: int
    host_cap_bytes: int | None

    @property
    def host_store_bytes(self) -> int:
        """All that the host holds throughout."""
        return sum(self.host_store.values())


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """A step on ``plan.gpus`` GPUs for a model of ``layers`` layers. See the module's docstring."""

    model: str
    plan: Plan
    layers: int
    memory: MemoryPlan
    buffers: tuple[Buffer, ...]
    tasks: tuple[Task, ...]

    @cached_property
    def lanes(self) -> dict[LaneKey, tuple[int, ...]]:
        """Ids of each lane's tasks, in its order. P2P copies are in two lanes."""
        lanes: dict[LaneKey, list[int]] = {}
        for task in self.tasks:
            for key in task.lanes:
                lanes.setdefault(key, []).append(task.id)
        return {key: tuple(ids) for key, ids in lanes.items()}

    @cached_property
    def residents(self) -> tuple[Buffer, ...]:
        """Buffers that are there before the step and after it."""
        return tuple(buffer for buffer in self.buffers if buffer.resident)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each task, everything that must have ended before it starts: ``waits_for`` and the lanes' order."""
        latest: dict[LaneKey, int] = {}
        result: list[tuple[int, ...]] = []
        for task in self.tasks:
            before = set(task.waits_for)
            for key in task.lanes:
                if key in latest:
                    before.add(latest[key])
                latest[key] = task.id
            result.append(tuple(sorted(before)))
        return tuple(result)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each task, those that it is a predecessor of. Raises ScheduleError if one waits for no task."""
        result: list[list[int]] = [[] for _ in self.tasks]
        for task, before in zip(self.tasks, self.predecessors, strict=True):
            if before and not 0 <= before[0] <= before[-1] < len(result):
                wrong = next(number for number in before if not 0 <= number < len(result))
                raise ScheduleError((f"{task} waits for task {wrong}; there are tasks 0-{len(result) - 1}",))
            for number in before:
                result[number].append(task.id)
        return tuple(map(tuple, result))

    def copies(self, *kinds: TaskKind) -> Iterator[Task]:
        """The tasks of these kinds, in order."""
        return (task for task in self.tasks if task.kind in kinds)
