"""Random plans over random traces, reproducible by seed."""

from __future__ import annotations

import random
from typing import NamedTuple

from msgspec.structs import replace

from sim.hardware.machine import Gpu, Host, Machine
from sim.plan import (
    HarmonyPlan,
    Pack,
    PagedPlan,
    Plan,
    Policy,
    Reduce,
    Residency,
    ShardedPlan,
    StashPlace,
    UpdateOn,
    UpdateWhen,
    Writeback,
)
from traces.schema import Trace
from traces.synthetic import skewed_trace, with_tied


class Case(NamedTuple):
    """A plan with the trace and the machine it is for."""

    plan: Plan
    trace: Trace
    machine: Machine


def random_case(seed: int, *, layers: int = 6, memory_bytes: int = 10**12) -> Case:
    """One to four GPUs, any policy, any packing, uneven microbatches, sometimes tied weights."""
    draw = random.Random(seed)
    trace = skewed_trace(seed, layers)
    gpus = draw.randint(1, 4)
    gpu = Gpu(name="0", memory_bytes=memory_bytes, bandwidth=1e9)
    host = Host(memory_bytes=None, dram_bandwidth=1e10, cores=2)
    machine = Machine(name="random", host=host, gpus=(gpu,)).with_gpus(gpus)
    policy = draw.choice(list(Policy))
    minibatch = draw.randint(gpus, 8)
    if policy.is_paged:
        u = draw.randint(1, -(-minibatch // gpus))
        plan: Plan = PagedPlan(
            policy=policy, minibatch=minibatch, gpus=gpus, u_fwd=u, u_bwd=u,
            residency=draw.choice(list(Residency)), writeback=draw.choice(list(Writeback)),
            recompute=draw.random() < 0.5, prefetch_depth=draw.choice([0, 0, 1, 3]),
        )  # fmt: skip
        tied = with_tied(trace, (0, layers - 2), 100_000) if draw.random() < 0.5 else trace
        return Case(plan, tied, machine)
    if not policy.is_harmony:
        u = draw.randint(1, -(-minibatch // gpus))
        plan = ShardedPlan(
            policy=policy, minibatch=minibatch, gpus=gpus, u_fwd=u, u_bwd=u, prefetch_depth=draw.choice([0, 1, 3, 16])
        )
        return Case(plan, with_tied(trace, (0, layers - 2), 100_000) if draw.random() < 0.5 else trace, machine)
    packs_bwd = random_packs(draw, layers)
    plan = HarmonyPlan(
        policy=policy, minibatch=minibatch, gpus=gpus, u_fwd=draw.randint(1, 4), u_bwd=draw.randint(1, 4),
        packs_fwd=random_packs(draw, packs_bwd[-1][0]), packs_bwd=packs_bwd, update=draw.choice(list(UpdateOn)),
        reduce=draw.choice(list(Reduce)), slots=draw.choice([None, 1, 2]), prefetch=draw.random() < 0.8,
        gpu_order=draw.choice([None, tuple(draw.sample(range(gpus), gpus))]),
        split_backward=draw.choice([0, 0, 1, 2, 8]),
    )  # fmt: skip
    if plan.u_fwd == plan.u_bwd:
        plan = replace(plan, stash=tuple(draw.choice(list(StashPlace)) for _ in packs_bwd[1:-1]))
    if draw.random() < 0.5:
        packs = [sorted(draw.sample(range(len(packs_bwd)), draw.randint(0, len(packs_bwd)))) for _ in range(2)]
        state = packs[1] if plan.update is UpdateOn.GPU else []
        plan = replace(plan, resident_weights=tuple(packs[0]), resident_state=tuple(state))
    if plan.update is UpdateOn.CPU and draw.random() < 0.5:
        trace = with_tied(trace, (0, layers - 2), 100_000)
    if draw.random() < 0.3:
        plan = replace(plan, update_when=UpdateWhen.END)
    return Case(plan, trace, machine)


def random_packs(draw: random.Random, layers: int) -> tuple[Pack, ...]:
    """Any cut of layers ``0 … layers - 1`` into packs (none if there are no layers)."""
    if layers == 0:
        return ()
    cuts = sorted(draw.sample(range(1, layers), draw.randint(0, layers - 1)))
    return tuple(zip([0, *cuts], [cut - 1 for cut in [*cuts, layers]], strict=True))
