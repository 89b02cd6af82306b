"""Evaluating candidates of a search, here or in other processes: build a schedule, simulate it, keep the figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from functools import lru_cache, partial

import msgspec
from msgspec.structs import replace

from traces.costs import Costs
from traces.errors import HarmonyError
from traces.schema import Trace

from ..builders import build_from_costs
from ..engine.durations import CostDurations, Demands
from ..engine.simulate import run_overlapping, run_step
from ..errors import DoesNotFit, PlanError
from ..hardware.machine import Machine
from ..home import tied_layers
from ..plan import HarmonyPlan, Plan, pieces
from ..schedule import Schedule, TaskKind
from ..timelines.replay import mean_period_ns


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A plan and what its simulation says of one step. Bytes of copies are of all GPUs together.

    ``step_time_ns`` is of a step alone, ``period_ns`` of one in a long row: the same, unless steps overlap.
    """

    plan: Plan
    step_time_ns: int
    period_ns: int
    gpu_peak_bytes: tuple[int, ...]
    host_peak_bytes: int
    swap_in_bytes: int
    swap_out_bytes: int
    p2p_bytes: int
    allreduce_bytes: int


def evaluate(plan: Plan, open_slots: bool, costs: Costs, machine: Machine) -> Found | HarmonyError:
    """Simulate a plan, with ``open_slots`` if need be with fewer slots; or the error for which it was refused."""
    refusal: HarmonyError | None = None
    for variant in _with_fewer_slots(plan) if open_slots and isinstance(plan, HarmonyPlan) else [plan]:
        try:
            return _figures(build_from_costs(variant, costs, machine), costs, machine)
        except DoesNotFit as error:
            refusal = refusal or error
            if error.gpu is None:
                break
        except PlanError as error:
            return error
    assert refusal is not None, "there is at least the plan itself"
    return refusal


class Evaluator:
    """Evaluates candidates, here or with the help of an executor."""

    def __init__(self, costs: Costs, machine: Machine, executor: Executor | None) -> None:
        self._costs, self._machine, self._executor = costs, machine, executor
        self._encoded = b"" if executor is None else msgspec.msgpack.encode(costs.trace)
        self._encoded_machine = b"" if executor is None else msgspec.msgpack.encode(machine)

    def outcomes(self, plans: Sequence[Plan], open_slots: bool) -> list[Found | HarmonyError]:
        """What became of each, in order."""
        if self._executor is None:
            return [evaluate(plan, open_slots, self._costs, self._machine) for plan in plans]
        elsewhere = partial(
            evaluate_encoded,
            open_slots=open_slots,
            trace=self._encoded,
            extrapolate=self._costs.extrapolate,
            machine=self._encoded_machine,
        )
        return [
            answer if isinstance(answer, HarmonyError) else msgspec.msgpack.decode(answer, type=Found)
            for answer in self._executor.map(elsewhere, plans)
        ]


def evaluate_encoded(
    plan: Plan, open_slots: bool, trace: bytes, extrapolate: bool, machine: bytes
) -> bytes | HarmonyError:
    """As :func:`evaluate`, for another process: trace, machine and result travel as MessagePack."""
    found = evaluate(plan, open_slots, _costs(trace, extrapolate), _machine(machine))
    return found if isinstance(found, HarmonyError) else msgspec.msgpack.encode(found)


@lru_cache(maxsize=1)
def _costs(trace: bytes, extrapolate: bool) -> Costs:
    return Costs(msgspec.msgpack.decode(trace, type=Trace), extrapolate=extrapolate)


@lru_cache(maxsize=1)
def _machine(machine: bytes) -> Machine:
    return msgspec.msgpack.decode(machine, type=Machine)


def _with_fewer_slots(plan: HarmonyPlan) -> Iterator[Plan]:
    """The plan, then with a quarter as many slots as it has or can use, a sixteenth, and so on down to one."""
    yield plan
    slots = plan.slots or max(len(pieces(0, plan.minibatch, u)) for u in (plan.u_fwd, plan.u_bwd))
    while slots > 1:
        slots = max(1, slots // 4)
        yield replace(plan, slots=slots)


def _figures(schedule: Schedule, costs: Costs, machine: Machine) -> Found:
    gpus = schedule.plan.gpus
    demands = Demands(machine, CostDurations(costs, machine, gpus), gpus)
    step = run_step(schedule, demands)
    period_ns = step.duration_ns
    if schedule.plan.overlap_steps:
        period_ns = mean_period_ns(
            [max(each.end_ns) for each in run_overlapping(schedule, demands, tied_layers(costs))]
        )
    copied = dict.fromkeys(TaskKind, 0)
    for task in schedule.tasks:
        copied[task.kind] += task.bytes
    return Found(
        plan=schedule.plan,
        step_time_ns=step.duration_ns,
        period_ns=period_ns,
        gpu_peak_bytes=schedule.memory.gpu_peak_bytes,
        host_peak_bytes=schedule.memory.host_peak_bytes,
        swap_in_bytes=copied[TaskKind.SWAP_IN],
        swap_out_bytes=copied[TaskKind.SWAP_OUT],
        p2p_bytes=copied[TaskKind.P2P],
        allreduce_bytes=sum(size for kind, size in copied.items() if kind.is_collective),
    )
