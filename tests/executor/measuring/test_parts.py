"""Profiles of backwards in two parts: a step that they plan stays inside what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from executor.measuring.profile import profile
from executor.models.workloads import Workload
from executor.running.run import run
from sim.builders import build
from sim.plan import HarmonyPlan, Policy
from sim.schedule import TaskKind
from tests.executor import made
from tests.executor.trained import CHAIN_PACKS, GPT2_PACKS, chain, gpt2, gradient_step, normalised_chain
from traces.checks import check_trace
from traces.costs import Costs
from traces.schema import Phase, Provenance, Trace


def measured(make: Callable[[], Workload], u: int = 2) -> Trace:
    return profile(make(), microbatches=[u], optimizer=gradient_step, warmups=0, repeats=1, budget_s=0.1, in_parts=True)


@pytest.mark.parametrize(
    ("make", "packs"),
    [(chain, CHAIN_PACKS), (gpt2, GPT2_PACKS), (normalised_chain, (((0, 0), (1, 2)), ((0, 0), (1, 2), (3, 6))))],
    ids=["chain", "gpt2", "normalised"],
)
def test_a_planned_step_stays_inside(make: Callable[[], Workload], packs: tuple) -> None:
    """Runs measure what every task takes, and what is held between the two parts."""
    trace = measured(make)
    plan = HarmonyPlan(
        policy=Policy.HARMONY_PP, minibatch=8, gpus=2, u_fwd=2, u_bwd=2, packs_fwd=packs[0], packs_bwd=packs[1],
        split_backward=4,
    )  # fmt: skip
    schedule = build(plan, trace, made.machine(2))
    assert any(schedule.copies(TaskKind.BACKWARD_WEIGHT))
    run(schedule, make(), made.machine(2), steps=1, warmup_steps=0, optimizer=gradient_step)


def test_every_layer_has_both_parts_and_what_they_hold() -> None:
    trace = measured(gpt2)
    check_trace(trace, "profile")
    costs = Costs(trace)
    for index, layer in enumerate(trace.layers):
        for phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT):
            assert costs.provenance(index, phase, 2) is Provenance.MEASURED
        if not layer.gradient_bytes:
            assert costs.backward_weight_ns(index, index, 2) == 0
        assert costs.held_bytes(index, index, 2) >= costs.saved_bytes(index, index, 2)


def test_of_a_product_the_output_and_its_gradient_are_held() -> None:
    """Its input is the planned buffer; the gradient of its weight is made in the second part."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5, dtype=torch.float64))
    trace = measured(lambda: Workload("one", model, torch.nn.functional.cross_entropy, made.vectors()))
    size = trace.sizes[0]
    assert size.held_bytes == 2 * size.output_bytes == 2 * 2 * 5 * 8


def test_nothing_is_said_of_parts_unless_asked() -> None:
    trace = profile(chain(), microbatches=[2], optimizer=gradient_step, warmups=0, repeats=1, budget_s=0.1)
    assert not any(row.phase.is_part for row in trace.times)
    assert all(row.held_bytes is None and row.parts_workspace_bytes is None for row in trace.sizes)
