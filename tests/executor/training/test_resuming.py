"""Training that goes on from a checkpoint."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from executor import Trainer
from executor.devices.emulated import EmulatedDevices
from executor.models.workloads import Workload
from executor.running.session import Session
from executor.training.checkpoint import Position, load, save
from sim.builders import build
from sim.plan import Plan, Policy, Reduce, Residency, UpdateOn
from tests.executor import made
from tests.executor.trained import (
    CHAIN_PACKS,
    GPT2_PACKS,
    MINIBATCH,
    SEED,
    Make,
    adam,
    chain,
    dp_swap,
    gpt2,
    harmony,
    name_of,
    normalised_chain,
    sharded,
    tied_chain,
    trace_of,
)
from tests.executor.training.equality import assert_equal


class Training:
    """A workload that trains by a plan, with a learning rate that changes from step to step."""

    def __init__(self, make: Callable[[], Workload], plan: Plan, folder: Path | None = None) -> None:
        self.workload = make()
        self.model = self.workload.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=7)
        self.position = Position(seed=SEED)
        if folder is not None:
            with torch.no_grad():  # what was there before does not count
                for parameter in self.model.parameters():
                    parameter.fill_(0.5)
            self.position = load(folder, self.model, self.optimizer, [self.scheduler])
        machine = made.machine(plan.gpus)
        schedule = build(plan, trace_of(self.workload, state_tensors=2), machine)
        self.session = Session(
            schedule,
            self.workload.layers(),
            self.optimizer,
            EmulatedDevices(machine),
            seed=self.position.seed,
            first_step=self.position.step,
        )

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            sample = self.position.data or 0
            losses.append(self.session.step(*self.workload.batch(MINIBATCH, SEED + sample)).loss)
            self.optimizer._opt_called = True  # or schedulers warn: a session does not call optimizer.step()
            self.scheduler.step()
            self.position = Position(self.position.step + 1, SEED, data=sample + 7)
        return losses

    def save(self, folder: Path) -> None:
        self.session.write_home()
        save(folder, self.model, self.optimizer, [self.scheduler], self.position)

    def everything(self) -> dict[str, Any]:
        self.session.write_home()
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "position": vars(self.position),
        }


CHAIN_PLANS = [
    harmony(Policy.HARMONY_DP, 2, (3, 3), CHAIN_PACKS),
    harmony(Policy.HARMONY_PP, 2, (2, 2), CHAIN_PACKS, update=UpdateOn.GPU),
    harmony(Policy.HARMONY_DP, 2, (2, 2), CHAIN_PACKS, update=UpdateOn.GPU, reduce=Reduce.SCATTER),
    harmony(
        Policy.HARMONY_PP,
        3,
        (4, 2),
        CHAIN_PACKS,
        update=UpdateOn.GPU,
        resident_weights=(0, 1, 2),
        resident_state=(1, 2),
    ),
    dp_swap(2, 3, residency=Residency.LRU),
    sharded(2, 2),
]


@cache
def six_steps(make: Callable[[], Workload], plan: Plan) -> tuple[Any, Any]:
    """Their losses, and what came of them."""
    training = Training(make, plan)
    return training.steps(6), training.everything()


def goes_on(make: Callable[[], Workload], plan: Plan, folder: Path, other: Plan | None = None) -> tuple[Any, Any]:
    """What comes of three steps, a checkpoint and three, by another plan maybe."""
    first = Training(make, plan)
    losses = first.steps(3)
    first.save(folder)
    second = Training(make, other or plan, folder)
    return [*losses, *second.steps(3)], second.everything()


def gpt2_with_dropout() -> Workload:
    return gpt2(dropout=0.2)


@pytest.mark.parametrize("plan", CHAIN_PLANS, ids=name_of)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(plan: Plan, tmp_path: Path) -> None:
    assert_equal(goes_on(chain, plan, tmp_path / "c"), six_steps(chain, plan))


NORMALISED_PACKS = ((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 6))
TIED_PACKS = ((0, 0), (1, 1)), ((0, 0), (1, 1), (2, 4))


@pytest.mark.parametrize(
    ("make", "packs"),
    [(gpt2_with_dropout, GPT2_PACKS), (normalised_chain, NORMALISED_PACKS), (tied_chain, TIED_PACKS)],
    ids=["gpt2", "normalised", "tied"],
)
@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP])
def test_so_it_does_with_dropout_statistics_and_tied_weights(
    make: Callable[[], Workload], packs: Any, policy: Policy, tmp_path: Path
) -> None:
    plan = harmony(policy, 2, (2, 2), packs, update=UpdateOn.GPU)
    assert_equal(goes_on(make, plan, tmp_path / "c"), six_steps(make, plan))


def test_a_baseline_with_homes_of_its_own_for_each_gpu_goes_on_with_statistics(tmp_path: Path) -> None:
    assert_equal(goes_on(normalised_chain, dp_swap(2, 2), tmp_path / "c"), six_steps(normalised_chain, dp_swap(2, 2)))


@pytest.mark.parametrize(
    "other",
    [
        harmony(Policy.HARMONY_PP, 3, (2, 2), (((0, 0), (1, 2)), ((0, 0), (1, 2), (3, 6))), resident_weights=(1,)),
        harmony(Policy.HARMONY_DP, 1, (2, 2), GPT2_PACKS, update=UpdateOn.GPU),
        dp_swap(1, 2),
    ],
    ids=name_of,
)
def test_another_plan_with_the_same_microbatches_goes_on_bit_for_bit(other: Plan, tmp_path: Path) -> None:
    """Other packs, another number of GPUs, updates elsewhere: dropout and sums are the same."""
    plan = harmony(Policy.HARMONY_PP, 2, (2, 2), GPT2_PACKS)
    assert_equal(goes_on(gpt2_with_dropout, plan, tmp_path / "c", other), six_steps(gpt2_with_dropout, plan))


@pytest.mark.parametrize(
    "other",
    [
        harmony(Policy.HARMONY_DP, 2, (4, 4), GPT2_PACKS, update=UpdateOn.GPU),
        dp_swap(1, 3),
        sharded(3, 1),
    ],
    ids=name_of,
)
def test_other_microbatches_differ_by_rounding(other: Plan, tmp_path: Path) -> None:
    plan = harmony(Policy.HARMONY_PP, 2, (2, 2), GPT2_PACKS)
    assert_equal(goes_on(gpt2, plan, tmp_path / "c", other), six_steps(gpt2, plan), tolerance=1e-12)


ANOTHER_PROCESS = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.executor.training.test_resuming import CHAIN_PLANS, Training, chain
second = Training(chain, CHAIN_PLANS[1], Path(sys.argv[1]))
losses = second.steps(3)
torch.save((losses, second.everything()), sys.argv[2])
"""


