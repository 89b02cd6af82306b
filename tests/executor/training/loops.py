"""Trainers, and the plain loops that they stand for, on the same small models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from executor import Trainer
from executor.models.workloads import Workload
from sim.builders import build
from sim.plan import Plan, Policy, Reduce, UpdateOn
from sim.schedule import Schedule
from tests.executor import made
from tests.executor.trained import CHAIN_PACKS, MINIBATCH, adam, dp_swap, harmony, sharded, trace_of

ON_CPU = harmony(Policy.HARMONY_DP, 2, (3, 3), CHAIN_PACKS)
ON_GPU = harmony(Policy.HARMONY_PP, 2, (4, 2), CHAIN_PACKS, update=UpdateOn.GPU)
WEIGHTS_STAY = harmony(Policy.HARMONY_PP, 2, (4, 4), CHAIN_PACKS, resident_weights=(0, 2))
STATE_STAYS = harmony(
    Policy.HARMONY_DP, 2, (4, 4), CHAIN_PACKS, update=UpdateOn.GPU, resident_weights=(0, 1, 2), resident_state=(0, 2)
)
BY_SHARDS = harmony(Policy.HARMONY_DP, 2, (4, 4), CHAIN_PACKS, update=UpdateOn.GPU, reduce=Reduce.SCATTER)
PLANS = [ON_CPU, ON_GPU, BY_SHARDS, WEIGHTS_STAY, STATE_STAYS, dp_swap(2, 3), sharded(2, 2)]
"""For :func:`~tests.executor.trained.chain`."""


def schedule_of(workload: Workload, plan: Plan) -> Schedule:
    """With :func:`~tests.executor.trained.adam`, on a quick machine."""
    return build(plan, trace_of(workload, state_tensors=2), made.machine(plan.gpus))


def trainer_of(workload: Workload, plan: Plan, optimizer: Optimizer | None = None) -> Trainer:
    """By the schedule of a plan."""
    optimizer = optimizer or adam(workload.model.parameters())
    machine = made.machine(plan.gpus)
    return Trainer(workload.model, workload.loss_fn, optimizer, schedule_of(workload, plan), machine=machine)


class Plain:
    """The loop that a Trainer stands for."""

    def __init__(self, workload: Workload, optimizer: Optimizer) -> None:
        self.model, self.loss_fn, self.optimizer = workload.model, workload.loss_fn, optimizer

    def step(self, inputs: Any, labels: Tensor) -> float:
        self.optimizer.zero_grad()
        outputs = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        loss = self.loss_fn(getattr(outputs, "logits", outputs), labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def pair(make: Callable[[], Workload], plan: Plan, optimizer: Any = adam) -> tuple[Trainer, Plain]:
    """From the same weights."""
    ours, theirs = make(), make()
    return (
        trainer_of(ours, plan, optimizer(ours.model.parameters())),
        Plain(theirs, optimizer(theirs.model.parameters())),
    )


def batches(workload: Workload, steps: int) -> Iterator[tuple[Any, Tensor]]:
    """One a step."""
    return (workload.batch(MINIBATCH, seed) for seed in range(steps))


def assert_alike(trainer: Trainer, plain: Plain) -> None:
    """The same weights and buffers, to 1e-10."""
    ours, theirs = trainer.state_dict(), plain.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-10)


def in_groups(parameters: Iterator[nn.Parameter]) -> Optimizer:
    """Two groups with options of their own, in another order than the model's."""
    first, second, *others = parameters
    groups = [{"params": others, "lr": 0.02, "weight_decay": 0.1}, {"params": [first, second]}]
    return torch.optim.AdamW(groups, lr=0.01)
