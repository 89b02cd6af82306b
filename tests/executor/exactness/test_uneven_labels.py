"""Microbatches that hold different numbers of valid labels: the loss is the mean over the labels of the minibatch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import SummedLoss
from executor.errors import HarmonyError
from executor.models.inputs import Inputs, call_model, logits_of
from executor.models.losses import LossFunction, as_summed
from executor.models.workloads import Workload
from executor.running.run import run
from sim.builders import build
from sim.plan import Plan, Policy, UpdateOn
from tests.executor import made
from tests.executor.trained import MINIBATCH, SEED, Trained, adam, differences, harmony, paged, sharded, trace_of

CLASSES = 5
IGNORE = torch.tensor([3, 0, 2, 1, 3, 3, 0, 1])
"""Of each sample's three labels, so many are ignored: microbatches of two hold 3, 3, 0 and 5 valid ones."""


class PerToken(nn.Module):
    """A classifier of each of three places."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y.transpose(1, 2)  # classes in front, as torch's cross entropy wants it


def workload(loss_fn: LossFunction, *, valid: bool = True) -> Workload:
    """Without ``valid`` no label is."""

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        inputs = torch.randn(samples, 3, 4, dtype=torch.float64, generator=generator)
        labels = torch.randint(CLASSES, (samples, 3), generator=generator)
        ignored = IGNORE[torch.arange(samples) % len(IGNORE)] if valid else torch.full((samples,), 3)
        return inputs, labels.masked_fill(torch.arange(3) < ignored[:, None], -100)

    torch.manual_seed(0)
    return Workload("per token", PerToken().double(), loss_fn, batch)


def plainly(of: Workload, steps: int = 2) -> Trained:
    """A loop over whole minibatches."""
    own = copy.deepcopy(of)
    optimizer, losses = adam(own.model.parameters()), []
    for number in range(steps):
        inputs, labels = own.batch(MINIBATCH, SEED + number)
        optimizer.zero_grad()
        loss = own.loss_fn(logits_of(call_model(own.model, Inputs.of(inputs))), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(tuple(losses), own.model.state_dict())


def by_plan(of: Workload, plan: Plan, steps: int = 2) -> Trained:
    own = copy.deepcopy(of)
    machine = made.machine(plan.gpus)
    schedule = build(plan, trace_of(of, state_tensors=2), machine)
    result = run(schedule, own, machine, steps=steps, warmup_steps=0, optimizer=adam, seed=SEED)
    return Trained(result.losses, own.model.state_dict())


PACKS = (((0, 0),), ((0, 0), (1, 2)))
PLANS: list[Plan] = [
    *(harmony(Policy.HARMONY_DP, gpus, (2, 2), PACKS, update=update) for gpus in (1, 2, 3) for update in UpdateOn),
    harmony(Policy.HARMONY_DP, 2, (3, 3), PACKS),
    harmony(Policy.HARMONY_PP, 2, (3, 2), PACKS),
    harmony(Policy.HARMONY_PP, 2, (2, 2), PACKS, split_backward=1),
    paged(Policy.DP_SWAP, 2, 2),
    paged(Policy.GPIPE_SWAP, 2, 3),
    paged(Policy.ONE_F_ONE_B_SWAP, 2, 2),
    sharded(2, 2),
]
WEIGHT = torch.tensor([0.1, 2.0, 0.7, 1.0, 0.3], dtype=torch.float64)


def masked_total(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


LOSSES: dict[str, Callable[[], LossFunction]] = {
    "a module": nn.CrossEntropyLoss,
    "the function": lambda: nn.functional.cross_entropy,
    "class weights": partial(nn.CrossEntropyLoss, weight=WEIGHT),
    "smoothed labels": partial(nn.CrossEntropyLoss, label_smoothing=0.2),
    "weights and smoothed": partial(nn.CrossEntropyLoss, weight=WEIGHT, label_smoothing=0.2),
    "a sum and a count": lambda: SummedLoss(masked_total, lambda labels: (labels != -100).sum()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_all_losses_are_those_of_whole_minibatches(name: str) -> None:
    of = workload(LOSSES[name]())
    assert differences(by_plan(of, PLANS[0]), plainly(of)) == {}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.policy.value} {plan.gpus} {plan.u_bwd}")
def test_all_plans_train_as_on_whole_minibatches(plan: Plan) -> None:
    of = workload(nn.CrossEntropyLoss())
    assert differences(by_plan(of, plan), plainly(of)) == {}


def test_a_minibatch_without_labels_changes_nothing() -> None:
    of = workload(nn.CrossEntropyLoss(), valid=False)
    trained = by_plan(of, PLANS[0])
    assert trained.losses == (0.0, 0.0)
    assert all(torch.equal(trained.tensors[name], value) for name, value in of.model.state_dict().items())


def test_a_mean_that_would_weigh_labels_wrongly_is_refused() -> None:
    def mean(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels)

    of = workload(mean)
    with pytest.raises(HarmonyError, match=r"13 of 24 labels are -100, more in some samples .*SummedLoss"):
        by_plan(of, PLANS[0])


@pytest.mark.parametrize("ignore_index", [-100, 2])
def test_torchs_losses_are_the_sum_over_what_counts(ignore_index: int) -> None:
    logits, labels = (
        torch.randn(6, 5, dtype=torch.float64),
        torch.tensor([0, 2, -100 if ignore_index < 0 else 2, 4, 1, 1]),
    )
    losses: list[Any] = [
        nn.CrossEntropyLoss(ignore_index=ignore_index),
        nn.CrossEntropyLoss(WEIGHT, ignore_index=ignore_index, label_smoothing=0.1),
        nn.NLLLoss(WEIGHT, ignore_index=ignore_index),
    ]
    for loss in losses:
        summed = as_summed(loss)
        assert summed is not None
        given = logits.log_softmax(1) if isinstance(loss, nn.NLLLoss) else logits
        torch.testing.assert_close(summed(given, labels), loss(given, labels), rtol=0, atol=1e-12)


def test_probabilities_as_labels_count_by_samples() -> None:
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.rand(6, 5, dtype=torch.float64)
    summed = as_summed(nn.CrossEntropyLoss())
    assert summed is not None
    torch.testing.assert_close(summed(logits, labels), nn.functional.cross_entropy(logits, labels))


def test_other_losses_are_means_over_samples() -> None:
    assert as_summed(nn.MSELoss()) is None
    assert as_summed(nn.CrossEntropyLoss(reduction="sum")) is None
