"""Layers that pass several tensors on: byte counts of schedules, copies and results."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from executor.measuring.profile import profile
from executor.models.workloads import Workload
from executor.running.passing import Record
from executor.running.run import run
from sim.builders import build
from sim.engine.simulate import simulate
from sim.plan import Plan, Policy, Residency, UpdateOn
from sim.schedule import TaskKind
from tests.executor import made
from tests.executor.trained import (
    adam,
    cut_of,
    differences,
    harmony,
    moved_in,
    name_of,
    paged,
    skips,
    train,
    train_in_pieces,
    train_plainly,
)

torch.set_num_threads(1)


class TestRecord:
    """Two tensors of three samples: a mask (3 bytes a sample) and a vector (8 bytes)."""

    mask = torch.tensor([[True, False, True]] * 2 + [[False, False, True]])
    vector = torch.arange(6.0).view(3, 2)

    def test_tensors_lie_one_after_the_other(self) -> None:
        record = Record.of([self.mask, self.vector])
        block = torch.zeros(3 * record.sample_bytes, dtype=torch.uint8)
        for target, tensor in zip(record.tensors(block, 3), [self.mask, self.vector], strict=True):
            target.copy_(tensor)
        assert block[:24].view(torch.float32).tolist() == self.vector.flatten().tolist()
        assert block[24:].view(torch.bool).tolist() == self.mask.flatten().tolist()

    def test_some_samples_come_in_a_piece_of_each(self) -> None:
        record = Record.of([self.mask, self.vector])
        block = torch.arange(33, dtype=torch.uint8)
        vector, mask = record.pieces(block, (4, 7), (5, 7))
        assert vector.tolist() == list(range(8, 24))
        assert mask.tolist() == list(range(27, 33))


PACKS = ((0, 0), (1, 2)), ((0, 1), (2, 2), (3, 5))  # four blocks, head, loss
PLANS: list[Plan] = [
    harmony(Policy.HARMONY_DP, 2, (3, 3), PACKS),
    harmony(Policy.HARMONY_DP, 1, (4, 2), PACKS, update=UpdateOn.GPU),
    harmony(Policy.HARMONY_PP, 2, (3, 2), PACKS),
    harmony(Policy.HARMONY_PP, 3, (3, 3), PACKS, slots=1),
    paged(Policy.DP_SWAP, 2, 3),
    paged(Policy.GPIPE_SWAP, 2, 3, residency=Residency.NONE),
    paged(Policy.ONE_F_ONE_B_SWAP, 2, 2),
]


def test_what_a_layer_passes_on() -> None:
    layers = skips().layers().layers
    assert [layer.name for layer in layers] == ["blocks.0", "blocks.1", "blocks.2", "blocks.3", "head", "loss"]
    # x and mask; first and mask; second, first and mask; third and mask; …
    assert [len(layer.input_gradients) for layer in layers] == [2, 2, 3, 2, 1, 1]
    assert layers[2].input_gradients == (True, True, False)


@pytest.mark.parametrize("plan", PLANS, ids=name_of)
def test_trains_as_plain_pytorch_does(plan: Plan) -> None:
    ran = train(skips(), plan, steps=2, optimizer=adam, state_tensors=2)
    assert differences(ran.trained, train_plainly(skips(), 2, optimizer=adam)) == {}


@pytest.mark.parametrize("plan", PLANS[2:4], ids=name_of)
def test_copies_what_was_predicted(plan: Plan) -> None:
    """Profiled, simulated and run: bytes of each kind are the same."""
    workload, machine = skips(), made.machine(plan.gpus)
    trace = profile(workload, microbatches=(1, 2, 3), repeats=3, budget_s=0.1)
    schedule = build(plan, trace, machine)
    ran = run(schedule, copy.deepcopy(workload), machine, steps=1)
    predicted = simulate(schedule, trace, machine)
    copies = {kind: count for kind, count in moved_in(ran.timeline).items() if count}
    assert copies == {kind: count for kind, count in moved_in(predicted).items() if count}
    assert copies[TaskKind.P2P] or copies[TaskKind.SWAP_IN] != Counter()


def test_chance_is_that_of_the_same_microbatches() -> None:
    plan = PLANS[0]

    def workload() -> Workload:
        made_workload = skips()
        made_workload.model.blocks[1].append(nn.Dropout(0.3))
        return made_workload

    assert differences(train(workload(), plan).trained, train_in_pieces(workload(), cut_of(plan))) == {}
