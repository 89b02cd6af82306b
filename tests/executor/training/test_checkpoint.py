"""Checkpoints: what is written, and what is not read."""

from __future__ import annotations

import copy
import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lr
from transformers import AutoModelForCausalLM, GPT2LMHeadModel

from executor.errors import CheckpointError
from executor.running.storage import StorageTracker
from executor.training.checkpoint import Position, check, is_whole, load, peak_bytes, save
from tests.executor.trained import gpt2
from tests.executor.training.equality import assert_equal
from traces.errors import FileError


def adam(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def momentum(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


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


OPTIMIZERS: list[Callable[[Any], Optimizer]] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), amsgrad=True),
    lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
    lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
]


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: type(make([torch.zeros(1)])).__name__)
def test_optimizers_of_torch_go_on_bit_for_bit(make: Callable[[Any], Optimizer], tmp_path: Path) -> None:
    """Whatever they keep; without schedules here."""

    def step(model: nn.Module, optimizer: Optimizer) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(torch.linspace(-1, 1, 6).reshape(2, 3)).square().mean()
            torch.autograd.backward(loss)
            return loss

        optimizer.step(closure)

    def fresh(seed: int) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        return model, make(model.parameters())

    model, optimizer = fresh(0)
    step(model, optimizer)
    save(tmp_path / "c", model, optimizer)
    other, restored = fresh(1)
    load(tmp_path / "c", other, restored)
    for _ in range(2):
        step(model, optimizer)
        step(other, restored)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    assert_equal(restored.state_dict(), optimizer.state_dict())


SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lambda optimizer: lr.MultiStepLR(optimizer, [1, 2, 2, 4]),
    lambda optimizer: lr.OneCycleLR(optimizer, 0.5, total_steps=10),
    lambda optimizer: lr.ChainedScheduler([lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], optimizer),
    lambda optimizer: lr.SequentialLR(optimizer, [lr.LinearLR(optimizer), lr.CosineAnnealingLR(optimizer, 5)], [2]),
    lambda optimizer: lr.LambdaLR(optimizer, lambda step: 1 / (step + 1)),
    lambda optimizer: lr.CosineAnnealingWarmRestarts(optimizer, 2),
]


@pytest.mark.parametrize("make", SCHEDULERS)
def test_schedulers_of_torch_go_on(make: Callable[[Optimizer], Any], tmp_path: Path) -> None:
    def fresh() -> Things:
        model = nn.Linear(2, 2)
        optimizer = momentum(model.parameters())
        return Things(model, optimizer, make(optimizer))

    def step(things: Things) -> None:
        things.optimizer.step()
        things.scheduler.step()

    things, others = fresh(), fresh()
    for _ in range(3):
        step(things)
    saved(tmp_path / "c", things)
    loaded(tmp_path / "c", others)
    for _ in range(3):
        step(things)
        step(others)
        assert others.optimizer.param_groups[0]["lr"] == things.optimizer.param_groups[0]["lr"]


def by_layer(model: nn.Module) -> list[dict[str, Any]]:
    assert isinstance(model, nn.Sequential)
    return [{"params": list(each.parameters()), "lr": 0.1 * (at + 1)} for at, each in enumerate(model)]


