"""What is known of a step before its updates."""

from __future__ import annotations

import math

import pytest
import torch

from executor.devices.emulated import EmulatedDevices
from executor.errors import NonFiniteGradient, NonFiniteLoss
from executor.running.context import LossPart, StepContext
from executor.running.gradients import GradientNorm
from executor.running.rules import UpdateRule
from executor.running.shares import Shares
from sim.errors import ScheduleError
from sim.schedule import Interval, Lane
from tests.executor import made


def context(losses: dict[Interval, float], *norms: float, before: StepContext | None = None) -> StepContext:
    """Of step 7, with a minibatch of 8 samples."""
    host = EmulatedDevices(made.machine()).queue((None, Lane.UPDATE))
    step = StepContext(7, 0, Shares(8), checks_memory=False, rule=UpdateRule(max_norm=2.0), host=host, before=before)
    for samples, loss in losses.items():
        share = (samples[1] - samples[0]) / 8
        step.losses.append(LossPart(samples, share, torch.tensor(loss), host.mark()))
    step.norms.extend(GradientNorm(norm, "some.weight") for norm in norms)
    return step


def test_finite_losses_and_norms_lead_to_an_update() -> None:
    step = context({(6, 8): 4.0, (0, 6): 8.0}, 8.0)
    assert step.problem is None
    assert step.update_factor() == pytest.approx(0.25, rel=1e-6)
    assert step.loss() == 7.0


def test_the_first_samples_whose_loss_is_not_finite_are_named_and_before_any_norm() -> None:
    step = context({(6, 8): math.inf, (3, 6): math.nan, (0, 3): 1.0}, math.nan)
    assert isinstance(step.problem, NonFiniteLoss)
    assert (step.problem.step, step.problem.samples) == (7, (3, 6))
    assert step.update_factor() is None


def test_a_norm_that_is_not_finite_names_the_parameter() -> None:
    step = context({(0, 8): 1.0}, math.inf)
    assert isinstance(step.problem, NonFiniteGradient)
    assert (step.problem.step, step.problem.parameter) == (7, "some.weight")


def test_a_step_updates_nothing_if_one_that_it_overlaps_did_not() -> None:
    step = context({(0, 8): 1.0}, before=context({(0, 8): math.nan}))
    assert isinstance(step.problem, NonFiniteLoss)
    assert step.update_factor() is None


def test_an_update_before_all_losses_are_known_is_an_error_of_the_schedule() -> None:
    with pytest.raises(ScheduleError, match="the losses of 5 samples are not known before an update"):
        context({(2, 5): 1.0}).update_factor()
