"""Shards in the executor: they lie where the schedule's bytes say, and training on them is plain training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from executor.devices.emulated import EmulatedDevices
from executor.errors import ModelError, OptimizerError
from executor.models.workloads import Workload
from executor.running.layout import layouts
from executor.running.session import Session
from executor.running.shards import ShardLayouts
from sim.builders import build
from sim.plan import HarmonyPlan, Policy, Reduce, UpdateOn
from sim.schedule import Buffer, TensorKind
from sim.shards import Shards
from sim.validation.validate import validate
from tests.executor import made
from tests.executor.trained import (
    MINIBATCH,
    SEED,
    Make,
    adam,
    chain,
    cut_of,
    differences,
    gpt2,
    harmony,
    moved_in,
    normalised_chain,
    plainly,
    sharded,
    tied_chain,
    trace_of,
    train,
    train_in_pieces,
    train_plainly,
)
from tests.sim.closed_forms import closed_forms, moved
from traces.costs import Costs

KINDS = (TensorKind.WEIGHT, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE)
FROZEN = partial(chain, frozen=True)
MODELS = pytest.mark.parametrize("make", [chain, FROZEN, tied_chain, gpt2], ids=["chain", "frozen", "tied", "gpt2"])


def scattered(workload: Workload, gpus: int, update: UpdateOn) -> HarmonyPlan:
    last = len(workload.layers()) - 1
    packs = ((0, 0), (1, 1)), ((0, 0), (1, 1), (2, last))
    return harmony(Policy.HARMONY_DP, gpus, (4, 2), packs, update=update, reduce=Reduce.SCATTER)


def shard_layouts(workload: Workload, gpus: int) -> ShardLayouts:
    """With two tensors of state in the shape of each parameter."""
    model = workload.layers()
    state = {id(p): {"a": p.dtype, "b": p.dtype} for p in workload.model.parameters()}
    return ShardLayouts(model, layouts(model, state), gpus)


@pytest.mark.parametrize("gpus", [1, 2, 3, 7])
@MODELS
def test_shards_have_the_bytes_that_schedules_say(make: Make, gpus: int) -> None:
    workload = make()
    layout, shards = shard_layouts(workload, gpus), Shards(Costs(trace_of(workload, state_tensors=2)), gpus)
    last = len(workload.layers()) - 1
    for kind in KINDS:
        for shard in range(gpus):
            assert layout.bytes(kind, 0, last, shard) == shards.bytes(kind, (0, last), shard)
            for layer in range(last + 1):
                assert layout.bytes(kind, layer, layer, shard) == shards.bytes(kind, (layer, layer), shard)


@MODELS
def test_shards_hold_every_element_once_and_state_goes_with_its_gradient(make: Make) -> None:
    workload = make()
    layout, model = shard_layouts(workload, 3), workload.layers()
    for layer, spec in enumerate(model.layers):
        found: dict[str, list[tuple[int, int]]] = {}
        for shard in range(3):
            stretches = {each.slot.name: (each.start, each.stop) for each in layout.stretches(KINDS[1], layer, shard)}
            for name, (start, stop) in stretches.items():
                found.setdefault(name, []).append((start, stop))
            kept = {(e.slot.name, e.slot.entry): (e.start, e.stop) for e in layout.stretches(KINDS[2], layer, shard)}
            owned = stretches.keys() & model.owned(layer).keys()
            assert kept == {(name, entry): stretches[name] for name in owned for entry in "ab"}
        for name, pieces in found.items():
            assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
            assert pieces[-1][1] == spec.parameters[name].tensor.numel()
        assert found.keys() == spec.trainable.keys()


def test_a_shard_is_the_same_bytes_in_a_whole_block_and_in_one_of_its_own() -> None:
    layout = shard_layouts(chain(), 2)
    kind, run = TensorKind.GRADIENT, (3, 6)
    size = sum(layout.bytes(kind, *run, shard) for shard in range(2))
    fields: dict[str, Any] = {"kind": kind, "layer_first": 3, "layer_last": 6, "gpu": 0}
    whole, block = Buffer(id=0, bytes=size, **fields), torch.arange(size, dtype=torch.int64).to(torch.uint8)
    for shard in range(2):
        own = Buffer(id=1, bytes=layout.bytes(kind, *run, shard), shard=shard, **fields)
        copied = torch.zeros(own.bytes, dtype=torch.uint8)
        for layer in range(3, 7):
            for target, source in zip(
                layout.parts(own, copied, layer, shard), layout.parts(whole, block, layer, shard), strict=True
            ):
                target.copy_(source)
        for layer in range(3, 7):
            here, there = layout.views(own, copied, layer, shard), layout.views(whole, block, layer, shard)
            assert here.keys() == there.keys()
            assert all(torch.equal(here[key].view(torch.uint8), there[key].view(torch.uint8)) for key in here)


@pytest.mark.parametrize("gpus", [2, 3])
@pytest.mark.parametrize("update", UpdateOn)
@MODELS
def test_steps_of_adam_are_those_of_plain_training(make: Make, update: UpdateOn, gpus: int) -> None:
    workload = make()
    ran = train(workload, scattered(workload, gpus, update), steps=1, warmup_steps=1, optimizer=adam, state_tensors=2)
    validate(ran.schedule, ran.trace)
    assert differences(ran.trained, plainly(make, 2, adam)) == {}
    assert moved_in(ran.timeline) == moved(ran.schedule)


@pytest.mark.parametrize(
    ("optimizer", "state_tensors"),
    [
        (partial(optim.AdamW, lr=0.01, amsgrad=True), 3),
        (partial(optim.RMSprop, lr=0.01, momentum=0.9), 2),
        (partial(optim.Adagrad, lr=0.1), 1),
        (partial(optim.NAdam, lr=0.01), 2),
        (partial(optim.SGD, lr=0.1), 0),
    ],
)
def test_elementwise_optimizers_update_shards(optimizer: Callable[..., Any], state_tensors: int) -> None:
    workload = chain()
    plan = scattered(workload, 3, UpdateOn.GPU)
    ran = train(workload, plan, steps=3, optimizer=optimizer, state_tensors=state_tensors)
    assert differences(ran.trained, train_plainly(workload, 3, optimizer=optimizer)) == {}


@pytest.mark.parametrize(
    ("gpus", "u", "depth"), [(1, 3, 0), (1, 3, 1), (2, 1, 16), (2, 3, 0), (3, 1, 1), (3, 2, 4), (3, 8, 0)]
)
@MODELS
def test_zero3_trains_as_plain_pytorch_does(make: Make, gpus: int, u: int, depth: int) -> None:
    workload, plan = make(), sharded(gpus, u, prefetch_depth=depth)
    ran = train(workload, plan, steps=1, warmup_steps=1, optimizer=adam)
    validate(ran.schedule, ran.trace)
    assert differences(ran.trained, plainly(make, 2, adam)) == {}
    assert moved_in(ran.timeline) == moved(ran.schedule)
    if make is chain:
        assert moved(ran.schedule) == closed_forms(plan, Costs(ran.trace))


@pytest.mark.parametrize(("gpus", "u"), [(1, 2), (2, 2), (3, 3)])
def test_zero3_keeps_the_first_gpus_statistics_and_repeats_dropout(gpus: int, u: int) -> None:
    plan = sharded(gpus, u, prefetch_depth=1)
    expected = train_in_pieces(normalised_chain(), cut_of(plan), steps=2)
    assert differences(train(normalised_chain(), plan, steps=2).trained, expected) == {}


def session(workload: Workload, optimizer: optim.Optimizer, plan: HarmonyPlan, state_tensors: int) -> Session:
    machine = made.machine(plan.gpus)
    schedule = build(plan, trace_of(workload, state_tensors), machine)
    model = workload.layers()
    return Session(schedule, model, optimizer, EmulatedDevices(machine))


class Halved(optim.Adam):
    """Anyone's own."""


