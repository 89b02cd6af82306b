"""Training as schedules do it and as plain PyTorch does it, from the same weights on the same batches."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle, islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import GPT2Config, GPT2LMHeadModel

from executor.devices.facade import DeviceKind
from executor.models.data import next_token_loss
from executor.models.workloads import Workload
from executor.reference import plain_losses
from executor.running.compute import layer_seed
from executor.running.optimizer import OptimizerFactory
from executor.running.run import run
from sim.builders import build
from sim.hardware.machine import Machine
from sim.plan import (
    HarmonyPlan,
    Pack,
    PagedPlan,
    Plan,
    Policy,
    Reduce,
    Residency,
    ShardedPlan,
    StashPlace,
    UpdateOn,
    Writeback,
    pieces,
    shares,
)
from sim.schedule import Interval, Schedule, TaskKind, TensorKind
from sim.timelines.timeline import Timeline
from tests.executor import made
from tests.sim.closed_forms import Moved
from traces.schema import Trace

MINIBATCH = 8
SEED = 3
Make = Callable[[], Workload]
CLOSE = 1e-10


class Shift(nn.Module):
    """Adds a buffer that no forward changes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        shifted: Tensor = x + self.shift
        return shifted


# ------------------------------------------------------------------------------------------------- what is trained


def chain(*, frozen: bool = False) -> Workload:
    """Eight layers, the loss included; with ``frozen`` the first and the fifth are not trained."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 10),
        Shift(10),
        nn.Tanh(),
        nn.Sequential(nn.LayerNorm(10), nn.Linear(10, 9)),
        nn.Linear(9, 7, bias=False),
        nn.ReLU(inplace=True),
        nn.Linear(7, 5),
    ).double()
    for index in (0, 4) if frozen else ():
        model[index].requires_grad_(False)
    return Workload("chain", model, nn.functional.cross_entropy, made.vectors())


def normalised_chain() -> Workload:
    """Seven layers; two of them normalise over the microbatch and keep statistics, one with dropout beside it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 10),
        nn.Sequential(nn.BatchNorm1d(10), nn.Dropout(0.3)),
        nn.Tanh(),
        nn.Linear(10, 7),
        nn.BatchNorm1d(7),
        nn.Linear(7, 5),
    ).double()
    return Workload("normalised chain", model, nn.functional.cross_entropy, made.vectors())


def tied_chain(*, bias: bool = False) -> Workload:
    """Five layers of which the first and the third share their weight."""

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        inputs, _ = made.vectors(8)(samples, seed)
        return inputs[:, :4], inputs[:, 4:]

    return Workload("tied chain", made.tied(bias=bias), made.mse, batch)


