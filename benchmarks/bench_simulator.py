"""How fast the simulator is: tasks a second, beside bare SimPy timeouts a second in the same process.

``run_step`` is what a search needs of a simulation; ``simulate`` adds the tables, the bound and the critical path. Both
begin with a schedule that has been looked at before, as after building and validating it. CPU time, best of a few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import simpy
from rich.console import Console

import sim
from sim.engine.durations import CostDurations, Demands
from sim.engine.simulate import run_step
from sim.hardware.machine import Machine
from sim.plan import HarmonyPlan
from sim.schedule import Lane, MemoryPlan, Schedule, Task, TaskKind
from sim.tables import Table

GPUS = 4
SIZES = (1_000, 10_000, 100_000)
ENOUGH_S, MOST_RUNS = 1.0, 10


def seconds(work: Callable[[], object]) -> float:
    """The shortest of a few runs (two, and more if they are short), in CPU time: others disturb it less."""
    durations: list[float] = []
    while len(durations) < 2 or (sum(durations) < ENOUGH_S and len(durations) < MOST_RUNS):
        started = time.process_time()
        work()
        durations.append(time.process_time() - started)
    return min(durations)


def bare_timeouts(count: int) -> None:
    """What SimPy does at best."""
    env = simpy.Environment()

    def process() -> simpy.events.ProcessGenerator:
        for _ in range(count):
            yield env.timeout(1)

    env.process(process())
    env.run()


def computing(trace: sim.Trace, tasks: int) -> Schedule:
    """A pipeline that computes only: each microbatch passes all GPUs forward, then backward."""
    layers, minibatch = len(trace.layers), tasks // (2 * GPUS)
    cuts = [layers * gpu // GPUS for gpu in range(GPUS + 1)]
    passes = [(TaskKind.FORWARD, list(range(GPUS))), (TaskKind.BACKWARD, list(reversed(range(GPUS))))]
    made: list[Task] = []
    for kind, gpus in passes:
        for sample in range(minibatch):
            for gpu in gpus:
                before = (len(made) - 1,) if gpu != gpus[0] else ()
                task = Task(
                    id=len(made),
                    kind=kind,
                    gpu=gpu,
                    lane=Lane.COMPUTE,
                    layer_first=cuts[gpu],
                    layer_last=cuts[gpu + 1] - 1,
                    samples=(sample, sample + 1),
                    microbatch=sample,
                    waits_for=before,
                )
                made.append(task)
    packs = tuple((first, stop - 1) for first, stop in pairwise(cuts))
    return Schedule(
        model=trace.model,
        plan=HarmonyPlan(
            policy=sim.Policy.HARMONY_PP,
            minibatch=minibatch,
            gpus=GPUS,
            u_fwd=1,
            u_bwd=1,
            packs_fwd=packs[:-1],
            packs_bwd=packs,
        ),
        layers=layers,
        memory=MemoryPlan(
            gpu_peak_bytes=(0,) * GPUS,
            gpu_cap_bytes=(0,) * GPUS,
            host_store={},
            host_peak_bytes=0,
            host_cap_bytes=None,
        ),
        buffers=(),
        tasks=tuple(made),
    )


def swapping(costs: sim.Costs, machine: Machine, tasks: int) -> Schedule:
    """A step of ``dp-swap`` of about so many tasks."""
    choice, gpus = sim.PlanChoice(u_fwd=1), len(machine.gpus)
    few = sim.build_choice(choice, sim.Policy.DP_SWAP, gpus, costs, machine)
    more = sim.build_choice(choice, sim.Policy.DP_SWAP, 2 * gpus, costs, machine)
    per_round = len(more.tasks) - len(few.tasks)
    rounds = 1 + max(0, round((tasks - len(few.tasks)) / per_round))
    return sim.build_choice(choice, sim.Policy.DP_SWAP, rounds * gpus, costs, machine)


def cases() -> Iterator[tuple[str, Schedule, sim.Trace, Machine]]:
    """What is run, and on which machine."""
    trace, machine = sim.load_trace("gpt2-xl@gtx-1080-ti"), sim.load_machine("4x1080ti")
    costs, alone = sim.Costs(trace), machine.with_gpus(1)
    for size in SIZES:
        yield "computing only", computing(trace, size), trace, machine
    for size in SIZES:
        yield "1 GPU, nothing shared", swapping(costs, alone, size), trace, alone
    for size in SIZES:
        yield f"{GPUS} GPUs share a link", swapping(costs, machine, size), trace, machine


def main() -> None:
    """Print the table."""
    rows = []
    for name, schedule, trace, machine in cases():
        count, gpus, costs = len(schedule.tasks), schedule.plan.gpus, sim.Costs(trace)
        bare = count / seconds(lambda: bare_timeouts(count))  # noqa: B023
        durations = [
            seconds(lambda: run_step(schedule, Demands(machine, CostDurations(costs, machine, gpus), gpus))),  # noqa: B023
            seconds(lambda: sim.simulate(schedule, trace, machine)),  # noqa: B023
        ]
        rates = [count / duration for duration in durations]
        figures = [text for rate in rates for text in (f"{rate:,.0f}", f"{rate / bare:.3f}")]
        rows.append((name, f"{count:,}", f"{bare:,.0f}", *figures))
    columns = ("", "tasks", "bare SimPy/s", "run_step: tasks/s", "of bare", "simulate: tasks/s", "of bare")
    Console(width=120).print(Table("Simulator", columns, tuple(rows)))


if __name__ == "__main__":
    main()
