"""Comparing a prediction with what was measured: what differs, by how much, and whose doing it is."""

from __future__ import annotations

import io
import json
from itertools import accumulate

import msgspec
import pytest
from rich.console import Console

from sim.errors import DifferentSchedules
from sim.schedule import Schedule, TaskKind
from sim.timelines.compare import compare
from sim.timelines.comparison import Pair
from sim.timelines.critical_path import CriticalPath, Piece
from sim.timelines.replay import StepTimes, replay_times
from sim.timelines.timeline import Timeline, TimelineInfo
from tests.sim.made_timelines import (
    MILLISECOND,
    data_parallel,
    durations,
    first_of,
    overlapping,
    pipeline,
    swapping,
    timeline,
)

SCHEDULES = [pipeline, data_parallel, swapping]


def slower(schedule: Schedule, kind: TaskKind, factor: float) -> list[int]:
    """The usual durations, with all tasks of one kind ``factor`` times as long."""
    return [
        round(d * factor) if task.kind is kind else d
        for task, d in zip(schedule.tasks, durations(schedule), strict=True)
    ]


@pytest.mark.parametrize("schedule", [make() for make in SCHEDULES], ids=[make.__name__ for make in SCHEDULES])
def test_a_prediction_that_came_true(schedule: Schedule) -> None:
    found = compare(timeline(schedule), timeline(schedule, source="measured"))
    assert found.step_time_error == 0
    assert found.differing_bytes() == []
    assert {pair.error for pair in found.lanes.values()} == {0.0}
    assert (found.tasks["difference_ns"] == 0).all()
    assert len(found.tasks) == len(schedule.tasks)
    assert found.explanation()[0] == "The step took exactly as long as predicted."


def test_the_error_is_signed_and_relative_to_the_measured_step() -> None:
    schedule = pipeline()
    usual = durations(schedule)
    doubled = [2 * d for d in usual]
    fast, slow = timeline(schedule, usual), timeline(schedule, doubled, source="measured")
    assert compare(fast, slow).step_time_error == pytest.approx(-0.5)
    assert compare(slow, slow).step_time_error == 0
    assert compare(timeline(schedule, doubled), timeline(schedule, usual, source="measured")).step_time_error == 1.0


def test_the_lane_that_was_slower_is_named() -> None:
    schedule = pipeline(gpus=1)
    measured = timeline(schedule, slower(schedule, TaskKind.BACKWARD, 3), source="measured")
    found = compare(timeline(schedule), measured)
    assert found.step_time_error < 0
    assert "longer than predicted" in found.explanation()[0]
    assert found.explanation()[1].startswith("GPU 0 compute explains most of it")
    assert found.lanes["0", "swap_in"].error == 0
    late = found.tasks[found.tasks["difference_ns"] != 0]
    assert set(late["kind"]) == {"backward"}


def test_waiting_is_not_blamed_on_a_lane() -> None:
    """Every task lasts as predicted, but each starts later: no lane was busier."""
    schedule = pipeline()
    times = replay_times(schedule, durations(schedule))
    waited = [start + task * MILLISECOND for task, start in enumerate(times.start_ns)]
    ends = [begin + d for begin, d in zip(waited, durations(schedule), strict=True)]
    info = TimelineInfo.of(schedule, "bench", "measured", steps=1)
    measured = Timeline.from_times(schedule, info, [StepTimes(waited, ends)])
    found = compare(timeline(schedule), measured)
    assert found.step_time_error < 0
    assert "the rest is waiting" in found.explanation()[1]


def test_medians_leave_the_warm_up_out() -> None:
    schedule = data_parallel()
    usual = durations(schedule)
    cold, warm, odd = [9 * d for d in usual], usual, [2 * d for d in usual]
    measured = timeline(schedule, cold, warm, warm, odd, source="measured", warmup_steps=1)
    found = compare(timeline(schedule), measured)
    assert found.step_time_error == 0
    assert (found.tasks["measured_duration_ns"] == found.tasks["predicted_duration_ns"]).all()
    assert (found.tasks["measured_start_ns"] == found.tasks["predicted_start_ns"]).all()


def test_bytes_that_differ_are_reported_by_tensor_kind() -> None:
    schedule = pipeline()
    times = replay_times(schedule, durations(schedule))
    said = [task.bytes for task in schedule.tasks]
    swap = first_of(schedule, TaskKind.SWAP_IN)
    said[swap] += 5
    info = TimelineInfo.of(schedule, "bench", "measured", steps=1)
    measured = Timeline.from_times(schedule, info, [StepTimes(times.start_ns, times.end_ns, copied_bytes=said)])
    found = compare(timeline(schedule), measured)
    kind = schedule.tasks[swap].tensor_kind
    assert kind is not None
    assert found.swap_in[kind.value].difference == -5
    assert len(found.differing_bytes()) == 1
    assert found.differing_bytes()[0].startswith(f"{kind.value} in: ")
    assert "Bytes moved differ" in found.explanation()[-1]


def test_json_holds_errors_per_lane_and_tensor_kind() -> None:
    schedule = swapping()
    measured = timeline(schedule, slower(schedule, TaskKind.SWAP_OUT, 2), source="measured")
    found = json.loads(json.dumps(compare(timeline(schedule), measured).to_dict(), allow_nan=False))
    assert found["lanes"]["0"]["swap_out"]["error"] == pytest.approx(-0.5)
    assert found["lanes"]["1"]["compute"]["error"] == 0
    assert found["tensor_kinds"]["weight"]["swap_in"]["error"] == 0
    assert found["tensor_kinds"]["weight"]["swap_in"]["predicted_bytes"] > 0
    assert found["policy"] == "dp-swap"
    predicted, actual = found["step_time_s"]["predicted"], found["step_time_s"]["measured"]
    assert found["step_time_error"] == pytest.approx((predicted - actual) / actual)


