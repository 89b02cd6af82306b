"""Schedules written by hand, task by task, and a tiny model to run them with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sim.hardware.machine import Gpu, Host, Machine
from sim.plan import HarmonyPlan, PagedPlan, Plan, Policy
from sim.schedule import Buffer, Interval, Lane, MemoryPlan, Schedule, Task, TaskKind, TensorKind
from traces.schema import Layer, Phase, SizeRow, TimeRow, Trace

LANES = {
    TaskKind.FORWARD: Lane.COMPUTE,
    TaskKind.BACKWARD: Lane.COMPUTE,
    TaskKind.UPDATE: Lane.COMPUTE,
    TaskKind.REDUCE: Lane.UPDATE,
    TaskKind.ALLREDUCE: Lane.COLLECTIVE,
    TaskKind.REDUCE_SCATTER: Lane.COLLECTIVE,
    TaskKind.ALL_GATHER: Lane.COLLECTIVE,
    TaskKind.SWAP_IN: Lane.SWAP_IN,
    TaskKind.SWAP_OUT: Lane.SWAP_OUT,
    TaskKind.P2P: Lane.P2P_OUT,
}
ANYWHERE = 10**15


def plan(*, gpus: int = 1, minibatch: int = 2, **fields: Any) -> HarmonyPlan:
    """Harmony-DP over two layers in packs of one, one sample a microbatch."""
    defaults: dict[str, Any] = {
        "policy": Policy.HARMONY_DP,
        "u_fwd": 1,
        "u_bwd": 1,
        "packs_fwd": ((0, 0),),
        "packs_bwd": ((0, 0), (1, 1)),
    }
    return HarmonyPlan(minibatch=minibatch, gpus=gpus, **{**defaults, **fields})


def paged(*, gpus: int = 1, minibatch: int = 2) -> PagedPlan:
    return PagedPlan(minibatch=minibatch, gpus=gpus, policy=Policy.DP_SWAP, u_fwd=1, u_bwd=1)


@dataclass
class Hand:
    """A schedule in the making; ids count up. Host buffers, and GPU buffers without an offset, are counted."""

    plan: Plan = field(default_factory=plan)
    layers: int = 2
    buffers: list[Buffer] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)

    def buffer(
        self,
        kind: TensorKind,
        layers: int | tuple[int, int],
        size: int,
        *,
        gpu: int | None = 0,
        samples: Interval | None = None,
        shard: int | None = None,
        offset: int | None = None,
    ) -> int:
        first, last = layers if isinstance(layers, tuple) else (layers, layers)
        made = Buffer(
            id=len(self.buffers),
            gpu=gpu,
            kind=kind,
            layer_first=first,
            layer_last=last,
            bytes=size,
            samples=samples,
            shard=shard,
            offset=offset,
        )
        self.buffers.append(made)
        return made.id

    def task(self, kind: TaskKind, layers: int | tuple[int, int] = 0, *, gpu: int | None = 0, **fields: Any) -> int:
        first, last = layers if isinstance(layers, tuple) else (layers, layers)
        lane = Lane.UPDATE if kind is TaskKind.UPDATE and gpu is None else LANES[kind]
        made = Task(
            id=len(self.tasks),
            kind=kind,
            gpu=gpu,
            layer_first=first,
            layer_last=last,
            **{"lane": lane, **fields},
        )
        self.tasks.append(made)
        return made.id

    def schedule(self, *, gpu_peak: int = ANYWHERE, host_peak: int = ANYWHERE, host_store: int = 0) -> Schedule:
        memory = MemoryPlan(
            gpu_peak_bytes=(gpu_peak,) * self.plan.gpus,
            gpu_cap_bytes=(gpu_peak,) * self.plan.gpus,
            host_store={TensorKind.WEIGHT: host_store},
            host_peak_bytes=host_peak,
            host_cap_bytes=None,
        )
        return Schedule(
            model="tiny",
            plan=self.plan,
            layers=self.layers,
            memory=memory,
            buffers=tuple(self.buffers),
            tasks=tuple(self.tasks),
        )


def one_gpu_step() -> Hand:
    """A whole Harmony-DP step of :func:`tiny_trace` on one GPU: two layers, two samples, update on the CPU.

    Layer 0 forward per sample, the fused layer 1, layer 0 backward. Boundary activations travel through the host.
    Weights, gradients and x(1) lie at fixed places of an arena; every byte agrees with the trace.
    """
    hand = Hand()
    halves = ((0, 1), (1, 2))

    # Forward of layer 0.
    w0 = hand.buffer(TensorKind.WEIGHT, 0, 100, offset=0)
    load = hand.task(TaskKind.SWAP_IN, 0, tensor_kind=TensorKind.WEIGHT, bytes=100, writes=(w0,), allocates=(w0,))
    stored = []
    for m, half in enumerate(halves):
        x0 = hand.buffer(TensorKind.DATA, 0, 10, samples=half, offset=100 + 10 * m)
        x1 = hand.buffer(TensorKind.ACTIVATION, 1, 20, samples=half, offset=120 + 20 * m)
        space = hand.buffer(TensorKind.WORKSPACE, 0, 20, samples=half, offset=160)
        host = hand.buffer(TensorKind.ACTIVATION, 1, 20, samples=half, gpu=None)
        piece: dict[str, Any] = {"samples": half, "microbatch": m}
        data = hand.task(
            TaskKind.SWAP_IN, 0, tensor_kind=TensorKind.DATA, bytes=10, writes=(x0,), allocates=(x0,), **piece
        )
        forward = hand.task(
            TaskKind.FORWARD, 0, waits_for=(load, data), reads=(w0, x0), writes=(x1, space), allocates=(x1, space),
            frees=(x0, space) + ((w0,) if m else ()), **piece,
        )  # fmt: skip
        out = hand.task(
            TaskKind.SWAP_OUT, 1, tensor_kind=TensorKind.ACTIVATION, bytes=20, waits_for=(forward,), reads=(x1,),
            writes=(host,), allocates=(host,), frees=(x1,), **piece,
        )  # fmt: skip
        stored.append((out, host))

    # Forward and backward of layer 1, the loss.
    w1 = hand.buffer(TensorKind.WEIGHT, 1, 200, offset=200)
    dw1 = hand.buffer(TensorKind.GRADIENT, 1, 200, offset=400)
    load = hand.task(TaskKind.SWAP_IN, 1, tensor_kind=TensorKind.WEIGHT, bytes=200, writes=(w1,), allocates=(w1,))
    gradients = []
    for m, half in enumerate(halves):
        x1 = hand.buffer(TensorKind.ACTIVATION, 1, 20, samples=half, offset=600 + 20 * m)
        labels = hand.buffer(TensorKind.DATA, 2, 4, samples=half, offset=640 + 4 * m)
        g1 = hand.buffer(TensorKind.ACTIVATION_GRADIENT, 1, 20, samples=half, offset=650 + 20 * m)
        space = hand.buffer(TensorKind.WORKSPACE, 1, 50, samples=half, offset=700)
        host = hand.buffer(TensorKind.ACTIVATION_GRADIENT, 1, 20, samples=half, gpu=None)
        piece = {"samples": half, "microbatch": m}
        back, source = stored[m]
        data = hand.task(
            TaskKind.SWAP_IN, 1, tensor_kind=TensorKind.ACTIVATION, bytes=20, waits_for=(back,), reads=(source,),
            writes=(x1,), allocates=(x1,), frees=(source,), **piece,
        )  # fmt: skip
        target = hand.task(
            TaskKind.SWAP_IN, 2, tensor_kind=TensorKind.DATA, bytes=4, writes=(labels,), allocates=(labels,), **piece
        )
        backward = hand.task(
            TaskKind.BACKWARD, 1, waits_for=(load, data, target), reads=(w1, x1, labels), writes=(dw1, g1, space),
            allocates=(g1, space) + (() if m else (dw1,)), frees=(x1, labels, space) + ((w1,) if m else ()), **piece,
        )  # fmt: skip
        out = hand.task(
            TaskKind.SWAP_OUT, 1, tensor_kind=TensorKind.ACTIVATION_GRADIENT, bytes=20, waits_for=(backward,),
            reads=(g1,), writes=(host,), allocates=(host,), frees=(g1,), **piece,
        )  # fmt: skip
        gradients.append((out, host))
    out = hand.task(
        TaskKind.SWAP_OUT,
        1,
        tensor_kind=TensorKind.GRADIENT,
        bytes=200,
        waits_for=(backward,),
        reads=(dw1,),
        frees=(dw1,),
    )
    hand.task(TaskKind.UPDATE, 1, gpu=None, waits_for=(out,))

    # Backward of layer 0; nothing wants the gradient of its input.
    w0 = hand.buffer(TensorKind.WEIGHT, 0, 100, offset=0)
    dw0 = hand.buffer(TensorKind.GRADIENT, 0, 100, offset=760)
    load = hand.task(
        TaskKind.SWAP_IN,
        0,
        tensor_kind=TensorKind.WEIGHT,
        bytes=100,
        waits_for=(forward,),
        writes=(w0,),
        allocates=(w0,),
    )
    for m, half in enumerate(halves):
        x0 = hand.buffer(TensorKind.DATA, 0, 10, samples=half, offset=100 + 10 * m)
        g1 = hand.buffer(TensorKind.ACTIVATION_GRADIENT, 1, 20, samples=half, offset=120 + 20 * m)
        space = hand.buffer(TensorKind.WORKSPACE, 0, 40, samples=half, offset=160)
        piece = {"samples": half, "microbatch": m}
        back, source = gradients[m]
        data = hand.task(
            TaskKind.SWAP_IN,
            0,
            tensor_kind=TensorKind.DATA,
            bytes=10,
            waits_for=(forward,),
            writes=(x0,),
            allocates=(x0,),
            **piece,
        )
        arrived = hand.task(
            TaskKind.SWAP_IN, 1, tensor_kind=TensorKind.ACTIVATION_GRADIENT, bytes=20, waits_for=(stored[m][0], back),
            reads=(source,), writes=(g1,), allocates=(g1,), frees=(source,), **piece,
        )  # fmt: skip
        backward = hand.task(
            TaskKind.BACKWARD, 0, waits_for=(load, data, arrived), reads=(w0, x0, g1), writes=(dw0, space),
            allocates=(space,) + (() if m else (dw0,)), frees=(x0, g1, space) + ((w0,) if m else ()), **piece,
        )  # fmt: skip
    out = hand.task(
        TaskKind.SWAP_OUT,
        0,
        tensor_kind=TensorKind.GRADIENT,
        bytes=100,
        waits_for=(backward,),
        reads=(dw0,),
        frees=(dw0,),
    )
    hand.task(TaskKind.UPDATE, 0, gpu=None, waits_for=(out,))
    return hand


def one_gpu_schedule() -> Schedule:
    """:func:`one_gpu_step` with its memory plan: 860 bytes of the arena, 40 of the host beside a store of 908."""
    return one_gpu_step().schedule(gpu_peak=860, host_peak=908 + 40, host_store=908)


def tiny_trace() -> Trace:
    """Two layers, one sample profiled: 100 and 200 bytes of weights, 3 and 5 ns forward, 7 and 11 ns backward."""
    weights, forward, backward = (100, 200), (3, 5), (7, 11)
    times = [
        TimeRow(layer=layer, phase=phase, microbatch=0 if phase.is_update else u, duration_ns=ns * max(u, 1))
        for phase, per_layer in (
            (Phase.FORWARD, forward),
            (Phase.BACKWARD, backward),
            (Phase.UPDATE_CPU, (40, 80)),
            (Phase.UPDATE_GPU, (4, 8)),
        )
        for layer, ns in enumerate(per_layer)
        for u in ((0,) if phase.is_update else (1, 2))
    ]
    sizes = [
        SizeRow(
            layer=layer,
            microbatch=u,
            input_bytes=(10, 20)[layer] * u,
            output_bytes=(20, 1)[layer] * u,
            input_gradient_bytes=(0, 20)[layer] * u,
            saved_bytes=(25, 30)[layer] * u,
            workspace_bytes=(15, 20)[layer] * u,
            forward_workspace_bytes=(20, 15)[layer] * u,
        )
        for layer in (0, 1)
        for u in (1, 2)
    ]
    return Trace(
        model="tiny",
        device="test",
        dtype="float32",
        optimizer="SGD",
        label_bytes_per_sample=4,
        layers=tuple(
            Layer(
                name=f"layer{layer}", kind="Linear", weight_bytes=size, gradient_bytes=size, optimizer_state_bytes=size
            )
            for layer, size in enumerate(weights)
        ),
        times=tuple(times),
        sizes=tuple(sizes),
    )


def machine(*, gpus: int = 1, bandwidth: float = 1e9, dram: float = 1e12, **gpu: Any) -> Machine:
    """GPUs with links of their own to the host: one byte a nanosecond, no latency."""
    made = tuple(Gpu(name=str(i), memory_bytes=10**9, bandwidth=bandwidth, **gpu) for i in range(gpus))
    return Machine(name="bench", host=Host(memory_bytes=None, dram_bandwidth=dram, cores=2), gpus=made)