def gpt2(dropout: float = 0.0) -> Workload:
    """A GPT-2 of seven layers, the loss included, whose head shares the embedding's weight."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=3,
        n_embd=8,
        n_head=2,
        n_positions=6,
        vocab_size=11,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
    )

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        text = torch.randint(11, (samples, 7), generator=generator)
        return text[:, :-1], text[:, 1:]

    return Workload("gpt2", GPT2LMHeadModel(config).double(), next_token_loss, batch)


class Skips(nn.Module):
    """Four blocks; what the first makes is added behind the third, and a mask is used by the second and the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Of x [n, 6] and mask [n, 6] (bool), the logits [n, 5]."""
        first = self.blocks[0](x)
        second = self.blocks[1](first).masked_fill(mask, 0.5)
        third = self.blocks[2](second) + first
        logits: Tensor = self.head(self.blocks[3](third) * mask)
        return logits


def skips() -> Workload:
    torch.manual_seed(0)

    def batch(samples: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
        x, labels = made.vectors()(samples, seed)
        return {"x": x, "mask": x > 0.2}, labels

    return Workload("skips", Skips().double(), nn.functional.cross_entropy, batch)


# --------------------------------------------------------------------------------------------------------- plans


def harmony(
    policy: Policy,
    gpus: int,
    sizes: tuple[int, int],
    packs: tuple[tuple[Pack, ...], tuple[Pack, ...]],
    **options: Any,
) -> HarmonyPlan:
    """A plan for minibatches of 8. ``sizes`` and ``packs`` are those of forward and backward."""
    return HarmonyPlan(
        policy=policy, minibatch=MINIBATCH, gpus=gpus, u_fwd=sizes[0], u_bwd=sizes[1],
        packs_fwd=packs[0], packs_bwd=packs[1], **options,
    )  # fmt: skip


def sharded(gpus: int, u: int, **options: Any) -> ShardedPlan:
    """A plan for minibatches of 8."""
    return ShardedPlan(policy=Policy.ZERO3_OFFLOAD, minibatch=MINIBATCH, gpus=gpus, u_fwd=u, u_bwd=u, **options)


def paged(policy: Policy, gpus: int, u: int, **options: Any) -> PagedPlan:
    """A plan for minibatches of 8."""
    return PagedPlan(policy=policy, minibatch=MINIBATCH, gpus=gpus, u_fwd=u, u_bwd=u, **options)


dp_swap = partial(paged, Policy.DP_SWAP)


def plans(packs: tuple[tuple[Pack, ...], tuple[Pack, ...]], gpus: int) -> list[Plan]:
    """Every policy, with all of its options, for minibatches of 8 in microbatches of 3, or of 4 and 2."""
    sizes_and_updates = list(product(((3, 3), (4, 2)), UpdateOn))
    return [
        *(
            harmony(Policy.HARMONY_DP, gpus, sizes, packs, update=update, reduce=reduce)
            for sizes, update in sizes_and_updates
            for reduce in (Reduce if gpus > 1 else (Reduce.RING,))
        ),
        *(
            harmony(Policy.HARMONY_PP, gpus, sizes, packs, update=update, slots=slots)
            for sizes, update in sizes_and_updates
            for slots in ((None, 1) if gpus > 1 else (None,))
        ),
        *(
            harmony(policy, gpus, (3, 3), packs, update=UpdateOn.GPU, gpu_order=tuple(reversed(range(gpus))))
            for policy in (Policy.HARMONY_DP, Policy.HARMONY_PP)[: 2 * (gpus > 1)]
        ),
        *(
            harmony(Policy.HARMONY_PP, gpus, sizes, packs, update=update, split_backward=sizes[1] - 1)
            for sizes, update in sizes_and_updates[: len(sizes_and_updates) * (gpus > 1)]
        ),
        *(
            dp_swap(gpus, 3, residency=residency, writeback=writeback)
            for residency, writeback in product(Residency, Writeback)
        ),
        *(
            paged(policy, gpus, 3, residency=residency, writeback=writeback, prefetch_depth=depth)
            for policy, (residency, writeback, depth) in product(PLAIN_PIPELINES, PAGERS)
        ),
    ]


PLAIN_PIPELINES = Policy.GPIPE_SWAP, Policy.ONE_F_ONE_B_SWAP
PAGERS = (
    (Residency.NONE, Writeback.ALWAYS, 0),
    (Residency.NEXT, Writeback.DROP, 0),
    (Residency.LRU, Writeback.ALWAYS, 0),
    (Residency.NONE, Writeback.DROP, 2),
)


def stash_plans(packs: tuple[tuple[Pack, ...], tuple[Pack, ...]], u: int = 3) -> list[Plan]:
    """Stashes that are not swapped, some or all, over one to three GPUs."""
    stashes = len(packs[1]) - 2
    mixed = tuple(islice(cycle(reversed(StashPlace)), stashes))
    return [
        harmony(policy, gpus, (u, u), packs, update=update, stash=stash)
        for policy, gpus in (
            (Policy.HARMONY_DP, 1),
            (Policy.HARMONY_DP, 2),
            (Policy.HARMONY_PP, 2),
            (Policy.HARMONY_PP, 3),
        )
        for update, stash in (
            (UpdateOn.CPU, StashPlace.KEEP),
            (UpdateOn.GPU, StashPlace.RECOMPUTE),
            (UpdateOn.GPU, mixed),
        )
    ]


def resident_plans(packs: tuple[tuple[Pack, ...], tuple[Pack, ...]]) -> list[Plan]:
    """Weights and optimizer state of some packs or all stay on one to three GPUs."""
    every = tuple(range(len(packs[1])))
    return [
        harmony(policy, gpus, (4, 2), packs, **options)
        for policy, gpus in (
            (Policy.HARMONY_DP, 1),
            (Policy.HARMONY_DP, 2),
            (Policy.HARMONY_PP, 2),
            (Policy.HARMONY_PP, 3),
        )
        for options in (
            {"update": UpdateOn.CPU, "resident_weights": every},
            {"update": UpdateOn.GPU, "resident_weights": every, "resident_state": every[1:]},
            {"update": UpdateOn.GPU, "resident_weights": every[::2], "resident_state": every, "reduce": Reduce.SCATTER},
        )
    ]


CHAIN_PACKS = ((0, 1), (2, 3), (4, 4)), ((0, 2), (3, 4), (5, 7))
CHAIN_STASHES = ((0, 1), (2, 3), (4, 4)), ((0, 0), (1, 2), (3, 3), (4, 4), (5, 7))
GPT2_PACKS = ((0, 0), (1, 2)), ((0, 1), (2, 2), (3, 6))


def name_of(plan: Plan) -> str:
    """What tells one plan of a test from another."""
    fields = (
        "policy",
        "gpus",
        "u_fwd",
        "u_bwd",
        "update",
        "reduce",
        "slots",
        "gpu_order",
        "split_backward",
        "residency",
        "writeback",
        "prefetch_depth",
    )
    values = [getattr(plan, name, None) for name in fields]
    if isinstance(plan, HarmonyPlan):
        values += plan.stash_places.values()
        values += ["resident", *plan.resident_weights, "state", *plan.resident_state] if plan.resident_weights else []
    return "-".join(str(getattr(value, "value", value)) for value in values if value is not None)


# ------------------------------------------------------------------------------------------------------- training


def gradient_step(parameters: Any) -> Optimizer:
    """Its first step subtracts the gradient; it keeps a tensor of state."""
    return torch.optim.SGD(parameters, lr=1.0, momentum=0.9)


def adam(parameters: Any) -> Optimizer:
    """Keeps two tensors of state."""
    return torch.optim.Adam(parameters, lr=0.01)


class Trained(NamedTuple):
    """What came of training: the loss of every step, and the model's parameters and buffers afterwards."""

    losses: tuple[float, ...]
    tensors: dict[str, Tensor]