def by_layer_reversed(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": group["params"][::-1], "lr": 9.0} for group in reversed(by_layer(model))]


def test_state_finds_its_parameters_in_groups_of_another_order(tmp_path: Path) -> None:
    things, others = trained(groups=by_layer), trained(1, groups=by_layer_reversed)
    folder = saved(tmp_path / "c", things)
    with pytest.raises(CheckpointError, match="groups in another order, and schedulers count"):
        loaded(folder, others)
    save(folder, things.model, things.optimizer)
    load(folder, others.model, others.optimizer)
    assert [group["lr"] for group in others.optimizer.param_groups] == pytest.approx([0.3, 0.2, 0.1])
    names = {parameter: name for name, parameter in things.model.named_parameters()}
    expected = {names[parameter]: state for parameter, state in things.optimizer.state.items()}
    names = {parameter: name for name, parameter in others.model.named_parameters()}
    assert_equal({names[parameter]: state for parameter, state in others.optimizer.state.items()}, expected)


def test_weights_alone_can_be_loaded(tmp_path: Path) -> None:
    things, other = trained(), trained(1).model
    load(saved(tmp_path / "c", things), other)
    assert_equal(dict(other.state_dict()), dict(things.model.state_dict()))


def test_generators_come_back_if_asked(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        plain, asked = saved(tmp_path / "a"), saved(tmp_path / "b", random_state=True)
        expected = random.random(), torch.rand(3)
        loaded(plain, trained())
        assert random.random() != expected[0]
        loaded(asked, trained())
        assert_equal((random.random(), torch.rand(3)), expected)


def test_tensors_are_written_from_where_they_lie(tmp_path: Path) -> None:
    """But for those that are not contiguous; and as many copies as the figure for the host's memory says."""
    things = trained()
    for transposed in (False, True):
        if transposed:
            weight = things.model.get_parameter("0.weight")
            weight.data = weight.data.t().contiguous().t()
        with StorageTracker() as tracker:
            saved(tmp_path / "c", things)
        assert tracker.peak_bytes == peak_bytes(things.model, things.optimizer) == (48 if transposed else 0)


# ------------------------------------------------------------------------------------------ what is not read or written


def assert_refused(folder: Path, message: str, things: Things | None = None) -> None:
    """It is not read, and nothing is changed."""
    things = things or trained(1)
    before = state_of(things)
    with pytest.raises(CheckpointError) as caught:
        loaded(folder, things)
    assert message in str(caught.value)
    assert_equal(state_of(things), before)


def test_a_damaged_file_is_named_and_not_read(tmp_path: Path) -> None:
    whole = saved(tmp_path / "whole", shard_bytes=100)
    assert is_whole(whole)
    names = sorted(path.name for path in whole.iterdir())
    assert len(names) > 6
    for name in names:
        data = (whole / name).read_bytes()
        for damaged in (None, b"", data[: len(data) // 2], data[:-2], data + b"x"):
            folder = tmp_path / "damaged"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(whole, folder)
            (folder / name).unlink()
            if damaged is not None:
                (folder / name).write_bytes(damaged)
            assert not is_whole(folder)
            assert_refused(folder, str(folder / name))


def test_files_of_two_checkpoints_are_not_mixed(tmp_path: Path) -> None:
    one, other = saved(tmp_path / "one"), saved(tmp_path / "other", trained(1))
    shutil.copy(other / "model.safetensors", one)
    assert not is_whole(one)
    assert_refused(one, "model.safetensors: was written with another checkpoint")


def test_another_version_is_refused(tmp_path: Path) -> None:
    file = saved(tmp_path / "c") / "training.json"
    file.write_text(file.read_text().replace('"version": 1', '"version": 2'))
    assert_refused(tmp_path / "c", "training.json: is harmony-checkpoint of version 2; this version of Harmony reads")
    file.write_text("{}")
    assert_refused(tmp_path / "c", "training.json: is damaged: Object missing required field `format`")
    assert_refused(tmp_path / "d", "training.json: cannot be read: No such file or directory")


def test_what_is_of_other_models_and_optimizers_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "c")

    def refused(message: str, change: Callable[[nn.Sequential], object] = lambda model: None, **options: Any) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        change(model)
        optimizer = options.get("optimizer", adam)(model.parameters())
        scheduler = options.get("scheduler", lambda optimizer: lr.MultiStepLR(optimizer, [1]))(optimizer)
        assert_refused(folder, message, Things(model, optimizer, scheduler))

    refused("0.weight is torch.float32 (4, 3), in this model it is torch.float64 (4, 3)", lambda model: model.double())
    refused(
        "2.weight is torch.float32 (2, 4), in this model it is torch.float32 (3, 4)",
        lambda model: model.__setitem__(2, nn.Linear(4, 3)),
    )
    refused("this model has 3.bias, the checkpoint does not", lambda model: model.append(nn.Linear(2, 2)))
    refused("the checkpoint has 2.bias, this model does not", lambda model: model.__delitem__(2))
    refused("has the state of torch.optim.adamw.AdamW, this optimizer is torch.optim.sgd.SGD", optimizer=momentum)
    refused(
        "of group 0, the checkpoint has 0.bias and this optimizer does not",
        optimizer=lambda parameters: adam(list(parameters)[:1]),
    )
    refused(
        "was written with the schedulers ['torch.optim.lr_scheduler.MultiStepLR'], these are",
        scheduler=lambda optimizer: lr.ExponentialLR(optimizer, 0.9),
    )
    save(folder, trained().model)
    refused("has no optimizer's state")


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    things = trained()
    folder = saved(tmp_path / "c", things)
    with pytest.raises(CheckpointError, match="extras/best/0 is a object; only numbers"):
        save(folder, things.model, position=Position(extras={"best": [object()]}))
    with pytest.raises(CheckpointError, match=r"has a tensor of shape \(3,\) that is no parameter of the model"):
        save(folder, things.model, adam([torch.zeros(3)]))
    with pytest.raises(CheckpointError, match=r"0\.weight of the model, which has no values"):
        save(folder, copy.deepcopy(things.model).to("meta"))
    with pytest.raises(CheckpointError, match=r"extras is of the layout torch\.sparse_coo"):
        save(folder, things.model, position=Position(extras=torch.eye(2).to_sparse()))
    things.model.register_buffer("part", things.model.get_parameter("0.weight").detach()[:1])
    with pytest.raises(FileError, match="cannot be written: Some tensors share memory"):
        save(folder, things.model)
    loaded(folder, trained(1))
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_folder_with_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("all of it")
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("mine", "file"):
        with pytest.raises(CheckpointError, match="is there already, and no checkpoint"):
            saved(tmp_path / name)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert is_whole(saved(tmp_path / "empty"))


def test_others_may_read_what_they_may_read_elsewhere(tmp_path: Path) -> None:
    assert len({path.stat().st_mode for path in saved(tmp_path / "c").iterdir()}) == 1


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses files that are larger (as it does when the disk is full)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_without_room_nothing_is_changed_and_nothing_left(tmp_path: Path) -> None:
    """Whichever file it is that finds no room."""
    things = trained()
    folder = saved(tmp_path / "c", things)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    sizes = sorted({0, *(len(data) - 1 for data in before.values())})
    for size in sizes:
        message = r"c: cannot be written: .*File too large.*; nothing was changed"
        with pytest.raises(FileError, match=message), largest_file(size):
            saved(folder, trained(1))
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert [path.name for path in tmp_path.iterdir()] == ["c"]