def test_another_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    losses, end = six_steps(chain, CHAIN_PLANS[1])
    first = Training(chain, CHAIN_PLANS[1])
    first.steps(3)
    first.save(tmp_path / "c")
    subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS, tmp_path / "c", tmp_path / "end.pt"], check=True, timeout=100
    )
    found = torch.load(tmp_path / "end.pt", weights_only=True)
    assert_equal(found, (losses[3:], end))


def scheduled(make: Make, plan: Plan, seed: int = 0) -> tuple[Trainer, Any]:
    workload = make()
    machine = made.machine(plan.gpus)
    optimizer = adam(workload.model.parameters())
    schedule = build(plan, trace_of(workload, state_tensors=2), machine)
    trainer = Trainer(workload.model, workload.loss_fn, optimizer, schedule, machine=machine, seed=seed)
    return trainer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)


def losses_of(trainer: Trainer, scheduler: Any, batches: Iterable[Any]) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(trainer.step(*batch))
        scheduler.step()
    return losses


def gpt2_batches(steps: range) -> list[Any]:
    return [gpt2().batch(MINIBATCH, SEED + step) for step in steps]


@pytest.mark.parametrize("opened", [False, True], ids=["new", "open"])
@pytest.mark.parametrize(
    "options", [{}, {"resident_weights": (0, 1, 2), "resident_state": (0, 2)}], ids=["swaps", "stays"]
)
def test_a_trainer_goes_on_with_a_plan_and_a_seed_bit_for_bit(
    opened: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    """A new one, and one that has trained on something else already."""
    plan = harmony(Policy.HARMONY_PP, 2, (2, 2), GPT2_PACKS, update=UpdateOn.GPU, **options)
    trainer, scheduler = scheduled(gpt2_with_dropout, plan, seed=5)
    first = losses_of(trainer, scheduler, gpt2_batches(range(3)))
    trainer.save(tmp_path / "c", [scheduler], data={"sample": 3}, extras=["mine"])
    second = losses_of(trainer, scheduler, gpt2_batches(range(3, 6)))
    assert len({*first, *second}) == 6
    other, other_scheduler = scheduled(gpt2_with_dropout, plan)
    if opened:
        losses_of(other, other_scheduler, gpt2_batches(range(7, 9)))
    position = other.load(tmp_path / "c", [other_scheduler])
    assert position == Position(3, 5, {"sample": 3}, ["mine"])
    assert losses_of(other, other_scheduler, gpt2_batches(range(3, 6))) == second
    assert other.steps == 6
    assert_equal(other.state_dict(), trainer.state_dict())
    assert_equal(other.optimizer.state_dict(), trainer.optimizer.state_dict())
    assert_equal(other_scheduler.state_dict(), scheduler.state_dict())


def test_a_trainer_resumes_where_its_last_whole_checkpoint_is(tmp_path: Path) -> None:
    plan = harmony(Policy.HARMONY_DP, 1, (4, 4), CHAIN_PACKS)
    trainer, scheduler = scheduled(chain, plan)
    assert trainer.resume(tmp_path / "run", [scheduler]) is None
    losses = []
    for step in range(4):
        losses += losses_of(trainer, scheduler, [chain().batch(MINIBATCH, step)])
        trainer.save_step(tmp_path / "run", [scheduler], keep=3)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"step-{step:06}" for step in (2, 3, 4)]
    (tmp_path / "run" / "step-000004" / "training.json").write_text("{")
    other, other_scheduler = scheduled(chain, plan)
    assert other.resume(tmp_path / "run", [other_scheduler]) == Position(3, 0)
    assert losses_of(other, other_scheduler, [chain().batch(MINIBATCH, 3)]) == losses[3:]