class Ran(NamedTuple):
    """A schedule that ran, and what came of it."""

    schedule: Schedule
    trace: Trace
    machine: Machine
    trained: Trained
    timeline: Timeline


def train_plainly(
    workload: Workload, steps: int = 1, *, optimizer: OptimizerFactory = gradient_step, minibatch: int = MINIBATCH
) -> Trained:
    """Plain PyTorch on whole minibatches. The workload itself stays as it is."""
    own = copy.deepcopy(workload)
    losses = plain_losses(own, minibatch, steps, optimizer=optimizer, seed=SEED)
    return Trained(losses, own.model.state_dict())


def train_in_pieces(workload: Workload, cut: Sequence[Sequence[Interval]], steps: int = 1) -> Trained:
    """Plain PyTorch on microbatches, of each GPU in turn, layer by layer.

    Random layers draw as they do in schedules. Module buffers are those that the first GPU leaves.
    """
    own = copy.deepcopy(workload)
    model, optimizer = own.layers(), gradient_step(own.model.parameters())
    losses = []
    for step in range(steps):
        inputs, labels = own.checked_batch(MINIBATCH, SEED + step)
        loss = 0.0
        optimizer.zero_grad()
        for gpu, own_pieces in enumerate(cut):
            buffers = {name: buffer.clone() for name, buffer in own.model.named_buffers()}
            for start, stop in own_pieces:
                x = tuple(tensor[start:stop] for tensor in inputs.tensors)
                for index, layer in enumerate(model.layers):
                    torch.manual_seed(layer_seed(SEED, step, index, start))
                    own_labels = (labels[start:stop],) if index == len(model) - 1 else ()
                    x = made.called(layer.module, (*x, *own_labels))
                counts = (stop - start) / MINIBATCH if model.items is None else 1 / float(model.items(labels))
                part = x[0] * counts
                torch.autograd.backward(part)
                loss += float(part.detach())
            if gpu > 0:
                own.model.load_state_dict(buffers, strict=False)
        optimizer.step()
        losses.append(loss)
    return Trained(tuple(losses), own.model.state_dict())