def with_causes(shown: Timeline, *lasting: tuple[str, int, int | None]) -> Timeline:
    """Pieces of the critical path: cause, length and task."""
    ends = list(accumulate(length for _, length, _ in lasting))
    pieces = [
        Piece(start, end, cause, task) for (cause, _, task), start, end in zip(lasting, [0, *ends], ends, strict=False)
    ]
    info = msgspec.structs.replace(shown.info, critical_path=CriticalPath(tuple(pieces)))
    return Timeline(info, shown.frame, shown.memory)


def test_links_are_compared_where_both_know_them_and_lanes_where_one_does_not() -> None:
    schedule = pipeline()
    swap = first_of(schedule, TaskKind.SWAP_OUT)
    predicted = with_causes(timeline(schedule), ("compute", 1, 0), ("link:gpu0 up", 1, swap))
    other = timeline(schedule, source="measured")
    step = predicted.step_time_ns / 1e9
    by_link = compare(predicted, with_causes(other, ("compute", 3, 0), ("link:gpu0 up", 1, swap))).causes
    assert by_link["link:gpu0 up"] == Pair(pytest.approx(step / 2), pytest.approx(step / 4))
    by_lane = compare(predicted, with_causes(other, ("compute", 3, 0), ("swap_out", 1, swap))).causes
    assert by_lane["swap_out"] == Pair(pytest.approx(step / 2), pytest.approx(step / 4))
    assert "link:gpu0 up" not in by_lane


def test_causes_are_shares_of_each_step() -> None:
    schedule = pipeline()
    doubled = [2 * d for d in durations(schedule)]

    predicted = with_causes(timeline(schedule), ("compute", 2, 0), ("recompute", 1, 0), ("swap_in", 1, 1))
    measured = with_causes(timeline(schedule, doubled, source="measured"), ("compute", 3, 0), ("idle", 3, None))
    causes = compare(predicted, measured).causes
    step = predicted.step_time_ns / 1e9
    assert causes["compute"].predicted == pytest.approx(0.75 * step)
    assert causes["compute"].measured == pytest.approx(step)
    assert causes["idle"].predicted == 0
    assert sum(pair.difference for pair in causes.values()) == pytest.approx(-step)


def test_another_plan_is_refused() -> None:
    faults = r"of different schedules.*: policy harmony-pp and harmony-dp, u_fwd 2 and 1, u_bwd 2 and 1, packs_fwd"
    with pytest.raises(DifferentSchedules, match=faults):
        compare(timeline(pipeline()), timeline(data_parallel(), source="measured"))


def test_other_tasks_under_the_same_plan_are_refused() -> None:
    """Less memory, less prefetching: the plan's words are the same, the tasks are not."""
    schedule = pipeline()
    shorter = msgspec.structs.replace(schedule, tasks=schedule.tasks[:-1])
    with pytest.raises(
        DifferentSchedules, match=rf"{len(schedule.tasks)} tasks predicted, {len(shorter.tasks)} measured"
    ):
        compare(timeline(schedule), timeline(shorter, source="measured"))
    last = schedule.tasks[-1]
    changed = msgspec.structs.replace(
        schedule, tasks=(*schedule.tasks[:-1], msgspec.structs.replace(last, layer_last=last.layer_last + 1))
    )
    with pytest.raises(DifferentSchedules, match=f"task {last.id} is"):
        compare(timeline(schedule), timeline(changed, source="measured"))


def test_the_wrong_way_round_is_refused() -> None:
    schedule = pipeline()
    with pytest.raises(DifferentSchedules, match="swap the two"):
        compare(timeline(schedule, source="measured"), timeline(schedule))


def test_it_can_be_read_on_a_terminal_and_in_a_notebook() -> None:
    schedule = pipeline()
    measured = timeline(schedule, [2 * d for d in durations(schedule)], source="measured")
    found = compare(timeline(schedule), measured)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(found)
    text = console.export_text()
    for part in ("step time", "GPU 1 p2p_in", "weight in", "-50.0 %", "longer than predicted"):
        assert part in text
    html = found._repr_html_()
    assert html.count("<table>") == 3
    assert "-50.0 %" in html
    assert repr(found).startswith("<Comparison harmony-pp: step ")


def test_of_steps_that_overlap_the_period_is_compared_too() -> None:
    schedule = pipeline()
    found = compare(overlapping(schedule), overlapping(schedule, factor=2, source="measured"))
    assert found.period_s is not None
    assert found.period_s.error == found.step_time_error == pytest.approx(-0.5)
    assert (found.tasks["measured_duration_ns"] == 2 * found.tasks["predicted_duration_ns"]).all()
    assert (found.tasks["measured_start_ns"] == 2 * found.tasks["predicted_start_ns"]).all()
    assert found.to_dict()["period"]["error"] == pytest.approx(-0.5)
    assert [row[0] for row in next(found.tables()).rows][:2] == ["step time", "period"]
    alone = compare(timeline(schedule), timeline(schedule, source="measured"))
    assert (alone.period_s, alone.to_dict()["period"]) == (None, None)
