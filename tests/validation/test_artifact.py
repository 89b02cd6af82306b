"""The engine against the public artifact of the paper: same graph, same constants, same predictions.

The artifact's graphs are rebuilt by the published account of its rules and run on our engine. Another file of cases can
be named in the environment variable ``HARMONY_ARTIFACT_CASES``.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sim.units import NS_PER_S

from .artifact_cases import Case, memory_by_rank
from .artifact_engine import Times, run_events
from .artifact_graph import Event, Stream, artifact_events
from .artifact_profiles import REFERENCE, profile_of

CASES = Path(os.environ.get("HARMONY_ARTIFACT_CASES", REFERENCE / "artifact_cases.json"))
TRACES = REFERENCE / "artifact_traces.json"

pytestmark = pytest.mark.skipif(
    not REFERENCE.exists(), reason="the artifact's predictions are not beside this checkout"
)

SETTINGS = ("no_prefetch", "prefetch")
CHANNELS = {
    Stream.SWAP_IN: "swap_in",
    Stream.SWAP_OUT: "swap_out",
    Stream.P2P_IN: "p2p_in",
    Stream.P2P_OUT: "p2p_out",
}
IDLE_RANK_ENDS = 1e-10  # seconds; how the artifact reports a rank without tasks
TICK = 1e-9  # seconds; our clock's

Run = list[tuple[Event, Times]]


def predictions(path: Path) -> list[Any]:
    """The predictions in a file, as parameters of a test."""
    if not REFERENCE.exists():
        return []
    return [pytest.param(case, id=case["id"]) for case in msgspec.json.decode(path.read_bytes())["cases"]]


def simulated(case: Case, setting: str) -> Run:
    """The events of a case, and when our engine lets them happen."""
    events = artifact_events(case, profile_of(case.model), prefetch=setting == "prefetch")
    return list(zip(events, run_events(events, case), strict=True))


def ends_by_rank(run: Run, ranks: int) -> list[float]:
    ends = [IDLE_RANK_ENDS] * ranks
    for event, times in run:
        ends[event.rank] = max(ends[event.rank], times.end_ns / NS_PER_S)
    return ends


def bytes_by_rank(run: Run, ranks: int) -> list[Counter[tuple[str, str]]]:
    """Bytes moved, by rank, by channel and kind. An all-reduce counts the weights and buffers it is for."""
    moved: list[Counter[tuple[str, str]]] = [Counter() for _ in range(ranks)]
    for event, _ in run:
        if event.to_rank is not None:
            where = "msg_same_rank" if event.to_rank == event.rank else "msg_cross_rank"
            moved[event.rank][where, event.kind.removeprefix("MSG")] += event.bytes or 0
        elif event.stream in CHANNELS:
            moved[event.rank][CHANNELS[event.stream], event.kind] += event.bytes or 0
        elif event.kind == "ARD":
            moved[event.rank]["allreduce", "WB"] += event.bytes or 0
    return moved


def busy_by_rank(run: Run, ranks: int) -> list[dict[str, float]]:
    """Seconds that events last together, by rank, by stream and kind."""
    busy: list[dict[str, float]] = [defaultdict(float) for _ in range(ranks)]
    for event, (start_ns, end_ns) in run:
        busy[event.rank][name(event)] += (end_ns - start_ns) / NS_PER_S
    return busy


def name(event: Event) -> str:
    return f"{event.stream.value}.{event.kind}"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("predicted", predictions(CASES))
def test_events_end_times_and_bytes_are_the_predicted_ones(predicted: dict[str, Any], setting: str) -> None:
    case, results = msgspec.convert(predicted, Case), predicted["results"][setting]
    run, ranks = simulated(case, setting), case.simulated_ranks
    assert len(run) == results["event_count"]
    assert Counter(name(event) for event, _ in run) == predicted["event_counts"]
    assert [+moved for moved in bytes_by_rank(run, ranks)] == [
        +Counter({(channel, kind): size for channel, kinds in rank.items() for kind, size in kinds.items()})
        for rank in predicted["bytes_per_rank"]
    ]
    ends = ends_by_rank(run, ranks)
    assert ends == pytest.approx(results["per_rank_endtime"], rel=1e-6)
    assert max(ends) == pytest.approx(results["global_endtime"], rel=1e-6)
    for found, expected in zip(busy_by_rank(run, ranks), predicted["busy_seconds_per_rank"], strict=True):
        assert found == pytest.approx(expected, rel=1e-6, abs=len(run) * TICK)


@pytest.mark.parametrize("predicted", predictions(CASES))
def test_memory_is_the_predicted_one(predicted: dict[str, Any]) -> None:
    case = msgspec.convert(predicted, Case)
    needed = memory_by_rank(case, profile_of(case.model))
    assert needed == predicted["per_rank_memory"]
    assert max(needed) == predicted["global_memory"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("predicted", predictions(TRACES))
def test_every_event_begins_when_predicted(predicted: dict[str, Any], setting: str) -> None:
    """Times are printed to the nanosecond, and each of ours may be a tick late."""
    case, rows = msgspec.convert(predicted, Case), predicted["traces"][setting]["events"]
    run = simulated(case, setting)
    found = {what(event): times for event, times in run}
    expected = {tuple(row[:9]): (row[9], row[10]) for row in rows}
    assert len(found) == len(run) == len(rows)
    assert found.keys() == expected.keys()
    for event, (start_ns, end_ns) in found.items():
        begins, lasts = expected[event]
        assert start_ns / NS_PER_S == pytest.approx(begins, abs=len(run) * TICK), event
        assert (end_ns - start_ns) / NS_PER_S == pytest.approx(lasts, abs=2 * TICK), event


@pytest.mark.parametrize("predicted", predictions(TRACES))
def test_memory_of_the_traced_schedules(predicted: dict[str, Any]) -> None:
    case = msgspec.convert(predicted, Case)
    assert memory_by_rank(case, profile_of(case.model)) == predicted["per_rank_memory"]


def what(event: Event) -> tuple[Any, ...]:
    """An event as the artifact's traces list it: all but its times."""
    moved = event.bytes if event.to_rank != event.rank else 0
    return (
        event.rank,
        event.number,
        event.stream.value,
        event.kind,
        event.microbatch,
        event.size,
        *event.layers,
        moved,
    )
