from __future__ import annotations

import pytest
import torch
from torch import nn

from executor.errors import ModelError
from executor.running.layout import BlockLayout, layouts, typed
from sim.schedule import TensorKind
from tests.executor import made

SHAPE = torch.Size
LAYOUT = BlockLayout(
    [
        [("a", "", SHAPE([2, 3]), torch.float32), ("b", "", SHAPE([]), torch.int64)],
        [],
        [("c", "", SHAPE([5]), torch.float64)],
    ]
)


def test_layers_follow_each_other_without_gaps() -> None:
    assert LAYOUT.bytes == (32, 0, 40)
    assert LAYOUT.offset(0, 2) == 32
    assert LAYOUT.offset(1, 2) == 0
    assert LAYOUT.run_bytes(0, 2) == 72
    assert LAYOUT.run_bytes(1, 1) == 0


def test_larger_elements_come_first_within_a_layer() -> None:
    assert [(slot.name, slot.offset) for slot in LAYOUT.layers[0]] == [("b", 0), ("a", 8)]


def test_views_share_the_memory_of_the_block() -> None:
    block = torch.zeros(72, dtype=torch.uint8)
    views = LAYOUT.views(block, 0, 0)
    views["a", ""].fill_(1.0)
    views["b", ""].fill_(7)
    LAYOUT.views(block, 0, 2)["c", ""].fill_(2.0)
    assert block[:8].view(torch.int64).tolist() == [7]
    assert block[8:32].view(torch.float32).tolist() == [1.0] * 6
    assert block[32:].view(torch.float64).tolist() == [2.0] * 5
    assert views["a", ""].shape == (2, 3)
    assert views["b", ""].shape == ()


def test_part_of_a_run() -> None:
    block = torch.arange(40, dtype=torch.uint8)
    assert len(LAYOUT.part(block, 1, (2, 2))) == 40
    assert len(LAYOUT.part(block, 1, (1, 1))) == 0


def test_flat_joins_neighbours_of_one_dtype() -> None:
    layout = BlockLayout([[(name, "", SHAPE([2]), torch.float32)] for name in "ab"])
    (flat,) = layout.flat(torch.zeros(16, dtype=torch.uint8), 0, 1)
    assert flat.shape == (4,)
    assert [flat.dtype for flat in LAYOUT.flat(torch.zeros(72, dtype=torch.uint8), 0, 2)] == [
        torch.int64, torch.float32, torch.float64,
    ]  # fmt: skip


def test_views_have_version_counters_of_their_own() -> None:
    """Else a copy into a neighbour's bytes would look to autograd like a change of what it saved."""
    block = torch.zeros(16, dtype=torch.uint8)
    view = typed(block[:8], torch.float64, ())
    block[8:].fill_(3)
    assert view._version == 0


def test_bytes_that_are_not_aligned_are_refused() -> None:
    with pytest.raises(ModelError, match=r"torch.float64 would start at byte 4, .* 8 bytes"):
        typed(torch.zeros(12, dtype=torch.uint8)[4:], torch.float64, (1,))


def test_layouts_of_a_model_cover_what_each_kind_moves() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    layers = made.split(model)
    state = {id(parameter): {"m": torch.float32, "v": torch.float32} for parameter in model.parameters()}
    found = layouts(layers, state)
    assert found[TensorKind.WEIGHT].bytes == (48, 24, 32, 0)
    assert found[TensorKind.GRADIENT].bytes == (12, 24, 32, 0)  # the frozen weight has none
    assert found[TensorKind.OPTIMIZER_STATE].bytes == (24, 48, 64, 0)
    assert found[TensorKind.BUFFER].bytes == (0, 32, 0, 0)
    assert {slot.key for slot in found[TensorKind.OPTIMIZER_STATE].layers[0]} == {("bias", "m"), ("bias", "v")}


def test_state_of_a_shared_parameter_belongs_to_its_first_layer() -> None:
    model = made.tied()
    layers = made.split(model, made.mse)
    state = {id(parameter): {"m": torch.float64} for parameter in model.parameters()}
    found = layouts(layers, state)
    shared = model[0].weight.nbytes
    assert found[TensorKind.WEIGHT].bytes[0] == found[TensorKind.WEIGHT].bytes[2] == shared
    assert found[TensorKind.GRADIENT].bytes[2] == shared
    assert found[TensorKind.OPTIMIZER_STATE].bytes[0] == shared
    assert found[TensorKind.OPTIMIZER_STATE].bytes[2] == 0
