"""Figures of a timeline, on a schedule small enough to count by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from sim.engine.simulate import simulate
from sim.errors import TimelineError
from sim.plan import HarmonyPlan
from sim.schedule import Schedule, TaskKind, TensorKind
from sim.timelines import metrics
from sim.timelines.replay import MemoryChange, StepTimes
from sim.timelines.timeline import Timeline, TimelineInfo
from tests.sim.handmade import Hand, machine, one_gpu_schedule, plan, tiny_trace

NO_BYTES = {kind.value: 0 for kind in TensorKind}


def two_gpus() -> Schedule:
    """Weights into both GPUs, an activation from GPU 0 to GPU 1, an all-reduce, a gradient out of GPU 1, an update."""
    hand = Hand(plan(gpus=2))
    weight, gradient = TensorKind.WEIGHT, TensorKind.GRADIENT
    hand.task(TaskKind.SWAP_IN, gpu=0, tensor_kind=weight, bytes=100)
    hand.task(TaskKind.SWAP_IN, gpu=1, tensor_kind=weight, bytes=60)
    hand.task(TaskKind.P2P, gpu=0, peer=1, tensor_kind=TensorKind.ACTIVATION, bytes=7)
    hand.task(TaskKind.ALLREDUCE, gpu=None, tensor_kind=gradient, bytes=400)
    hand.task(TaskKind.SWAP_OUT, gpu=1, tensor_kind=gradient, bytes=200)
    hand.task(TaskKind.UPDATE, gpu=None)
    return hand.schedule()


def of(schedule: Schedule, *steps: StepTimes, warmup_steps: int = 0) -> Timeline:
    info = TimelineInfo.of(schedule, "bench", "measured", steps=len(steps), warmup_steps=warmup_steps)
    return Timeline.from_times(schedule, info, steps)


def step(lengths: list[int], start: int = 0, **fields: Any) -> StepTimes:
    return StepTimes([start] * len(lengths), [start + length for length in lengths], **fields)


LENGTHS = [1000, 2000, 500, 300, 4000, 6000]


def test_bytes_by_direction_kind_and_gpu() -> None:
    timeline = of(two_gpus(), step(LENGTHS))
    assert metrics.swap_in_bytes(timeline) == {**NO_BYTES, "weight": 160}
    assert metrics.swap_out_bytes(timeline) == {**NO_BYTES, "gradient": 200}
    assert metrics.swap_bytes_by_gpu(timeline) == {
        "0": {"swap_in_bytes": {**NO_BYTES, "weight": 100}, "swap_out_bytes": NO_BYTES},
        "1": {"swap_in_bytes": {**NO_BYTES, "weight": 60}, "swap_out_bytes": {**NO_BYTES, "gradient": 200}},
    }
    assert metrics.p2p_bytes(timeline) == 7
    assert metrics.allreduce_bytes(timeline) == 400


def test_collectives_are_counted_together_and_by_kind() -> None:
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.ALLREDUCE, gpu=None, tensor_kind=TensorKind.GRADIENT, bytes=400)
    hand.task(TaskKind.REDUCE_SCATTER, gpu=None, tensor_kind=TensorKind.GRADIENT, bytes=100)
    hand.task(TaskKind.ALL_GATHER, gpu=None, tensor_kind=TensorKind.WEIGHT, bytes=30)
    hand.task(TaskKind.ALL_GATHER, gpu=None, tensor_kind=TensorKind.WEIGHT, bytes=7)
    timeline = of(hand.schedule(), step([1, 1, 1, 1]))
    assert metrics.allreduce_bytes(timeline) == 537
    assert metrics.collective_bytes(timeline) == {"allreduce": 400, "reduce_scatter": 100, "all_gather": 37}


def test_busy_counts_both_ends_of_p2p_and_all_gpus_of_an_all_reduce() -> None:
    assert metrics.busy_s(of(two_gpus(), step(LENGTHS))) == {
        "0": {"swap_in": 1e-6, "p2p_out": 0.5e-6, "collective": 0.3e-6},
        "1": {"swap_in": 2e-6, "swap_out": 4e-6, "p2p_in": 0.5e-6, "collective": 0.3e-6},
        "host": {"update": 6e-6},
    }


def test_busy_is_the_median_of_the_steps_after_the_warmup() -> None:
    steps = [step([times * length for length in LENGTHS], 10**6 * at) for at, times in enumerate((50, 1, 3, 2))]
    timeline = of(two_gpus(), *steps, warmup_steps=1)
    assert metrics.busy_s(timeline)["host"] == {"update": 12e-6}
    assert metrics.swap_in_bytes(timeline)["weight"] == 160  # of one step


def test_steps_that_move_different_bytes_are_an_error() -> None:
    copied = [100, 61, 7, 400, 200, 0]
    timeline = of(two_gpus(), step(LENGTHS), step(LENGTHS, 10**6, copied_bytes=copied))
    with pytest.raises(TimelineError, match=r"steps 0 and 1 .* swap_in weight of GPU 1, 60 and 61 bytes"):
        metrics.swap_in_bytes(timeline)
    with pytest.raises(TimelineError, match="moved different bytes"):
        timeline.summary()


def test_observed_peaks_are_the_largest_of_any_step() -> None:
    hand = Hand(plan(gpus=2))
    for gpu in (1, 1, None):
        hand.buffer(TensorKind.STASH, 0, 0, gpu=gpu)
    first, second, in_host = hand.buffers

    def changes(begin: int, gpu_bytes: int, host_bytes: int) -> list[MemoryChange]:
        return [
            MemoryChange(begin, first, gpu_bytes),
            MemoryChange(begin, in_host, host_bytes),
            MemoryChange(begin + 5, first, -gpu_bytes),
            MemoryChange(begin + 5, second, 3),
            MemoryChange(begin + 9, second, -3),
            MemoryChange(begin + 9, in_host, -host_bytes),
        ]

    schedule = two_gpus()
    schedule = replace(schedule, memory=replace(schedule.memory, host_store={TensorKind.DATA: 1000}))
    steps = [step(LENGTHS, memory=changes(0, 40, 8)), step(LENGTHS, 10**6, memory=changes(10**6, 30, 9))]
    timeline = of(schedule, *steps)
    assert metrics.observed_peak_bytes(timeline) == [0, 40]
    assert metrics.observed_host_peak_bytes(timeline) == 1009


def test_summary_of_a_simulation() -> None:
    figures = simulate(one_gpu_schedule(), tiny_trace(), machine(), steps=2).summary()
    assert json.loads(json.dumps(figures)) == figures
    assert figures["policy"] == "harmony-dp"
    expected = {
        "policy": "harmony-dp",
        "minibatch": 2,
        "packs_fwd": [[0, 0]],
        "packs_bwd": [[0, 0], [1, 1]],
        "update": "cpu",
        "slots": None,
        "stash": "swap",
        "gpu_order": None,
        "overlap_steps": False,
        "split_backward": 0,
    }
    assert {name: figures["plan"][name] for name in expected} == expected
    assert set(figures["plan"]) == set(HarmonyPlan.__struct_fields__)
    assert figures["step_time_s"] == 744e-9
    assert figures["step_times_s"] == [744e-9, 744e-9]
    assert (figures["period_s"], figures["overlapping_steps"]) == (744e-9, 0)
    assert figures["throughput_samples_per_s"] == pytest.approx(2 / 744e-9)
    assert figures["peak_memory_bytes"] == [860]
    assert figures["observed_peak_memory_bytes"][0] <= 860
    assert (figures["host_peak_bytes"], figures["observed_host_peak_bytes"]) == (948, 948)
    assert figures["swap_in_bytes"] == {
        **NO_BYTES, "weight": 400, "activation": 40, "activation_gradient": 40, "data": 48,
    }  # fmt: skip
    assert figures["swap_out_bytes"] == {**NO_BYTES, "activation": 40, "activation_gradient": 40, "gradient": 300}
    assert (figures["p2p_bytes"], figures["allreduce_bytes"]) == (0, 0)
    assert figures["busy_s"] == {
        "0": {"compute": pytest.approx(58e-9), "swap_in": pytest.approx(528e-9), "swap_out": pytest.approx(380e-9)},
        "host": {"update": pytest.approx(120e-9)},
    }
    assert figures["lower_bound_s"] == 744e-9
    assert sum(figures["critical_path"].values()) == pytest.approx(1)
    assert figures["provenance"] == {"measured": 6}


def test_a_measured_summary_has_no_bound() -> None:
    figures = of(two_gpus(), step(LENGTHS)).summary()
    assert not {"lower_bound_s", "critical_path", "provenance"} & figures.keys()
    assert figures["source"] == "measured"


def test_a_step_that_takes_no_time_has_no_throughput() -> None:
    assert of(two_gpus(), step([0] * 6)).summary()["throughput_samples_per_s"] is None
