from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn
from torch.optim import Optimizer

from executor import Trainer
from sim.plan import Policy
from tests.executor import made
from tests.executor.trained import (
    chain,
)
from tests.executor.training.loops import (
    Plain,
    assert_alike,
    batches,
    in_groups,
)


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
