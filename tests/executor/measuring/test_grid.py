"""Which microbatch sizes a profile measures by itself."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.measuring.grid import Grid
from executor.measuring.profile import profile
from executor.models.workloads import Workload
from traces.schema import Trace


def sizes(grid: Grid, state: int, per_sample: int, seconds_per_sample: float = 0.0) -> list[int]:
    """The grid of a model whose hungriest layer takes so much."""
    found: list[int] = []
    round_s, u = 0.0, 1
    while u:
        found.append(u)
        round_s += u * seconds_per_sample
        u = grid.after(u, state + u * per_sample, state, round_s) or 0
    return found


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (100 + 10 * 8, [1, 2, 4, 8]),
        (100 + 10 * 11 + 9, [1, 2, 4, 8, 11]),
        (100 + 10, [1]),
        (50, [1]),  # not even the state fits; the search will say so
    ],
)
def test_sizes_double_up_to_the_largest_that_fits(memory: int, expected: list[int]) -> None:
    assert sizes(Grid(memory, 1e9), 100, 10) == expected


def test_sizes_stop_at_the_most() -> None:
    assert sizes(Grid(10**12, 1e9, most=10), 0, 1) == [1, 2, 4, 8, 10]


def test_sizes_stop_where_timing_them_would_not_fit_into_the_budget() -> None:
    # Three rounds that count and one to warm up, of 1 + 2 + 4 samples or of 1 + 2 + 4 + 8.
    assert sizes(Grid(10**12, budget_s=4 * 7.5), 0, 1, 1.0) == [1, 2, 4]


@given(
    memory=st.integers(1, 10**6),
    state=st.integers(0, 10**5),
    per_sample=st.integers(1, 10**4),
    budget=st.floats(0.1, 1000),
    seconds=st.floats(0.001, 10),
)
def test_all_but_the_first_fit(memory: int, state: int, per_sample: int, budget: float, seconds: float) -> None:
    found = sizes(Grid(memory, budget), state, per_sample, seconds)
    assert found == sorted(set(found))
    assert all(state + u * per_sample <= memory for u in found[1:])


def test_a_profile_finds_its_sizes_itself() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    workload = Workload(
        "small",
        model,
        torch.nn.functional.cross_entropy,
        lambda n, seed: (torch.ones(n, 4), torch.zeros(n, dtype=torch.long)),
    )

    def profiled(memory_bytes: int) -> Trace:
        return profile(workload, memory_bytes=memory_bytes, repeats=1, warmups=0, budget_s=30)

    trace = profiled(2000)
    found = sorted({row.microbatch for row in trace.sizes})
    assert found == sorted({row.microbatch for row in trace.times if row.microbatch})
    assert found[:3] == [1, 2, 4]
    largest = found[-1]
    takes = [
        trace.layers[row.layer].weight_bytes
        + trace.layers[row.layer].gradient_bytes
        + row.input_bytes
        + row.saved_bytes
        + row.workspace_bytes
        for row in trace.sizes
        if row.microbatch == largest
    ]
    assert max(takes) <= 2000
    assert sorted({row.microbatch for row in profiled(500).sizes})[-1] < largest
