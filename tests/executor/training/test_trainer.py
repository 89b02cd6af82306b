from __future__ import annotations

import copy
import doctest
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import executor.training.trainer
from executor import Trainer
from executor.errors import DifferentModel, ModelError, OptimizerError, WorkloadError
from executor.models.inputs import Inputs, call_model, logits_of
from executor.models.workloads import Workload
from executor.training.inference import outputs_by_layer
from sim.builders import build
from sim.plan import Plan, Policy, UpdateOn
from sim.schedule import Schedule
from sim.schedule_files import save_schedule
from tests.executor import made
from tests.executor.trained import (
    CHAIN_PACKS,
    GPT2_PACKS,
    MINIBATCH,
    adam,
    chain,
    dp_swap,
    gpt2,
    harmony,
    name_of,
    normalised_chain,
    sharded,
    skips,
    trace_of,
)

ON_GPU = harmony(Policy.HARMONY_PP, 2, (4, 2), CHAIN_PACKS, update=UpdateOn.GPU)
STAYS = harmony(
    Policy.HARMONY_DP, 2, (4, 4), CHAIN_PACKS, update=UpdateOn.GPU, resident_weights=(0, 1, 2), resident_state=(0, 2)
)
PLANS = [
    harmony(Policy.HARMONY_DP, 2, (3, 3), CHAIN_PACKS),
    ON_GPU,
    STAYS,
    dp_swap(2, 3),
    sharded(2, 2),
]
EACH_PLAN = pytest.mark.parametrize("plan", PLANS, ids=name_of)
Change = Callable[[nn.Module, Optimizer], None]


def schedule_of(workload: Workload, plan: Plan) -> Schedule:
    return build(plan, trace_of(workload, state_tensors=2), made.machine(plan.gpus))


def trainer_of(workload: Workload, plan: Plan, optimizer: Optimizer | None = None) -> Trainer:
    optimizer = optimizer or adam(workload.model.parameters())
    machine = made.machine(plan.gpus)
    return Trainer(workload.model, workload.loss_fn, optimizer, schedule_of(workload, plan), machine=machine)


class Plain:
    """The loop that a Trainer stands for."""

    def __init__(self, workload: Workload, optimizer: Optimizer) -> None:
        self.model, self.loss_fn, self.optimizer = workload.model, workload.loss_fn, optimizer

    def step(self, inputs: Any, labels: Tensor) -> float:
        self.optimizer.zero_grad()
        outputs = self.model(**inputs) if isinstance(inputs, dict) else self.model(inputs)
        loss = self.loss_fn(getattr(outputs, "logits", outputs), labels)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def pair(make: Callable[[], Workload], plan: Plan, optimizer: Any = adam) -> tuple[Trainer, Plain]:
    ours, theirs = make(), make()
    return (
        trainer_of(ours, plan, optimizer(ours.model.parameters())),
        Plain(theirs, optimizer(theirs.model.parameters())),
    )


def batches(workload: Workload, steps: int) -> Iterator[tuple[Any, Tensor]]:
    return (workload.batch(MINIBATCH, seed) for seed in range(steps))


def assert_alike(trainer: Trainer, plain: Plain) -> None:
    ours, theirs = trainer.state_dict(), plain.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-10)


def in_groups(parameters: Iterator[nn.Parameter]) -> Optimizer:
    first, second, *others = parameters
    groups = [{"params": others, "lr": 0.02, "weight_decay": 0.1}, {"params": [first, second]}]
    return torch.optim.AdamW(groups, lr=0.01)


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

    trainer, plain = pair(chain, PLANS[0], some)
    for batch in batches(chain(), 2):
        trainer.step(*batch)
        plain.step(*batch)
    assert_alike(trainer, plain)


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
            trainer.sync()
            for each in (trainer, plain):
                change(each.model, each.optimizer)
        assert trainer.step(*batch) == pytest.approx(plain.step(*batch), abs=1e-10)
    assert_alike(trainer, plain)


