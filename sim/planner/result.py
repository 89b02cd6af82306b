"""What a search found, and how it shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..plan import HarmonyPlan, Pack, PagedPlan, Plan, Policy, Reduce, ShardedPlan, StashPlace, UpdateWhen
from ..schedule import Schedule
from ..tables import MISSING, Table
from ..timelines.timeline import Timeline
from ..units import NS_PER_S, format_bytes, format_seconds
from .evaluate import Found
from .refusals import Refusal

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Best:
    """The fastest plan, with its schedule and the timeline of its simulation."""

    found: Found
    schedule: Schedule
    timeline: Timeline

    @property
    def plan(self) -> Plan:
        """As built: where slots were open, with as many as fit."""
        return self.schedule.plan

    @property
    def step_time_ns(self) -> int:
        """Of one isolated step."""
        return self.found.step_time_ns


@dataclass(frozen=True)
class Counts:
    """What became of the candidates. ``pruned`` cannot be among the top; ``left`` were not tried for lack of budget.
    A microbatch size of which no cut into packs fits counts as one that is ``infeasible``. ``varied``: variations of
    the best that were simulated besides.
    """

    candidates: int = 0
    simulated: int = 0
    pruned: int = 0
    infeasible: int = 0
    left: int = 0
    varied: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.candidates + other.candidates,
            self.simulated + other.simulated,
            self.pruned + other.pruned,
            self.infeasible + other.infeasible,
            self.left + other.left,
            self.varied + other.varied,
        )


@dataclass(frozen=True)
class SearchResult:
    """The outcome of a search.

    ``top`` are the fastest of all policies, ``best_by_policy`` the fastest of each that has a plan which fits. No
    candidate takes less than ``lower_bound_ns``: the least bound of those not simulated, or time of those that were.
    Variations that were not simulated may.
    """

    best: Best
    best_by_policy: Mapping[Policy, Best]
    top: tuple[Found, ...]
    counts: Counts
    counts_by_policy: Mapping[Policy, Counts]
    refusals: tuple[Refusal, ...]
    lower_bound_ns: int
    seconds: float
    notes: tuple[str, ...]

    @property
    def gap(self) -> float:
        """By which share of the best's time a candidate that was not simulated could at most be faster."""
        best = self.best.found.period_ns
        return (best - self.lower_bound_ns) / best if best else 0.0

    def to_dict(self) -> dict[str, Any]:
        """What ``--json`` prints, as plain JSON values."""
        return {
            "best": self.best.timeline.summary(),
            "best_by_policy": {policy.value: _found(best.found) for policy, best in self.best_by_policy.items()},
            "top": [_found(found) for found in self.top],
            "candidates": self.counts.candidates,
            "simulated": self.counts.simulated,
            "pruned": self.counts.pruned,
            "infeasible": self.counts.infeasible,
            "left": self.counts.left,
            "varied": self.counts.varied,
            "refusals": [refusal.to_dict() for refusal in self.refusals],
            "seconds": self.seconds,
            "lower_bound_s": self.lower_bound_ns / NS_PER_S,
            "gap": self.gap,
            "notes": [*self.notes, *self._caveats()],
        }

    def table(self) -> Table:
        """The top plans, one a row."""
        info = self.best.timeline.info
        columns = ("plan", "step", "period", "samples/s", "GPU peak", "swap in", "swap out", "GPU to GPU")
        rows = tuple(
            (
                describe(found.plan),
                format_seconds(found.step_time_ns / NS_PER_S),
                format_seconds(found.period_ns / NS_PER_S),
                MISSING if (throughput := _throughput(found)) is None else f"{throughput:.3g}",
                format_bytes(max(found.gpu_peak_bytes)),
                format_bytes(found.swap_in_bytes),
                format_bytes(found.swap_out_bytes),
                format_bytes(found.p2p_bytes + found.allreduce_bytes),
            )
            for found in self._shown()
        )
        return Table(f"{info.model} on {info.machine}, minibatch {info.plan.minibatch}", columns, rows)

    def remarks(self) -> tuple[str, ...]:
        """Sentences that belong to the table."""
        counts = self.counts
        others = "no other candidate" if counts.varied else "no other plan"
        lines = [
            f"{counts.candidates} candidates: {counts.simulated} simulated, {counts.pruned} pruned, "
            f"{counts.infeasible} infeasible, {counts.left} left for lack of budget; {self.seconds:.1f} s",
            f"{others} takes less than {format_seconds(self.lower_bound_ns / NS_PER_S)} "
            f"(at most {self.gap:.1%} faster than the best)",
        ]
        if counts.varied:
            lines.append(f"{counts.varied} variations of the best were simulated too; of others no bound says anything")
        if any(found.plan.overlap_steps for found in self.top):
            lines.append(
                "where steps overlap, what counts is their period, from end to end; bounds are of a step alone"
            )
        return (*lines, *(refusal.line() for refusal in self.refusals), *self.notes, *self._caveats())

    def _caveats(self) -> list[str]:
        """Of the best of each policy, each once."""
        each = (best.timeline.info.notes.get("caveats", []) for best in self.best_by_policy.values())
        return list(dict.fromkeys(caveat for caveats in each for caveat in caveats))

    def _shown(self) -> list[Found]:
        """The top, and each policy's best if it is not among them."""
        others = [best.found for best in self.best_by_policy.values() if best.found not in self.top]
        return [*self.top, *sorted(others, key=lambda found: found.period_ns)]

    def __rich__(self) -> RenderableType:
        """The table with its remarks, as rich draws them."""
        from rich.console import Group
        from rich.text import Text

        return Group(self.table(), *map(Text, self.remarks()))

    def _repr_html_(self) -> str:
        """The table as a notebook shows it."""
        return self.table()._repr_html_()


