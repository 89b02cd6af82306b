"""How fast the simulator is: tasks a second, beside bare SimPy timeouts a second in the same process."""

from __future__ import annotations

import time
from collections.abc import Callable

import simpy
from rich.console import Console

import sim
from sim.tables import Table
from sim.units import format_seconds

MINIBATCHES = (8, 32, 128)
REPEATS = 3


def seconds(work: Callable[[], object]) -> float:
    """The shortest of a few runs, in CPU time: others on this machine disturb it less."""
    durations = []
    for _ in range(REPEATS):
        started = time.process_time()
        work()
        durations.append(time.process_time() - started)
    return min(durations)


def bare_timeouts(count: int) -> None:
    env = simpy.Environment()

    def process() -> simpy.events.ProcessGenerator:
        for _ in range(count):
            yield env.timeout(1)

    env.process(process())
    env.run()


def main() -> None:
    trace, machine = sim.load_trace("gpt2-xl@gtx-1080-ti"), sim.load_machine("4x1080ti")
    costs = sim.Costs(trace)
    count = 100_000
    bare = count / seconds(lambda: bare_timeouts(count))
    rows = [("bare SimPy timeouts", str(count), "", "", f"{bare:,.0f}", "")]
    for policy in sim.Policy:
        for minibatch in MINIBATCHES:
            choice = sim.PlanChoice(u_fwd=1)
            building = seconds(lambda: sim.build_choice(choice, policy, minibatch, costs, machine))  # noqa: B023
            schedule = sim.build_choice(choice, policy, minibatch, costs, machine)
            simulating = seconds(lambda: sim.simulate(schedule, trace, machine))  # noqa: B023
            rate = len(schedule.tasks) / simulating
            rows.append(
                (
                    f"{policy.value}, minibatch {minibatch}",
                    str(len(schedule.tasks)),
                    format_seconds(building),
                    format_seconds(simulating),
                    f"{rate:,.0f}",
                    f"{rate / bare:.3f}",
                )
            )
    columns = ("gpt2-xl on 4x1080ti", "tasks", "build", "simulate", "tasks/s", "of bare SimPy")
    Console(width=120).print(Table("Simulator", columns, tuple(rows)))


if __name__ == "__main__":
    main()
