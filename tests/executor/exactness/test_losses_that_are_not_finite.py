"""A loss that is infinite or no number ends the step before any weight is updated, whatever the plan."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from executor.devices.facade import DeviceKind
from executor.errors import NonFiniteLoss
from executor.models.workloads import Workload
from executor.running.opening import open_session
from sim.builders import build
from sim.plan import Plan, Policy, Reduce, UpdateOn
from tests.executor import made
from tests.executor.trained import MINIBATCH, adam, harmony, paged, sharded, trace_of

BAD = 5
"""The sample that spoils its microbatch."""
PACKS = (((0, 2), (3, 4)), ((0, 2), (3, 4), (5, 6)))


def workload(bad: float) -> Workload:
    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        inputs, labels = made.vectors()(samples, seed)
        if samples == MINIBATCH:
            inputs[BAD] = bad
        return inputs, labels

    model = made.mlp((6, 10, 7, 5))
    return Workload("spoiled", model, nn.functional.cross_entropy, batch)


PLANS: list[Plan] = [
    *(harmony(Policy.HARMONY_DP, gpus, (2, 2), PACKS, update=update) for gpus in (1, 3) for update in UpdateOn),
    harmony(Policy.HARMONY_DP, 2, (2, 2), PACKS, reduce=Reduce.SCATTER, update=UpdateOn.GPU),
    *(harmony(Policy.HARMONY_PP, 2, (2, 2), PACKS, update=update) for update in UpdateOn),
    paged(Policy.DP_SWAP, 2, 2),
    paged(Policy.GPIPE_SWAP, 2, 2),
    paged(Policy.ONE_F_ONE_B_SWAP, 2, 2),
    sharded(2, 2),
]


@pytest.mark.parametrize(
    "plan", PLANS, ids=lambda plan: f"{plan.policy.value} {plan.gpus} {getattr(plan, 'update', '')}"
)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_no_weight_is_updated(plan: Plan, bad: float) -> None:
    of = workload(bad)
    before = copy.deepcopy(of.model.state_dict())
    machine = made.machine(plan.gpus)
    optimizer = adam(of.model.parameters())
    layers = of.layers(MINIBATCH)
    schedule = build(plan, trace_of(of, state_tensors=2), machine)
    session = open_session(schedule, layers, optimizer, machine, DeviceKind.EMULATED, seed=0)
    with pytest.raises(NonFiniteLoss, match=r"step 0: the loss of the microbatch of samples? [45].* is nan"):
        session.step(*of.batch(MINIBATCH, 0))
    for name, value in of.model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    # And the session goes on with the next batch.
    inputs, labels = of.batch(MINIBATCH, 0)
    inputs[BAD] = 0.5
    assert math.isfinite(session.step(inputs, labels).loss)
