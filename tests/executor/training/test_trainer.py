from __future__ import annotations

import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import executor.training.trainer
from executor import Trainer
from executor.errors import DifferentModel, ModelError, OptimizerError
from executor.models.workloads import Workload
from sim.plan import Plan, Policy
from sim.schedule_files import save_schedule
from tests.executor.trained import GPT2_PACKS, MINIBATCH, adam, chain, gpt2, harmony, name_of, skips
from tests.executor.training.loops import (
    ON_CPU,
    ON_GPU,
    PLANS,
    assert_alike,
    batches,
    in_groups,
    pair,
    schedule_of,
    trainer_of,
)

EACH_PLAN = pytest.mark.parametrize("plan", PLANS, ids=name_of)


@EACH_PLAN
def test_trains_as_a_plain_loop_with_groups_and_a_scheduler(plan: Plan) -> None:
    trainer, plain = pair(chain, plan, in_groups)
    schedulers = [torch.optim.lr_scheduler.StepLR(each.optimizer, 2, 0.5) for each in (trainer, plain)]
    for batch in batches(chain(), 5):
        assert trainer.step(*batch) == pytest.approx(plain.step(*batch), abs=1e-10)
        for scheduler in schedulers:
            scheduler.step()
    assert_alike(trainer, plain)


def test_parameters_beside_the_optimizers_are_not_trained() -> None:
    def some(parameters: Iterator[nn.Parameter]) -> Optimizer:
        return adam(list(parameters)[2:])

    trainer, plain = pair(chain, ON_CPU, some)
    for batch in batches(chain(), 2):
        trainer.step(*batch)
        plain.step(*batch)
    assert_alike(trainer, plain)


def test_several_batches_make_up_a_minibatch() -> None:
    trainer, plain = pair(skips, harmony(Policy.HARMONY_DP, 2, (2, 2), (((0, 1),), ((0, 1), (2, 5)))))
    inputs, labels = skips().batch(MINIBATCH, 0)

    def part(start: int, stop: int) -> dict[str, Tensor]:
        return {**{name: tensor[start:stop] for name, tensor in inputs.items()}, "labels": labels[start:stop]}

    assert trainer.step_on([part(0, 3), part(3, 8)]) == pytest.approx(plain.step(inputs, labels), abs=1e-10)
    assert_alike(trainer, plain)
    with pytest.raises(DifferentModel, match=r"3 samples, .* minibatches of 8; give several .*drop_last=True"):
        trainer.step(part(0, 3))
    with pytest.raises(DifferentModel, match=r"16 samples, .* minibatches of 8; give smaller"):
        trainer.step_on([part(0, 8), part(0, 8)])


def test_optimizers_that_need_a_closure_are_refused() -> None:
    workload = chain()
    trainer = trainer_of(workload, ON_CPU, torch.optim.LBFGS(workload.model.parameters()))
    with pytest.raises(OptimizerError, match=r"LBFGS .*closure"):
        trainer.step(*workload.batch(MINIBATCH, 0))


def test_runs_a_file_and_shows_its_last_steps(tmp_path: Path) -> None:
    workload = chain()
    save_schedule(schedule_of(workload, ON_GPU), tmp_path / "best.json")
    trainer = Trainer(list(workload.model), workload.loss_fn, adam(workload.model.parameters()), tmp_path / "best.json")
    with pytest.raises(ModelError, match="nothing is planned"):
        _ = trainer.machine
    for batch in batches(workload, 3):
        trainer.step(*batch)
    assert trainer.state_dict().keys() == workload.model.state_dict().keys()
    assert trainer.machine.name == "emulated"
    timeline = trainer.timeline()
    assert timeline.info.steps == 3
    assert timeline.info.warmup_steps == 1
    assert trainer.steps == 3


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_trains_a_transformer_on_dictionaries() -> None:
    def text() -> Workload:
        def batch(samples: int, seed: int) -> tuple[Any, Tensor]:
            ids = torch.randint(11, (samples, 6), generator=torch.Generator().manual_seed(seed))
            return {"input_ids": ids}, ids

        return Workload("gpt2", gpt2().model, shifted, batch)

    trainer, plain = pair(text, harmony(Policy.HARMONY_PP, 2, (4, 4), GPT2_PACKS))
    for inputs, labels in batches(text(), 2):
        loss = trainer.step({**inputs, "labels": labels})
        assert loss == pytest.approx(plain.step(inputs, labels), abs=1e-10)
    assert_alike(trainer, plain)
    inputs, labels = text().batch(3, 9)
    assert trainer.predict(inputs).shape == (3, 6, 11)


def test_the_example_of_the_documentation_runs() -> None:
    failures, tried = doctest.testmod(executor.training.trainer, extraglobs={"torch": torch}, report=True)
    assert tried == 5
    assert failures == 0
