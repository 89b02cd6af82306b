"""Models at published sizes: layer by layer those that the artifact's authors measured."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from executor.models.inputs import Inputs
from executor.models.published import PUBLISHED
from executor.models.summary import summarize_layers
from executor.models.vision import resnet, vgg
from executor.models.workloads import load_workload
from tests.executor.models.families import check_equal, pixels

MEASURED = Path(__file__).resolve().parents[4] / "shared" / "reference" / "gtx1080ti"
PROFILES = {
    "bert-large": "bert_large_seq512",
    "bert96": "bert_96",
    "gpt2-medium": "gpt2_medium",
    "gpt2-xl": "gpt2_xl",
    "gpt2-10b": "gpt2_10b",
    "gpt2-20b": "gpt2_20b",
    "vgg416": "vgg416",
    "resnet1026": "resnet1026",
}


def column(profile: str, table: str, name: str) -> list[int]:
    with (MEASURED / profile / table).open() as file:
        rows = list(csv.DictReader(file))
    return [int(row[name]) for row in rows if row.get("microbatch", "1") == "1"]


@pytest.mark.skipif(not MEASURED.exists(), reason="the measured profiles are not beside this checkout")
@pytest.mark.parametrize("name", PROFILES)
def test_layers_weigh_what_was_measured(name: str) -> None:
    layers = load_workload(name, values=False).layers().layers
    assert [layer.weight_bytes for layer in layers] == column(PROFILES[name], "layer_size.csv", "weight_bytes")


@pytest.mark.skipif(not MEASURED.exists(), reason="the measured profiles are not beside this checkout")
@pytest.mark.parametrize("name", ["gpt2-medium", "vgg416", "resnet1026"])
def test_layers_pass_on_what_was_measured(name: str) -> None:
    passed = [_bytes(row.passes_on[0]) for row in summarize_layers(load_workload(name, values=False))]
    assert passed[:-1] == column(PROFILES[name], "activation.csv", "input_bytes")[1:]


def _bytes(form: str) -> int:
    """Of a form such as ``float32 [3, 4]``."""
    size = 4
    for number in form.split("[")[1].rstrip("]").split(","):
        size *= int(number) if number else 1
    return size


@pytest.mark.parametrize(
    ("name", "layers", "billions"),
    [("llama3.1-8b", 36, 8.03), ("qwen3-1.7b", 32, 1.72), ("qwen3-32b", 68, 32.76), ("gpt2", 16, 0.124)],
)
def test_sizes_are_those_of_the_model_cards(name: str, layers: int, billions: float) -> None:
    workload = load_workload(name, values=False)
    assert len(workload.layers()) == layers
    assert sum(p.numel() for p in workload.model.parameters()) / 1e9 == pytest.approx(billions, abs=0.005)


def test_the_giants_differ_in_the_number_of_blocks() -> None:
    giants = [name for name in PUBLISHED if name.startswith("gpt2-") and name.endswith("0b")]
    assert giants == [f"gpt2-{billions}b" for billions in range(10, 101, 10)]
    largest = load_workload("gpt2-100b", values=False).model
    assert sum(parameter.numel() for parameter in largest.parameters()) == 100_899_975_168


def test_convolutional_networks_of_any_depth() -> None:
    torch.manual_seed(0)
    check_equal(resnet((1, 2, 1, 1), classes=5).double(), Inputs.of(pixels()))
    shallow = vgg((1, 1, 1, 1, 2), classes=5)
    assert len(shallow) == 6 + 3
    assert shallow[:6](torch.zeros(1, 3, 224, 224)).shape == (1, 512, 7, 7)
