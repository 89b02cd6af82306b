"""Estimates for an RTX 4090, where nothing was measured by us, beside throughput that others published.

RoundPipe (arXiv 2604.27085) trains Llama-3.1-8B at 3,142 tokens/s on one RTX 4090, and Qwen3-1.7B at 8,881, with
weights in host memory, full recompute and updates on the CPU. It sums products in float16, for which the card's peak
is 330 TFLOP/s. The length of its sequences is not published; here it is 2,048.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import sim
from executor.estimating.estimate import estimate
from executor.estimating.gpus import known_gpu
from executor.models.data import next_token_loss, text_batches
from executor.models.published import PUBLISHED
from executor.models.workloads import Workload
from sim.units import NS_PER_S

SEQUENCE = 2048


@pytest.mark.parametrize(("name", "published"), [("llama3.1-8b", 3142), ("qwen3-1.7b", 8881)])
def test_throughput_is_about_what_was_published(name: str, published: float) -> None:
    gpu = known_gpu("RTX 4090")
    with torch.device("meta"):
        model = PUBLISHED[name].model()
    workload = Workload(name, model, next_token_loss, text_batches(SEQUENCE))
    summing_halves = replace(gpu, peaks={"float16": 330e12})
    trace = estimate(workload, summing_halves, microbatches=(8,), dtype="float16")
    machine = sim.load_machine("4x4090").with_gpus(1).with_host_memory(None)
    policies = (sim.Policy.HARMONY_DP,)
    best = sim.search(trace, machine, 32, policies=policies, max_simulated=1, max_variations=0).best
    assert 32 * SEQUENCE / best.step_time_ns * NS_PER_S == pytest.approx(published, rel=0.25)