def describe(plan: Plan) -> str:
    """A plan in a line: ``harmony-pp u 4/2, packs 12/16, update cpu``."""
    match plan:
        case HarmonyPlan():
            update = plan.update.value + (" at end" if plan.update_when is UpdateWhen.END else "")
            reduce = f", reduce {plan.reduce.value}" if plan.reduce is not Reduce.RING else ""
            slots = f", slots {plan.slots}" if plan.slots else ""
            overlap = ", steps overlap" if plan.overlap_steps else ""
            turns = f", GPUs {','.join(map(str, plan.gpu_order))}" if plan.gpu_order else ""
            stays = _stash(plan) + _residents(plan)
            split = f", split {plan.split_backward}" if plan.split_backward else ""
            return (
                f"{plan.policy.value} u {plan.u_fwd}/{plan.u_bwd}, packs {_count(plan.packs_fwd)}/"
                f"{_count(plan.packs_bwd)}, update {update}{reduce}{slots}{turns}{overlap}{stays}{split}"
            )
        case PagedPlan():
            saved = "" if plan.recompute else ", no recompute"
            ahead = f", prefetch {plan.prefetch_depth}" if plan.prefetch_depth else ""
            how = f"{plan.residency.value}, writeback {plan.writeback.value}{saved}{ahead}"
            return f"{plan.policy.value} u {plan.u_fwd}, {how}"
        case ShardedPlan():
            end = ", update at end" if plan.update_when is UpdateWhen.END else ""
            return f"{plan.policy.value} u {plan.u_fwd}, prefetch {plan.prefetch_depth}{end}"


def _stash(plan: HarmonyPlan) -> str:
    """``, stash keep``, or how many of several stashes wait in each place; nothing if all are swapped."""
    counts = Counter(plan.stash_places.values())
    if not counts or set(counts) == {StashPlace.SWAP}:
        return ""
    words = [place.value if len(counts) == 1 else f"{count} {place.value}" for place, count in counts.items()]
    return f", stash {' '.join(words)}"


def _residents(plan: HarmonyPlan) -> str:
    """Of how many backward packs weights or optimizer state stay on GPUs; nothing if of none."""
    weights, state = len(plan.resident_weights), len(plan.resident_state)
    return (f", resident weights {weights}" if weights else "") + (f", resident state {state}" if state else "")


def _count(packs: tuple[Pack, ...]) -> int:
    return len(packs)


def _throughput(found: Found) -> float | None:
    """Samples per second, in the long run."""
    return found.plan.minibatch / found.period_ns * NS_PER_S if found.period_ns else None


def _found(found: Found) -> dict[str, Any]:
    """As ``Timeline.summary`` calls the same figures."""
    plan = msgspec.to_builtins(found.plan)
    del plan["family"]
    return {
        "policy": found.plan.policy.value,
        "plan": plan,
        "step_time_s": found.step_time_ns / NS_PER_S,
        "period_s": found.period_ns / NS_PER_S,
        "throughput_samples_per_s": _throughput(found),
        "peak_memory_bytes": list(found.gpu_peak_bytes),
        "host_peak_bytes": found.host_peak_bytes,
        "swap_in_bytes": found.swap_in_bytes,
        "swap_out_bytes": found.swap_out_bytes,
        "p2p_bytes": found.p2p_bytes,
        "allreduce_bytes": found.allreduce_bytes,
    }
