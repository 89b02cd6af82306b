from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.devices.emulated import EmulatedDevices
from executor.errors import TaskFailed
from executor.models.layers import decompose
from executor.models.workloads import Workload
from executor.running.session import Session
from sim.builders import build
from sim.plan import Plan, Policy, Residency, UpdateOn
from tests.executor import made
from tests.executor.training import MINIBATCH, SEED, adam, chain, dp_swap, harmony, name_of, trace_of, train_plainly

PACKS = ((0, 1), (2, 4)), ((0, 2), (3, 4), (5, 7))
EACH_UPDATE = pytest.mark.parametrize(
    "plan",
    [
        harmony(Policy.HARMONY_DP, 2, (3, 3), PACKS),
        harmony(Policy.HARMONY_DP, 2, (3, 3), PACKS, update=UpdateOn.GPU),
        harmony(Policy.HARMONY_PP, 2, (4, 2), PACKS, update=UpdateOn.GPU),
        dp_swap(2, 3, residency=Residency.NONE),
    ],
    ids=name_of,
)


def start(workload: Workload, plan: Plan, optimizer: torch.optim.Optimizer) -> Session:
    machine = made.machine(plan.gpus)
    schedule = build(plan, trace_of(workload, state_tensors=2), machine)
    devices = EmulatedDevices(machine)
    return Session(schedule, decompose(workload.model, workload.loss_fn), optimizer, devices, seed=SEED)


def plain_step(workload: Workload, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs, labels = workload.batch(MINIBATCH, SEED + number)
    optimizer.zero_grad()
    loss: Any = workload.loss_fn(workload.model(inputs), labels)
    loss.backward()
    optimizer.step()


def assert_close(found: Any, expected: Any) -> None:
    """Dictionaries of dictionaries of tensors and numbers, alike to 1e-10."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    else:
        assert found == expected


@EACH_UPDATE
def test_goes_on_from_an_optimizer_with_a_past_and_leaves_it_current(plan: Plan) -> None:
    """Its state comes along, and can be saved, or used by plain PyTorch, after any step."""
    workload, reference = chain(), chain()
    optimizer, expected = adam(workload.model.parameters()), adam(reference.model.parameters())
    for number in range(4):
        plain_step(reference, expected, number)
    plain_step(workload, optimizer, 0)
    session = start(workload, plan, optimizer)
    for number in (1, 2):
        session.step(*workload.batch(MINIBATCH, SEED + number))
    plain_step(workload, optimizer, 3)
    assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))
    assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"])


@EACH_UPDATE
def test_a_step_that_failed_can_be_tried_again(plan: Plan) -> None:
    """In its forward, that is: later, weights may have been updated already."""
    faults: list[str] = []

    class FailsOnce(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if faults:
                raise OSError(faults.pop())
            return x.tanh()

    workload = chain()
    workload.model[2] = FailsOnce()
    session = start(workload, plan, adam(workload.model.parameters()))
    batch = workload.batch(MINIBATCH, SEED)
    faults.append("once")
    with pytest.raises(TaskFailed, match="OSError: once"):
        session.step(*batch)
    loss = session.step(*batch).loss
    expected = train_plainly(chain(), optimizer=adam)
    assert loss == pytest.approx(expected.losses[0], abs=1e-10)
    assert_close(dict(workload.model.state_dict()), dict(expected.tensors))


def test_learning_rates_may_change_between_steps() -> None:
    workload, reference = chain(), chain()
    optimizer, expected = adam(workload.model.parameters()), adam(reference.model.parameters())
    session = start(workload, dp_swap(2, 3), optimizer)
    for number in range(3):
        for each in (optimizer, expected):
            each.param_groups[0]["lr"] = 0.1 / (number + 1)
        session.step(*workload.batch(MINIBATCH, SEED + number))
        plain_step(reference, expected, number)
    assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))
