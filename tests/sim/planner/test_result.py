"""How a search's outcome is shown."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from sim.plan import HarmonyPlan, PagedPlan, Policy
from sim.planner.result import Counts, SearchResult, describe
from sim.planner.search import search
from tests.sim.handmade import machine
from traces.synthetic import uniform_trace


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return search(uniform_trace(4), machine(gpus=2), 4, policies=tuple(Policy), top=3, max_simulated=5)


def test_a_plan_in_a_line() -> None:
    packs = ((0, 0), (1, 2), (3, 3))
    harmony = HarmonyPlan(
        policy=Policy.HARMONY_PP, minibatch=8, gpus=2, u_fwd=4, u_bwd=2, packs_fwd=packs[:2], packs_bwd=packs
    )
    assert describe(harmony) == "harmony-pp u 4/2, packs 2/3, update cpu"
    assert describe(replace(harmony, gpu_order=(1, 0))) == "harmony-pp u 4/2, packs 2/3, update cpu, GPUs 1,0"
    paged = PagedPlan(policy=Policy.DP_SWAP, minibatch=8, gpus=2, u_fwd=2, u_bwd=2)
    assert describe(paged) == "dp-swap u 2, lru, writeback always"


def test_counts_add_up_field_by_field() -> None:
    assert Counts(1, 2, 3, 4, 5, 6) + Counts(10, 20, 30, 40, 50, 60) == Counts(11, 22, 33, 44, 55, 66)


def test_json_says_the_same_as_the_result(result: SearchResult) -> None:
    shown = json.loads(json.dumps(result.to_dict()))
    assert shown["best"]["step_time_s"] == shown["top"][0]["step_time_s"] == result.best.step_time_ns / 1e9
    assert shown["lower_bound_s"] <= shown["best"]["step_time_s"]
    assert shown["gap"] == result.gap
    assert shown["candidates"] == sum(shown[name] for name in ("simulated", "pruned", "infeasible", "left"))
    assert set(shown["best_by_policy"]) == {policy.value for policy in Policy}
    for each in shown["top"]:
        assert each["throughput_samples_per_s"] == pytest.approx(4 / each["period_s"])
        assert len(each["peak_memory_bytes"]) == 2
        assert each["plan"]["minibatch"] == 4
    # The best by itself and its timeline count the same bytes.
    by_kind = shown["best"]["swap_in_bytes"]
    assert shown["top"][0]["swap_in_bytes"] == sum(size for kind, size in by_kind.items() if kind != "by_gpu")


def test_the_table_shows_the_top_and_the_best_of_each_policy(result: SearchResult) -> None:
    plans = [row[0] for row in result.table().rows]
    assert plans[:3] == [describe(found.plan) for found in result.top]
    for best in result.best_by_policy.values():
        assert plans.count(describe(best.found.plan)) >= 1
    assert len(plans) == len(result.top) + sum(best.found not in result.top for best in result.best_by_policy.values())


def test_remarks_count_candidates_and_state_the_bound(result: SearchResult) -> None:
    counts, bound = result.remarks()[:2]
    assert counts.startswith(f"{result.counts.candidates} candidates: {result.counts.simulated} simulated")
    assert f"{result.gap:.1%}" in bound
