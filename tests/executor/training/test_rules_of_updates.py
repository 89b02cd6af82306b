"""A Trainer clips, scales and skips by its rule."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from executor import Skip, Trainer, UpdateRule
from executor.errors import RuleError
from sim.plan import UpdateWhen
from tests.executor import made

BATCHES = [made.vectors()(8, seed) for seed in range(3)]


def test_auto_clips_as_plain_pytorch_does() -> None:
    model = made.mlp()
    plain = copy.deepcopy(model)
    rule = UpdateRule(max_norm=0.05, loss_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.functional.cross_entropy, optimizer, "auto", gpus=2, rule=rule)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for inputs, labels in BATCHES:
        loss = trainer.step(inputs, labels)
        theirs.zero_grad()
        expected = nn.functional.cross_entropy(plain(inputs), labels)
        torch.autograd.backward(expected)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        theirs.step()
        assert loss == pytest.approx(float(expected.detach()), abs=1e-10)
        assert trainer.last_step is not None
        assert trainer.last_step.gradient_norm == pytest.approx(float(norm), rel=1e-6)
    assert trainer.schedule.plan.update_when is UpdateWhen.END  # type: ignore[union-attr]
    torch.testing.assert_close(trainer.state_dict(), plain.state_dict(), rtol=0, atol=1e-10)


def test_a_step_that_is_skipped_changes_nothing() -> None:
    model = made.mlp()
    optimizer = torch.optim.Adam(model.parameters())
    trainer = Trainer(model, nn.functional.cross_entropy, optimizer, rule=UpdateRule(skip=Skip.GRADIENT))
    trainer.step(*BATCHES[0])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    inputs, labels = BATCHES[1]
    spoiled = inputs.clone()
    spoiled[3] = math.nan
    assert math.isnan(trainer.step(spoiled, labels))
    after = model.state_dict(), optimizer.state_dict()["state"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert math.isfinite(trainer.step(inputs, labels))


def test_a_schedule_that_updates_just_in_time_cannot_clip() -> None:
    model = made.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Trainer(model, nn.functional.cross_entropy, optimizer)
    trainer.step(*BATCHES[0])
    trainer.rule = UpdateRule(max_norm=1.0)
    with pytest.raises(RuleError, match="--update-when end"):
        trainer.step(*BATCHES[1])
