"""The estimates that come with Harmony. ``python -m executor.estimating.shipped`` makes them anew, in a few minutes.

GPT-2s on the GTX 1080 Ti are not among them: they come from formulas (``python -m traces.transformer``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import traces
from traces.files import save_trace
from traces.schema import Trace

from ..models.workloads import load_workload
from .estimate import estimate
from .gpus import known_gpu


class Shipped(NamedTuple):
    """What one of them is an estimate of."""

    model: str
    gpu: str
    dtype: str
    microbatches: Sequence[int]

    @property
    def name(self) -> str:
        """What :func:`traces.load_trace` calls it."""
        return f"{self.model}@{self.gpu}"

    def estimated(self) -> Trace:
        """The trace; a sample is as long as is usual for the model."""
        workload = load_workload(self.model, values=False)
        return estimate(workload, known_gpu(self.gpu), microbatches=self.microbatches, dtype=self.dtype)


_FEW, _SOME, _MANY = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64)


def _shipped() -> Iterator[Shipped]:
    for model, sizes in (("bert-large", _SOME), ("bert96", _SOME), ("vgg416", _MANY), ("resnet1026", _MANY)):
        yield Shipped(model, "gtx-1080-ti", "float32", sizes)
    for gpu in ("rtx-3090", "rtx-4090", "a100", "h100"):
        for model in ("gpt2-xl", "gpt2-10b", "llama3.1-8b", "qwen3-1.7b", "qwen3-32b"):
            yield Shipped(model, gpu, "bfloat16", _FEW)
        yield Shipped("bert-large", gpu, "bfloat16", _SOME)


SHIPPED = tuple(_shipped())


if __name__ == "__main__":
    for each in SHIPPED:
        save_trace(each.estimated(), Path(traces.__file__).parent / "data" / f"{each.name}.json.gz")
