from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from executor.errors import ModelError, OptimizerError, TaskFailed
from executor.models.workloads import Workload
from sim.plan import Plan, Policy
from tests.executor.trained import CHAIN_PACKS, MINIBATCH, adam, chain, dp_swap, harmony, name_of, normalised_chain
from tests.executor.training.loops import (
    ON_CPU,
    ON_GPU,
    PLANS,
    STATE_STAYS,
    Plain,
    assert_alike,
    batches,
    pair,
    trainer_of,
)

EACH_PLAN = pytest.mark.parametrize("plan", PLANS[:-1], ids=name_of)  # the last moves no state to GPUs
Change = Callable[[nn.Module, Optimizer], None]


def halve(model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def halve_data(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def other_data(model: nn.Module, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def load_model(model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict({name: 0.5 * tensor for name, tensor in model.state_dict().items()})


def load_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for entries in state["state"].values():
        entries["exp_avg"] *= 0.5
    state["param_groups"][0]["lr"] = 0.05
    optimizer.load_state_dict(state)


def forget_the_past(model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.state.clear()


def halve_state(model: nn.Module, optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)


CHANGES = [halve, halve_data, other_data, load_model, load_optimizer, forget_the_past, halve_state]


@EACH_PLAN
@pytest.mark.parametrize("change", CHANGES)
def test_what_the_user_changes_is_what_trains_on(plan: Plan, change: Change) -> None:
    trainer, plain = pair(chain, plan)
    for number, batch in enumerate(batches(chain(), 4)):
        if number in (0, 2) and not (number == 0 and change is halve_state):
            if plan is STATE_STAYS:
                trainer.sync()
            for each in (trainer, plain):
                change(each.model, each.optimizer)
        assert trainer.step(*batch) == pytest.approx(plain.step(*batch), abs=1e-10)
    assert_alike(trainer, plain)


@pytest.mark.parametrize("change", [load_model, load_optimizer])
def test_loading_needs_no_sync(change: Change) -> None:
    trainer, plain = pair(chain, STATE_STAYS)
    for batch in batches(chain(), 3):
        trainer.step(*batch)
        plain.step(*batch)
        for each in (trainer, plain):
            change(each.model, each.optimizer)
    assert_alike(trainer, plain)


@pytest.mark.parametrize("change", [halve, halve_data, other_data, forget_the_past, halve_state])
def test_a_change_of_old_values_is_refused(change: Change) -> None:
    """The newest are on the GPUs; once they are home, it is all right."""
    workload = chain()
    trainer = trainer_of(workload, STATE_STAYS)
    batch = workload.batch(MINIBATCH, 0)
    trainer.step(*batch)
    change(trainer.model, trainer.optimizer)
    with pytest.raises(ModelError, match=r"newer values stayed on GPUs; call sync\(\)"):
        trainer.step(*batch)


class ScaledLoss(nn.Module):
    """Has a buffer, which the user may change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1, dtype=torch.float64))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return (nn.functional.cross_entropy(logits, labels) * self.scale).squeeze()


@EACH_PLAN
def test_buffers_of_the_loss_may_change_too(plan: Plan) -> None:
    def make() -> Workload:
        return replace(chain(), loss_fn=ScaledLoss())

    trainer, plain = pair(make, plan)
    for number, batch in enumerate(batches(chain(), 3)):
        for each in (trainer, plain):
            trainer.sync()
            each.loss_fn.scale.fill_(number)
        assert trainer.step(*batch) == pytest.approx(plain.step(*batch), abs=1e-10)
    assert_alike(trainer, plain)


@pytest.mark.parametrize("plan", [ON_GPU, STATE_STAYS], ids=name_of)
def test_goes_on_after_a_step_that_failed(plan: Plan) -> None:
    """In its forward, that is: later, weights may have been updated already."""
    trainer, plain = pair(chain, plan)
    first, second = batches(chain(), 2)
    assert trainer.step(*first) == pytest.approx(plain.step(*first), abs=1e-10)
    inputs, labels = second
    with pytest.raises(TaskFailed, match=r"Target 1.. is out of bounds"):
        trainer.step(inputs, labels + 100)
    assert trainer.steps == 1
    assert trainer.step(*second) == pytest.approx(plain.step(*second), abs=1e-10)
    assert_alike(trainer, plain)


def test_trainers_and_plain_steps_take_turns() -> None:
    """On one model with one optimizer."""
    workload, reference = chain(), chain()
    optimizer, plain = adam(workload.model.parameters()), Plain(reference, adam(reference.model.parameters()))
    turns = [trainer_of(workload, plan, optimizer) for plan in (ON_GPU, ON_CPU)]
    turns.append(Plain(workload, optimizer))
    for number, batch in enumerate(batches(chain(), 6)):
        assert turns[number % 3].step(*batch) == pytest.approx(plain.step(*batch), abs=1e-10)


def test_structure_and_modes_must_stay() -> None:
    workload = chain()
    trainer = trainer_of(workload, ON_CPU)
    batch = workload.batch(MINIBATCH, 0)
    trainer.step(*batch)
    workload.model.eval()
    with pytest.raises(ModelError, match=r"training=False now and had True .*; set it back"):
        trainer.step(*batch)
    workload.model.train()
    trainer.step(*batch)
    workload.model[0].weight.requires_grad_(False)
    with pytest.raises(ModelError, match=r"0.weight has requires_grad=False now"):
        trainer.step(*batch)
    workload.model[0].weight.requires_grad_()
    trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    with pytest.raises(OptimizerError, match="Adam has other parameters or groups"):
        trainer.step(*batch)
    workload.model[0] = nn.Linear(6, 10).double()
    with pytest.raises(ModelError, match=r"0.weight of the model is another tensor"):
        trainer.step(*batch)


def test_a_model_of_another_dtype_is_refused() -> None:
    workload = chain()
    trainer = trainer_of(workload, ON_CPU)
    trainer.step(*workload.batch(MINIBATCH, 0))
    workload.model.float()
    with pytest.raises(ModelError, match=r"0.weight is torch.float32 \[10, 6\] on cpu now and was torch.float64"):
        trainer.step(*workload.batch(MINIBATCH, 1))


def test_a_batch_norms_statistics_are_loaded_into_every_home() -> None:
    """Where the same microbatches leave the same statistics, though each GPU keeps its own."""
    packs = (CHAIN_PACKS[0], ((0, 2), (3, 4), (5, 6)))
    trainers = [
        trainer_of(normalised_chain(), plan) for plan in (harmony(Policy.HARMONY_DP, 2, (4, 4), packs), dp_swap(2, 4))
    ]
    for batch in batches(normalised_chain(), 3):
        for trainer in trainers:
            trainer.step(*batch)
            load_model(trainer.model, trainer.optimizer)
    ours, theirs = (trainer.state_dict() for trainer in trainers)
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-10)


def test_what_would_be_left_out_is_refused() -> None:
    workload = chain()
    trainer = trainer_of(workload, ON_CPU)
    batch = workload.batch(MINIBATCH, 0)
    with torch.autocast("cpu"), pytest.raises(ModelError, match="autocast is on"):
        trainer.step(*batch)
    handle = trainer.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(OptimizerError, match="Adam has hooks"):
        trainer.step(*batch)
    handle.remove()
    trainer.step(*batch)
