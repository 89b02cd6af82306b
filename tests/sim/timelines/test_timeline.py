"""The timeline's tables and its figures in one step's terms."""

from __future__ import annotations

import pandas as pd
import pytest
from msgspec.structs import replace

from sim.errors import TimelineError
from sim.schedule import TaskKind, TensorKind
from sim.timelines.replay import StepTimes, replay_times
from sim.timelines.timeline import Timeline, TimelineInfo
from tests.sim.handmade import Hand, one_gpu_schedule, plan
from tests.sim.made_timelines import overlapping, pipeline

SCHEDULE = one_gpu_schedule()
TIMES = replay_times(SCHEDULE, [task.bytes for task in SCHEDULE.tasks])


def later(by_ns: int, stretch: int = 1) -> StepTimes:
    return StepTimes(
        [by_ns + stretch * time for time in TIMES.start_ns], [by_ns + stretch * time for time in TIMES.end_ns]
    )


def timeline(*steps: StepTimes, warmup_steps: int = 0) -> Timeline:
    info = TimelineInfo.of(SCHEDULE, "bench", "measured", steps=len(steps), warmup_steps=warmup_steps)
    return Timeline.from_times(SCHEDULE, info, steps)


def test_rows_say_what_tasks_are_and_when_they_ran() -> None:
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.FORWARD, (0, 1), samples=(0, 1), microbatch=0)
    hand.task(TaskKind.P2P, 1, peer=1, tensor_kind=TensorKind.ACTIVATION, bytes=20, microbatch=0)
    hand.task(TaskKind.UPDATE, gpu=None)
    schedule = hand.schedule()
    info = TimelineInfo.of(schedule, "bench", "simulated", steps=1)
    frame = Timeline.from_times(schedule, info, [StepTimes([0, 3, 9], [3, 9, 11])]).to_frame()
    assert list(frame.columns) == [
        "step", "task", "kind", "gpu", "lane", "layer_first", "layer_last", "microbatch", "tensor_kind", "bytes",
        "start_ns", "end_ns", "peer",
    ]  # fmt: skip
    none = None
    assert frame.astype(object).where(frame.notna(), None).to_numpy().tolist() == [
        [0, 0, "forward", 0, "compute", 0, 1, 0, none, 0, 0, 3, none],
        [0, 1, "p2p", 0, "p2p_out", 1, 1, 0, "activation", 20, 3, 9, 1],
        [0, 2, "update", none, "update", 0, 0, none, none, 0, 9, 11, none],
    ]
    assert frame.dtypes.astype(str).to_dict() == {
        **dict.fromkeys(["step", "task", "layer_first", "layer_last", "bytes", "start_ns", "end_ns"], "int64"),
        **dict.fromkeys(["gpu", "microbatch", "peer"], "Int64"),
        **dict.fromkeys(["kind", "lane", "tensor_kind"], "string"),
    }


def test_memory_rows_by_time_with_the_host_as_minus_one() -> None:
    memory = timeline(TIMES).memory
    assert memory["time_ns"].is_monotonic_increasing
    assert memory.loc[memory["gpu"] == -1, "delta_bytes"].tolist() == [20, 20, -20, 20, -20, 20, -20, -20]
    assert int(memory["delta_bytes"].sum()) == 0


def test_the_memory_table_is_made_once_and_only_when_asked_for() -> None:
    made = timeline(TIMES)
    asked: list[pd.DataFrame] = []

    def make() -> pd.DataFrame:
        asked.append(made.memory)
        return made.memory

    lazy = Timeline(made.info, made.frame, make)
    assert not asked
    assert lazy.memory is lazy.memory
    assert len(asked) == 1
    assert lazy == made


def test_bytes_really_copied_come_before_what_tasks_say() -> None:
    copied = [task.bytes + 1 for task in SCHEDULE.tasks]
    frame = timeline(StepTimes(TIMES.start_ns, TIMES.end_ns, copied_bytes=copied)).frame
    assert frame["bytes"].tolist() == copied


