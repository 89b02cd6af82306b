"""How fast the search is: candidates and simulations a second, how much it passes over, and what that may cost."""

from __future__ import annotations

from rich.console import Console

import sim
from sim.tables import Table
from sim.units import NS_PER_S, format_seconds

CASES = (("gpt2-xl@gtx-1080-ti", 32), ("gpt2-10b@gtx-1080-ti", 32))
MAX_SIMULATED = 50


def main() -> None:
    machine = sim.load_machine("4x1080ti")
    rows = []
    for name, minibatch in CASES:
        trace = sim.load_trace(name)
        for policy in (sim.Policy.HARMONY_DP, sim.Policy.HARMONY_PP):
            found = sim.search(trace, machine, minibatch, policies=(policy,), max_simulated=MAX_SIMULATED)
            counts = found.counts
            rows.append(
                (
                    f"{trace.model}, minibatch {minibatch}, {policy.value}",
                    format_seconds(found.seconds),
                    f"{counts.candidates:,}",
                    f"{counts.candidates / found.seconds:,.0f}",
                    f"{counts.simulated / found.seconds:.2f}",
                    f"{counts.pruned / counts.candidates:.1%}",
                    format_seconds(found.best.step_time_ns / NS_PER_S),
                    f"{found.gap:.1%}",
                )
            )
    columns = ("on 4x1080ti", "search", "candidates", "a second", "simulated/s", "pruned", "best step", "gap")
    title = f"Search, at most {MAX_SIMULATED} simulations a policy"
    Console(width=140).print(Table(title, columns, tuple(rows)))


if __name__ == "__main__":
    main()