def cut_of(plan: Plan) -> list[list[Interval]]:
    """The microbatches of each GPU; a pipeline's are all one GPU's."""
    gpus = plan.gpus if plan.policy.splits_minibatch else 1
    return [pieces(*share, plan.u_bwd) for share in shares(plan.minibatch, gpus)]


def train(
    workload: Workload,
    plan: Plan,
    *,
    steps: int = 1,
    warmup_steps: int = 0,
    optimizer: OptimizerFactory = gradient_step,
    state_tensors: int = 1,
    device: DeviceKind = DeviceKind.EMULATED,
) -> Ran:
    """By the schedule of a plan, on a quick machine. The workload itself stays as it is."""
    own = copy.deepcopy(workload)
    machine = made.machine(plan.gpus)
    trace = trace_of(own, state_tensors)
    schedule = build(plan, trace, machine)
    result = run(
        schedule, own, machine, device=device, steps=steps, warmup_steps=warmup_steps, optimizer=optimizer, seed=SEED
    )
    return Ran(schedule, trace, machine, Trained(result.losses, own.model.state_dict()), result.timeline)


@cache
def one_step(make: Make, plan: Plan, device: DeviceKind = DeviceKind.EMULATED) -> Ran:
    """A step that subtracts the gradient."""
    return train(make(), plan, device=device)


@cache
def plainly(make: Make, steps: int = 1, optimizer: OptimizerFactory = gradient_step) -> Trained:
    """See :func:`train_plainly`."""
    return train_plainly(make(), steps, optimizer=optimizer)


def trace_of(workload: Workload, state_tensors: int = 1, **options: Any) -> Trace:
    """See :func:`made.trace_of`."""
    return made.trace_of(
        workload.layers(), lambda samples: workload.batch(samples, SEED), state_tensors=state_tensors, **options
    )


def differences(found: Trained, expected: Trained) -> dict[str, float]:
    """Where two trainings differ by more than 1e-10: names of tensors, or ``loss`` and its step, and by how much."""
    assert found.tensors.keys() == expected.tensors.keys()
    assert len(found.losses) == len(expected.losses)
    pairs = {name: (found.tensors[name], tensor) for name, tensor in expected.tensors.items()}
    for step, (loss, other) in enumerate(zip(found.losses, expected.losses, strict=True)):
        pairs[f"loss {step}"] = (torch.tensor(loss), torch.tensor(other))
    largest = {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}
    return {name: difference for name, difference in largest.items() if not difference <= CLOSE}


def moved_in(timeline: Timeline) -> Moved:
    """The bytes that the copies of the last step moved, by kind of copy and kind of tensor."""
    rows = timeline.frame[timeline.frame["step"] == timeline.info.steps - 1]
    totals: Moved = {kind: Counter() for kind in TaskKind if kind.is_copy}
    for kind, tensor_kind, size in zip(rows["kind"], rows["tensor_kind"], rows["bytes"], strict=True):
        if TaskKind(kind).is_copy:
            totals[TaskKind(kind)][TensorKind(tensor_kind)] += int(size)
    return totals