def test_the_step_time_is_the_median_after_the_warmup() -> None:
    times = timeline(later(0, 9), later(10_000, 1), later(20_000, 5), later(30_000, 2), warmup_steps=1)
    length = TIMES.duration_ns
    assert times.step_times_ns == [9 * length, length, 5 * length, 2 * length]
    assert times.step_time_ns == 2 * length


def test_to_frame_is_a_copy() -> None:
    times = timeline(TIMES)
    frame = times.to_frame()
    frame["bytes"] = 0
    assert times.frame["bytes"].sum() > 0


def test_equal_by_content_and_not_hashable() -> None:
    assert timeline(TIMES) == timeline(TIMES)
    assert timeline(TIMES) != timeline(later(1))
    assert timeline(TIMES) != timeline(StepTimes(TIMES.start_ns, TIMES.end_ns, memory=[]))
    assert timeline(TIMES) != "timeline"
    with pytest.raises(TypeError):
        hash(timeline(TIMES))


def test_repr_says_what_it_is_of() -> None:
    assert repr(timeline(TIMES)) == "<Timeline measured: harmony-dp of tiny on bench, 0.7 µs a step>"


def test_info_of_a_schedule() -> None:
    info = TimelineInfo.of(SCHEDULE, "bench", "simulated", steps=1)
    assert (info.model, info.layers, info.gpu_planned_peak_bytes, info.gpu_cap_bytes) == ("tiny", 2, (860,), (860,))
    assert (info.host_planned_peak_bytes, info.host_store_bytes) == (948, 908)


# What is refused.


@pytest.mark.parametrize(("steps", "warmup"), [(0, 0), (1, 1), (2, -1)])
def test_steps_must_be_left_after_the_warmup(steps: int, warmup: int) -> None:
    with pytest.raises(TimelineError, match=f"{steps} step.*{warmup} warm up"):
        TimelineInfo.of(SCHEDULE, "bench", "measured", steps=steps, warmup_steps=warmup)


def test_every_task_needs_times() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        timeline(StepTimes(TIMES.start_ns[1:], TIMES.end_ns, memory=[]))


def refused(match: str, *, memory: pd.DataFrame | None = None, steps: int = 1, **columns: object) -> None:
    sound = timeline(TIMES)
    info = replace(sound.info, steps=steps)
    with pytest.raises(TimelineError, match=match):
        Timeline(info, sound.frame.assign(**columns), sound.memory if memory is None else memory)


def test_tables_are_checked() -> None:
    refused("has steps \\[0\\], but its header says 2", steps=2)
    refused("step 0, task 0 ends at 100 ns, before its start at 101 ns", start_ns=101)
    refused("column kind: holds 'juggle'; it may hold all_gather, allreduce, backward", kind="juggle")
    refused("column lane: holds nothing", lane=pd.Series([pd.NA] * len(SCHEDULE.tasks), dtype="string"))
    refused("memory table lacks gpu", memory=timeline(TIMES).memory.drop(columns="gpu"))
    refused("task table has unknown column\\(s\\) colour", colour="red")


def test_what_is_held_where_steps_overlap_counts_both() -> None:
    """The first step of GPU 0 is still under way when the next one begins, and no memory is held for one alone."""
    schedule = pipeline()
    found = overlapping(schedule)
    changes = found.memory[found.memory["gpu"] == 0].sort_values(["time_ns", "delta_bytes"])
    assert (changes["delta_bytes"].cumsum() >= 0).all()
    assert found.summary()["observed_peak_memory_bytes"][0] <= schedule.memory.gpu_peak_bytes[0]
    assert found.info.held_at_peak["0"].observed.bytes <= schedule.memory.gpu_peak_bytes[0]
    with pytest.raises(TimelineError, match="1 warm up and 3 overlap leave none"):
        replace(found.info, warmup_steps=1)
