"""What each option beyond the paper does to a plan: step, period, bytes and memory, beside the same plan without it.

The plans are given, not searched for, so that only the option differs. Predicted, from the shipped traces.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

from msgspec.structs import replace
from rich.console import Console

import sim
from sim.errors import DoesNotFit
from sim.hardware.switches import cross_order
from sim.plan import StashPlace
from sim.planner.result import describe
from sim.tables import Table
from sim.units import format_bytes, format_seconds


class Base(NamedTuple):
    """A plan to vary: microbatch size, and how many equal packs (all of them backward, all but the last forward)."""

    trace: str
    machine: str
    policy: sim.Policy
    minibatch: int
    microbatch: int
    packs: int
    update: sim.UpdateOn


DP, PP = sim.Policy.HARMONY_DP, sim.Policy.HARMONY_PP
BASES = (
    Base("gpt2-xl@gtx-1080-ti", "4x1080ti", PP, 8, 1, 8, sim.UpdateOn.CPU),
    Base("gpt2-xl@gtx-1080-ti", "4x1080ti", PP, 32, 1, 12, sim.UpdateOn.GPU),
    Base("gpt2-xl@gtx-1080-ti", "4x1080ti", DP, 32, 4, 26, sim.UpdateOn.CPU),
    Base("gpt2-xl@gtx-1080-ti", "8x1080ti-2switch", PP, 8, 1, 16, sim.UpdateOn.CPU),
    Base("gpt2-10b@gtx-1080-ti", "4x1080ti", PP, 32, 2, 26, sim.UpdateOn.GPU),
)


def options(base: Base, machine: sim.Machine) -> dict[str, dict[str, Any]]:
    """Fields of a plan by what they are called here. ``few``: as many packs as there are GPUs stay on them."""
    few = tuple(range(base.packs - len(machine.gpus), base.packs))
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "stash keep": {"stash": StashPlace.KEEP},
        "stash recompute, every other": {
            "stash": tuple((StashPlace.SWAP, StashPlace.RECOMPUTE)[at % 2] for at in range(base.packs - 2))
        },
        "overlapping steps": {"overlap_steps": True},
    }
    if base.policy is DP:
        return found | {"reduce scatter": {"reduce": sim.Reduce.SCATTER}}
    found |= {"weights of last packs resident": {"resident_weights": few}, "split backward": {"split_backward": 1}}
    if base.update is sim.UpdateOn.GPU:
        found["state of last packs resident"] = {"resident_state": few}
    if cross_order(machine) != tuple(range(len(machine.gpus))):
        found["crossing switches"] = {"gpu_order": cross_order(machine)}
    return found


def row(name: str, plan: sim.HarmonyPlan, trace: sim.Trace, machine: sim.Machine) -> tuple[str, ...]:
    """Figures of a plan, or why it has none."""
    try:
        schedule = sim.build(plan, trace, machine)
    except DoesNotFit as error:
        return name, "does not fit", "", "", "", "", format_bytes(error.needed)
    timeline = sim.simulate(schedule, trace, machine)
    found = timeline.summary()
    return (
        name,
        format_seconds(found["step_time_s"]),
        format_seconds(found["period_s"]),
        *(format_bytes(sum(found[way].values())) for way in ("swap_in_bytes", "swap_out_bytes")),
        format_bytes(found["p2p_bytes"] + found["allreduce_bytes"]),
        format_bytes(max(found["peak_memory_bytes"])),
    )


def main() -> None:
    """Print a table for each plan."""
    columns = ("", "step", "period", "swap in", "swap out", "GPU to GPU", "GPU peak")
    for base in BASES:
        trace, machine = sim.load_trace(base.trace), sim.load_machine(base.machine)
        layers = len(trace.layers)
        cuts = [layers * at // base.packs for at in range(base.packs + 1)]
        packs = tuple((first, stop - 1) for first, stop in pairwise(cuts))
        plain = sim.HarmonyPlan(
            policy=base.policy,
            minibatch=base.minibatch,
            gpus=len(machine.gpus),
            u_fwd=base.microbatch,
            u_bwd=base.microbatch,
            packs_fwd=packs[:-1],
            packs_bwd=packs,
            update=base.update,
        )
        rows = [
            row(name, replace(plain, **changed), trace, machine) for name, changed in options(base, machine).items()
        ]
        title = f"{base.trace} on {base.machine}, {describe(plain)}, minibatch {base.minibatch}"
        Console(width=130).print(Table(title, columns, tuple(rows)))


if __name__ == "__main__":
    main()
