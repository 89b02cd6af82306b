"""Profile, then simulate, then run: bytes are the same at every stage, for every family of models.

What a trace says a layer's weights, gradients, input, stash and saved tensors weigh is what copies move, in prediction
and in measurement, and what the memory of GPUs and host is planned and found to hold.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from executor.measuring.profile import profile
from executor.models.inputs import Inputs, call_model, logits_of
from executor.models.workloads import Workload
from executor.running.run import run
from sim.builders import build
from sim.engine.simulate import simulate
from sim.plan import HarmonyPlan, PagedPlan, Plan, Policy, ShardedPlan, UpdateOn
from sim.validation.validate import validate
from tests.executor import made
from tests.executor.models.families import made as family_made
from tests.executor.models.families import product_loss
from tests.executor.trained import adam, moved_in
from tests.sim.closed_forms import moved

MINIBATCH = 3
BYTES = (
    "swap_in_bytes",
    "swap_out_bytes",
    "p2p_bytes",
    "allreduce_bytes",
    "collective_bytes",
    "peak_memory_bytes",
    "host_peak_bytes",
)


def workload_of(family: str) -> Workload:
    """The family's model, with labels in the shape of its logits."""
    model, few = family_made(family)
    with torch.no_grad():
        logits = logits_of(call_model(model, few))

    def batch(samples: int, seed: int) -> tuple[Any, Tensor]:
        rows = torch.arange(samples) % 2
        labels = torch.linspace(-1, 1, logits[0].numel(), dtype=logits.dtype).reshape(logits.shape[1:])
        repeated: Inputs = few.map(lambda tensor: tensor[rows])
        return repeated, labels.expand(samples, *labels.shape).contiguous()

    return Workload(family, model, product_loss, batch)


def plans(layers: int) -> list[Plan]:
    """A plan of each kind, packs of two."""
    starts = range(0, layers, 2)
    packs = tuple((first, min(first + 1, layers - 1)) for first in starts)

    def harmony(policy: Policy, gpus: int, update: UpdateOn) -> Plan:
        return HarmonyPlan(
            policy=policy,
            minibatch=MINIBATCH,
            gpus=gpus,
            u_fwd=2,
            u_bwd=2,
            packs_fwd=packs[:-1],
            packs_bwd=packs,
            update=update,
        )

    def paged(policy: Policy, gpus: int, *, recompute: bool) -> Plan:
        return PagedPlan(policy=policy, minibatch=MINIBATCH, gpus=gpus, u_fwd=1, u_bwd=1, recompute=recompute)

    return [
        harmony(Policy.HARMONY_DP, 1, UpdateOn.CPU),
        harmony(Policy.HARMONY_PP, 2, UpdateOn.GPU),
        paged(Policy.DP_SWAP, 1, recompute=False),
        paged(Policy.ONE_F_ONE_B_SWAP, 2, recompute=True),
        ShardedPlan(policy=Policy.ZERO3_OFFLOAD, minibatch=MINIBATCH, gpus=1, u_fwd=1, u_bwd=1),
    ]


@pytest.mark.parametrize("family", ["gpt2", "bert padded", "llama padded", "qwen3", "vit", "resnet", "t5"])
def test_bytes_are_those_of_the_trace_at_every_stage(family: str) -> None:
    workload = workload_of(family)
    trace = profile(workload, microbatches=(1, 2, 3), optimizer=adam, repeats=1, warmups=0, budget_s=0.1)
    for plan in plans(len(trace.layers)):
        machine = made.machine(plan.gpus)
        schedule = build(plan, trace, machine)
        validate(schedule, trace)  # every buffer weighs what the trace says
        predicted = simulate(schedule, trace, machine)
        measured = run(schedule, workload_of(family), machine, steps=1, warmup_steps=1, optimizer=adam).timeline
        assert moved_in(predicted) == moved(schedule) == moved_in(measured), plan
        theirs, ours = predicted.summary(), measured.summary()
        assert {name: ours[name] for name in BYTES} == {name: theirs[name] for name in BYTES}, plan
