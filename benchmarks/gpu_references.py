"""Whole models whose layers were timed on a GTX 1080 Ti, and what the same models are estimated to take there.

Models repeat their layers. What is estimated has each kind of layer once, and totals count it as often as the model
does. Measured are totals of a forward without recording, and of one with it together with its backward.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from executor.estimating.estimate import estimate
from executor.estimating.gpus import known_gpu
from executor.models.data import class_loss, image_batches, labelled_text_batches, next_token_loss, text_batches
from executor.models.published import transformer
from executor.models.vision import resnet, vgg
from executor.models.workloads import Workload
from sim.units import NS_PER_S
from traces.schema import Phase, Trace

MEASURED = Path(__file__).resolve().parents[2] / "shared" / "reference" / "gtx1080ti"

FORWARD, BOTH = "FWD", "BWD"
"""The passes that were timed, as the tables name them: ``BWD`` is a forward with recording, and its backward."""

Times = Mapping[tuple[str, int], float]
"""Seconds by pass and microbatch size."""


@dataclass(frozen=True)
class Kinds:
    """A small model that has every kind of layer of large ones: ``make`` it, with its loss and batches."""

    name: str
    make: Callable[[], Workload]
    microbatches: Sequence[int]

    def estimated(self) -> Trace:
        """On the GTX 1080 Ti."""
        return estimate(self.make(), known_gpu("GTX 1080 Ti"), microbatches=self.microbatches)


@dataclass(frozen=True)
class Reference:
    """A model that was measured: the ``folder`` of its table, and how often it has each layer of its ``kinds``."""

    name: str
    folder: str
    kinds: Kinds
    repeats: tuple[int, ...]

    def measured(self) -> Times:
        """Of all layers together."""
        totals: dict[tuple[str, int], float] = {}
        with (MEASURED / self.folder / "layer_time.csv").open() as file:
            for row in csv.DictReader(file):
                key = row["phase"], int(row["microbatch"])
                totals[key] = totals.get(key, 0.0) + float(row["gpu_seconds"])
        return totals

    def total(self, trace: Trace) -> Times:
        """Of a trace of its kinds."""
        totals: dict[tuple[str, int], float] = {}
        for row in trace.times:
            if row.phase in (Phase.FORWARD, Phase.BACKWARD):
                seconds = row.duration_ns * self.repeats[row.layer] / NS_PER_S
                # A backward is timed together with its forward, and a trace has it without.
                for timed in (FORWARD, BOTH) if row.phase is Phase.FORWARD else (BOTH,):
                    key = timed, row.microbatch
                    totals[key] = totals.get(key, 0.0) + seconds
        return totals

    def errors(self, trace: Trace) -> Times:
        """Relative errors of the totals, where both are known."""
        measured = self.measured()
        return {key: total / measured[key] - 1 for key, total in self.total(trace).items() if key in measured}


def _gpt2(width: int, heads: int) -> Kinds:
    def make() -> Workload:
        options: dict[str, Any] = {
            "n_layer": 1, "n_embd": width, "n_head": heads, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        with torch.device("meta"):
            model = transformer("GPT2", "LMHeadModel", options)
        return Workload(f"gpt2 of width {width}", model, next_token_loss, text_batches(1024))

    return Kinds(f"gpt2 of width {width}", make, (1, 2, 5, 9, 18))


def _bert() -> Workload:
    """As it was when it was measured: its GELU is five operators, x / 2 · (1 + erf(x / √2)).

    The measured memory shows it: a sample takes 125.8 MB in a block's forward and backward, estimated are 122 MB with
    these operators and 82 MB with one. At 78 samples, the most that fitted, a block's backward (with its forward) took
    8.2 ms for each sample instead of the 7.5 ms that it took at 10 to 64, while its forward alone took as long for each
    as ever: of 10 GiB, 9.2 were in use. Estimates know nothing of a memory that is full.
    """
    options: dict[str, Any] = {
        "num_hidden_layers": 1, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
        "max_position_embeddings": 512, "num_labels": 2, "hidden_act": "gelu_python",
    }  # fmt: skip
    with torch.device("meta"):
        model = transformer("Bert", "ForSequenceClassification", options)
    return Workload("bert", model, class_loss, labelled_text_batches(512, 2))


def _images(model: nn.Module) -> Workload:
    return Workload("images", model, class_loss, image_batches(3, 224, 1000))


BERT = Kinds("bert", _bert, (1, 4, 16, 56, 78, 128, 243))
MEDIUM, XL, WIDE = _gpt2(1024, 16), _gpt2(1600, 25), _gpt2(4096, 32)
VGG = Kinds("vgg", lambda: _images(vgg((3, 3, 3, 3, 3))), (1, 13, 61, 173, 285))
RESNET = Kinds("resnet", lambda: _images(resnet((2, 2, 2, 2))), (1, 13, 65, 125, 257, 517))

REFERENCES = (
    Reference("bert-large", "bert_large_seq512", BERT, (1, 24, 1, 1, 1)),
    Reference("bert96", "bert_96", BERT, (1, 96, 1, 1, 1)),
    Reference("gpt2-medium", "gpt2_medium", MEDIUM, (1, 24, 1, 1, 1)),
    Reference("gpt2-xl", "gpt2_xl", XL, (1, 48, 1, 1, 1)),
    Reference("gpt2-10b", "gpt2_10b", WIDE, (1, 50, 1, 1, 1)),
    Reference("gpt2-20b", "gpt2_20b", WIDE, (1, 100, 1, 1, 1)),
    Reference("gpt2-30b", "gpt2_30b", WIDE, (1, 150, 1, 1, 1)),
    Reference("gpt2-40b", "gpt2_40b", WIDE, (1, 200, 1, 1, 1)),
    Reference("vgg416", "vgg416", VGG, (1, 80, 1, 1, 80, 1, 1, 81, 1, 1, 81, 1, 1, 81, 1, 1, 1, 1, 1)),
    Reference("resnet1026", "resnet1026", RESNET, (1, *4 * (1, 127), 1, 1)),
)
