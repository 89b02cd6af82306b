"""Training throughput on RTX 4090s that others published, where nothing was measured by us, and what we predict.

RoundPipe (arXiv 2604.27085) keeps weights in host memory, recomputes everything, and updates on the CPU while the next
step runs already, with weights that are one step old. Assumed: tensors in float16 with sums in float16, for which the
card's peak is 330 TFLOP/s; Adam with float32 masters, hidden behind the step unless it takes longer; 65,536 tokens for
each GPU in a step; 4x4090's and 8x4090's links, with as much host memory as it takes. The length of its sequences is
not published. The plan is the best that a short search for harmony-dp finds, which recomputes everything too.

    python benchmarks/bench_published.py

It finds, in tokens/s:

    model          GPUs   published    predicted for samples of 2,048, 4,096 and 8,192 tokens
    Llama-3.1-8B      1       3,142     2,837  (-10 %)     2,782  (-11 %)     2,578  (-18 %)
    Llama-3.1-8B      8      24,275    22,730   (-6 %)    21,988   (-9 %)    20,304  (-16 %)
    Qwen3-1.7B        1       8,881     8,604   (-3 %)     8,034  (-10 %)     7,378  (-17 %)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from msgspec import structs
from rich.console import Console

import sim
from executor.estimating.estimate import estimate
from executor.estimating.gpus import known_gpu
from executor.estimating.masters import AdamWithMasters
from executor.models.workloads import load_workload
from sim.tables import Table, signed_percent
from sim.units import NS_PER_S
from traces.schema import Phase

TOKENS = 65_536
"""Of a step, for each GPU."""
SEQUENCES = (2048, 4096, 8192)
MICROBATCHES = (1, 2, 4, 8, 16)
LARGEST = 16
"""Samples of 2,048 tokens in a microbatch; fewer of longer ones."""


@dataclass(frozen=True)
class Published:
    """Throughput of a model on some RTX 4090s, in tokens/s."""

    model: str
    gpus: int
    throughput: float

    def predicted(self, sequence: int) -> float:
        """What we expect for samples of so many tokens, in tokens/s."""
        summing_halves = replace(known_gpu("RTX 4090"), peaks={"float16": 330e12})
        trace = estimate(
            load_workload(self.model, values=False, sequence=sequence),
            summing_halves,
            microbatches=[u for u in MICROBATCHES if u * sequence <= LARGEST * SEQUENCES[0]],
            dtype="float16",
            optimizer=AdamWithMasters,
        )
        updates_ns = sum(row.duration_ns for row in trace.times if row.phase is Phase.UPDATE_CPU)
        hidden = [structs.replace(row, duration_ns=1) if row.phase.is_update else row for row in trace.times]
        machine = sim.load_machine("4x4090").with_gpus(1) if self.gpus == 1 else sim.load_machine(f"{self.gpus}x4090")
        best = sim.search(
            structs.replace(trace, times=tuple(hidden)),
            machine.with_host_memory(None),
            self.gpus * TOKENS // sequence,
            policies=(sim.Policy.HARMONY_DP,),
            max_simulated=1,
            max_variations=0,
        ).best
        return self.gpus * TOKENS / max(best.step_time_ns, updates_ns) * NS_PER_S


ROUNDPIPE = (
    Published("llama3.1-8b", 1, 3142),
    Published("llama3.1-8b", 8, 24275),
    Published("qwen3-1.7b", 1, 8881),
)


def main() -> None:
    rows = []
    for each in ROUNDPIPE:
        for sequence in SEQUENCES:
            predicted = each.predicted(sequence)
            error = signed_percent(predicted / each.throughput - 1)
            rows.append(
                (each.model, str(each.gpus), f"{sequence:,}", f"{each.throughput:,}", f"{predicted:,.0f}", error)
            )
    columns = ("model", "GPUs", "tokens of a sample", "published tokens/s", "predicted", "error")
    Console(width=140).print(Table("RoundPipe on RTX 4090", columns, tuple(rows)))


if __name__ == "__main__":
    main()