@pytest.mark.parametrize("change", [load_model, load_optimizer])
def test_loading_needs_no_sync(change: Change) -> None:
    trainer, plain = pair(chain, STAYS)
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
    trainer = trainer_of(workload, STAYS)
    batch = workload.batch(MINIBATCH, 0)
    trainer.step(*batch)
    change(trainer.model, trainer.optimizer)
    with pytest.raises(ModelError, match=r"newer values stayed on GPUs; call sync\(\)"):
        trainer.step(*batch)


def test_structure_and_modes_must_stay() -> None:
    workload = chain()
    trainer = trainer_of(workload, PLANS[0])
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
    trainer = trainer_of(workload, PLANS[0])
    trainer.step(*workload.batch(MINIBATCH, 0))
    workload.model.float()
    with pytest.raises(ModelError, match=r"0.weight is torch.float32 \[10, 6\] on cpu now and was torch.float64"):
        trainer.step(*workload.batch(MINIBATCH, 1))


def test_evaluates_as_the_model_does_and_disturbs_nothing() -> None:
    """Before training, between steps, of other sizes; with dropout and batch statistics."""
    plan = harmony(Policy.HARMONY_DP, 2, (4, 4), (CHAIN_PACKS[0], ((0, 2), (3, 4), (5, 6))))
    workload, undisturbed = normalised_chain(), normalised_chain()
    trainer, other = trainer_of(workload, plan), trainer_of(undisturbed, plan)
    for number, batch in enumerate(batches(workload, 3)):
        inputs, labels = workload.batch(3 + number, 7)
        reference = copy.deepcopy(workload.model).eval()
        random = torch.get_rng_state()
        assert torch.equal(trainer.predict(inputs), reference(inputs))
        assert trainer.evaluate(inputs, labels) == workload.loss_fn(reference(inputs), labels).item()
        assert torch.equal(torch.get_rng_state(), random)
        assert workload.model.training
        assert trainer.step(*batch) == other.step(*batch)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, trainer.state_dict()[name])


@pytest.mark.parametrize("make", [normalised_chain, skips, gpt2])
def test_a_forward_by_layer_is_the_models(make: Callable[[], Workload]) -> None:
    workload = make()
    inputs, _ = workload.batch(5, 0)
    model = copy.deepcopy(workload.model).eval()
    given = Inputs.of(inputs)
    outputs = outputs_by_layer(workload.model, workload.loss_fn, given, torch.device("cpu"))
    assert torch.equal(outputs, logits_of(call_model(model, given)))
    assert workload.model.training


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
    trainer = trainer_of(workload, PLANS[0])
    batch = workload.batch(MINIBATCH, 0)
    with torch.autocast("cpu"), pytest.raises(ModelError, match="autocast is on"):
        trainer.step(*batch)
    handle = trainer.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(OptimizerError, match="Adam has hooks"):
        trainer.step(*batch)
    handle.remove()
    trainer.step(*batch)


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


def test_a_batch_has_labels() -> None:
    workload = chain()
    trainer = trainer_of(workload, PLANS[0])
    inputs, labels = workload.batch(MINIBATCH, 0)
    assert trainer.evaluate([inputs, labels]) == trainer.evaluate(inputs, labels)
    with pytest.raises(WorkloadError, match="no labels"):
        trainer.step(inputs)
    with pytest.raises(WorkloadError, match="a dictionary of x"):
        trainer.step({"x": inputs})
    with pytest.raises(WorkloadError, match=r"shapes \(8, 6\), its labels \(7,\)"):
        trainer.step(inputs, labels[1:])


def test_optimizers_that_need_a_closure_are_refused() -> None:
    workload = chain()
    trainer = trainer_of(workload, PLANS[0], torch.optim.LBFGS(workload.model.parameters()))
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


@pytest.mark.parametrize("policy", [Policy.HARMONY_PP, Policy.DP_SWAP])
def test_plans_for_the_optimizer_it_is_given(policy: Policy) -> None:
    """Whose state is that of some parameters only, and in groups."""

    def some(parameters: Iterator[nn.Parameter]) -> Optimizer:
        return in_groups(iter(list(parameters)[1:]))

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


def test_the_example_of_the_documentation_runs() -> None:
    failures, tried = doctest.testmod(executor.training.trainer, extraglobs={"torch": torch}, report=True)
    assert tried == 5
    assert failures == 0


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
