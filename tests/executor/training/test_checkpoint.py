"""Checkpoints of training: written, damaged, read, and training that goes on from them."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from executor.devices.emulated import EmulatedDevices
from executor.models.workloads import Workload
from executor.running.session import Session
from executor.training.checkpoint import Position, check, load, save
from sim.builders import build
from sim.plan import Plan, Policy, Reduce, Residency, UpdateOn
from tests.executor import made
from tests.executor.trained import (
    CHAIN_PACKS,
    GPT2_PACKS,
    MINIBATCH,
    SEED,
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

MakeOptimizer = Callable[[Any], Optimizer]


def adam(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Training:
    """A workload that trains by a plan, with a learning rate that changes from step to step."""

    def __init__(self, make: Callable[[], Workload], plan: Plan, folder: Path | None = None) -> None:
        self.workload = make()
        self.model = self.workload.model
        self.optimizer = adam(self.model.parameters())
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


def assert_equal(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Of the same types, and bit for bit, or but for a tolerance of floating point numbers."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_equal(found[key], expected[key], tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other, tolerance)
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=0, abs=tolerance, nan_ok=True)
    else:
        assert found == expected


# ------------------------------------------------------------------------------------------------------ going on

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


def goes_on(make: Callable[[], Workload], plan: Plan, folder: Path, other: Plan | None = None) -> tuple[Any, Any]:
    """What comes of six steps, and of three, a checkpoint and three, by another plan maybe."""
    whole, first = Training(make, plan), Training(make, plan)
    losses = whole.steps(6)
    begun = first.steps(3)
    first.save(folder)
    second = Training(make, other or plan, folder)
    return ([*begun, *second.steps(3)], second.everything()), (losses, whole.everything())


@pytest.mark.parametrize("plan", CHAIN_PLANS, ids=name_of)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(plan: Plan, tmp_path: Path) -> None:
    found, expected = goes_on(chain, plan, tmp_path / "c")
    assert_equal(found, expected)


NORMALISED_PACKS = ((0, 1), (2, 3)), ((0, 1), (2, 3), (4, 6))
TIED_PACKS = ((0, 0), (1, 1)), ((0, 0), (1, 1), (2, 4))


@pytest.mark.parametrize(
    ("make", "packs"),
    [(lambda: gpt2(dropout=0.2), GPT2_PACKS), (normalised_chain, NORMALISED_PACKS), (tied_chain, TIED_PACKS)],
    ids=["gpt2", "normalised", "tied"],
)
@pytest.mark.parametrize("policy", [Policy.HARMONY_DP, Policy.HARMONY_PP])
def test_so_it_does_with_dropout_statistics_and_tied_weights(
    make: Callable[[], Workload], packs: Any, policy: Policy, tmp_path: Path
) -> None:
    plan = harmony(policy, 2, (2, 2), packs, update=UpdateOn.GPU)
    found, expected = goes_on(make, plan, tmp_path / "c")
    assert_equal(found, expected)


def test_a_baseline_with_homes_of_its_own_for_each_gpu_goes_on_with_statistics(tmp_path: Path) -> None:
    found, expected = goes_on(normalised_chain, dp_swap(2, 2), tmp_path / "c")
    assert_equal(found, expected)


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
    found, expected = goes_on(lambda: gpt2(dropout=0.2), plan, tmp_path / "c", other)
    assert_equal(found, expected)


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
    found, expected = goes_on(gpt2, plan, tmp_path / "c", other)
    assert_equal(found, expected, tolerance=1e-12)


ANOTHER_PROCESS = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from tests.executor.training.test_checkpoint import CHAIN_PLANS, Training, chain
second = Training(chain, CHAIN_PLANS[1], Path(sys.argv[1]))
losses = second.steps(3)
torch.save((losses, second.everything()), sys.argv[2])
"""


def test_another_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole, first = Training(chain, CHAIN_PLANS[1]), Training(chain, CHAIN_PLANS[1])
    losses = whole.steps(6)
    first.steps(3)
    first.save(tmp_path / "c")
    subprocess.run(
        [sys.executable, "-c", ANOTHER_PROCESS, tmp_path / "c", tmp_path / "end.pt"], check=True, timeout=100
    )
    found = torch.load(tmp_path / "end.pt", weights_only=True)
    assert_equal(found, (losses[3:], whole.everything()))


# --------------------------------------------------------------------------------------------------- what is written


class Things(NamedTuple):
    model: nn.Module
    optimizer: Optimizer
    scheduler: Any


def trained(seed: int = 0, *, groups: Callable[[nn.Module], Any] = nn.Module.parameters) -> Things:
    """A small model after a plain step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return Things(model, optimizer, scheduler)


def state_of(things: Things) -> list[Any]:
    return copy.deepcopy([each.state_dict() for each in things])


def saved(folder: Path, things: Things | None = None, **options: Any) -> Path:
    model, optimizer, scheduler = things or trained()
    return save(folder, model, optimizer, [scheduler], Position(step=1), **options)


def loaded(folder: Path, things: Things) -> Position:
    return load(folder, things.model, things.optimizer, [things.scheduler])


@pytest.mark.parametrize("shard_bytes", [10**9, 60])
def test_all_comes_back(shard_bytes: int, tmp_path: Path) -> None:
    things, others = trained(), trained(1)
    position = Position(
        3, 2**40, {"epoch": 1, "at": [1.5, float("inf")]}, {"best": None, "ema": torch.arange(3), 5: ()}
    )
    save(tmp_path / "c", things.model, things.optimizer, [things.scheduler], position, shard_bytes=shard_bytes)
    found = loaded(tmp_path / "c", others)
    assert_equal(state_of(others), state_of(things))
    assert_equal(vars(found), vars(position))
    check(tmp_path / "c")


@pytest.mark.parametrize("tied", [False, True])
def test_a_folder_is_what_transformers_reads(tied: bool, tmp_path: Path) -> None:
    """Several files here; also in plain safetensors, where only tied weights are missing."""
    model = gpt2().model
    assert isinstance(model, GPT2LMHeadModel)
    if not tied:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    folder = save(tmp_path / "c", model, shard_bytes=3000)
    files = sorted(folder.glob("model-*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 1
    own = model.state_dict()
    for read in (GPT2LMHeadModel.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)):
        assert_equal(dict(read.state_dict()), dict(own))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert {name: load_file(folder / file)[name].shape for name, file in index["weight_map"].items()} == {
        name: tensor.shape for name, tensor in tensors.items()
    }
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    other = GPT2LMHeadModel(model.config).double()
    keys = other.load_state_dict(tensors, strict=False)
    assert keys.missing_keys == (["lm_head.weight"] if tied else [])
    assert keys.unexpected_keys == []
    assert_equal(dict(other.state_dict()), dict(own))