@pytest.mark.parametrize("optimizer", [optim.Adafactor, Halved])
def test_other_optimizers_are_refused_for_updates_of_shards_alone(optimizer: Callable[..., Any]) -> None:
    workload = chain()
    own = optimizer(workload.model.parameters())
    if optimizer is Halved:
        session(workload, own, scattered(workload, 2, UpdateOn.CPU), 0)
    with pytest.raises(OptimizerError, match=r"(Adafactor|Halved) .* every element by itself.* --reduce ring"):
        session(workload, own, scattered(workload, 2, UpdateOn.GPU), 2)


def test_layers_that_are_trained_in_part_are_refused_for_updates_of_shards_alone() -> None:
    workload = chain()
    workload.model[0].bias.requires_grad_(False)
    optimizer = optim.SGD(workload.model.parameters())
    session(workload, optimizer, scattered(workload, 2, UpdateOn.CPU), 0)
    with pytest.raises(ModelError, match=r"layer 0 has trained weights and frozen ones \(bias\)"):
        session(workload, optimizer, scattered(workload, 2, UpdateOn.GPU), 0)


def test_a_layer_that_is_trained_in_part_is_scattered_for_the_host() -> None:
    def make() -> Workload:
        workload = chain()
        workload.model[0].weight.requires_grad_(False)
        return workload

    plan = scattered(make(), 3, UpdateOn.CPU)
    assert differences(train(make(), plan, steps=2).trained, train_plainly(make(), 2)) == {}


def test_state_that_was_loaded_goes_on_in_shards_and_comes_back_whole() -> None:
    """Two steps plainly, one by shards, and one plainly again are four plain steps."""
    workload, expected = chain(), train_plainly(chain(), 4, optimizer=adam)
    optimizer = adam(workload.model.parameters())

    def plain_step(number: int) -> None:
        inputs, labels = workload.batch(MINIBATCH, SEED + number)
        optimizer.zero_grad()
        loss: Tensor = workload.loss_fn(workload.model(inputs), labels)
        torch.autograd.backward(loss)
        optimizer.step()

    plain_step(0)
    plain_step(1)
    session(workload, optimizer, scattered(workload, 3, UpdateOn.GPU), 2).step(*workload.batch(MINIBATCH, SEED + 2))
    plain_step(3)
    after = workload.model.state_dict()
    assert all(torch.allclose(after[name], tensor, rtol=0, atol=1e-10) for name, tensor in expected.tensors.items())
