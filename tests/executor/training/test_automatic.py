from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from executor import Trainer, Workload, profile
from executor.errors import ModelError
from sim.plan import HarmonyPlan, Policy
from tests.executor import made
from tests.executor.trained import MINIBATCH, adam, chain, normalised_chain
from tests.executor.training.loops import Plain, assert_alike, batches, in_groups
from traces.schema import Trace


@pytest.mark.parametrize("policy", [Policy.HARMONY_PP, Policy.DP_SWAP])
def test_plans_for_the_optimizer_it_is_given(policy: Policy) -> None:
    """Whose state is that of some parameters only, and in groups."""

    def some(parameters: Iterator[nn.Parameter]) -> Optimizer:
        return in_groups(parameter for parameter in parameters if parameter.ndim == 2)

    ours, theirs = chain(), chain()
    optimizer, plain = some(ours.model.parameters()), Plain(theirs, some(theirs.model.parameters()))
    trainer = Trainer(
        ours.model, ours.loss_fn, optimizer, machine=made.machine(2), gpu_memory="1 MB", policies=[policy.value]
    )
    for batch in batches(ours, 2):
        assert trainer.step(*batch) == pytest.approx(plain.step(*batch), abs=1e-10)
    assert_alike(trainer, plain)
    assert trainer.schedule.plan.policy is policy
    assert trainer.predicted is not None
    assert trainer.predicted.to_frame().task.tolist() == trainer.timeline().to_frame().query("step == 1").task.tolist()


def test_sizes_that_need_too_much_memory_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(workload: Workload, *, microbatches: Sequence[int], **options: Any) -> Trace:
        if microbatches[-1] > 3:
            raise ModelError("layer 0 fails") from torch.OutOfMemoryError("of 80 GiB")
        return profile(workload, microbatches=microbatches, **options)

    monkeypatch.setattr("executor.training.automatic.profile", too_large)
    workload = chain()
    optimizer = adam(workload.model.parameters())
    trainer = Trainer(workload.model, workload.loss_fn, optimizer, machine=made.machine(1), policies=["harmony-dp"])
    trainer.step(*workload.batch(MINIBATCH, 0))
    plan = trainer.schedule.plan
    assert isinstance(plan, HarmonyPlan)
    assert max(plan.u_fwd, plan.u_bwd) <= 3


def test_a_model_that_cannot_be_profiled_is_an_error() -> None:
    """At any size."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(4, 5)).double()
    trainer = Trainer(model, nn.functional.cross_entropy, adam(model.parameters()), machine=made.machine(1))
    with pytest.raises(ModelError, match=r"layer 1 .* fails on an input of shape .2, 5."):
        trainer.step(*chain().batch(MINIBATCH, 0))


def test_planning_and_training_draw_nothing_from_the_global_generator() -> None:
    """So data is shuffled alike with any schedule. (The model cannot train on microbatches of one sample.)"""
    workload = normalised_chain()
    model = workload.model
    before, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    trainer = Trainer(
        model, workload.loss_fn, adam(model.parameters()), machine=made.machine(1), policies=["harmony-dp"]
    )
    trainer.prepare(*workload.batch(MINIBATCH, 0))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    trainer.step(*workload.batch(MINIBATCH, 0))
    assert torch.equal(torch.get_rng_state(), before)


SCRIPT = """
import torch
import executor.training.trainer
from executor import Trainer

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
trainer = Trainer(model, torch.nn.functional.cross_entropy, optimizer, "auto", gpus=2, gpu_memory="1 MB",
                  policies=["harmony-dp"])
inputs, labels = torch.randn(6, 8), torch.randint(3, (6,))
losses = [trainer.step(inputs, labels) for _ in range(5)]
assert losses[-1] < losses[0]
assert trainer.predicted.info.steps == 1 and trainer.timeline().info.steps == 5
print(trainer.schedule.plan.gpus, trainer.machine.gpus[0].usable_bytes)
"""


def test_plans_by_itself_in_a_plain_script(tmp_path: Path) -> None:
    """Without a guard, as notebooks run code."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "-W", "error", "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2 1000000\n", "")
