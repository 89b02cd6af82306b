"""How a plain pipeline is cut, against all cuts there are, and in which order its stages work."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.builders.stages import cut_stages, turns
from sim.errors import PlanError
from sim.plan import Pack, Policy
from sim.schedule import TaskKind
from traces.costs import Costs
from traces.synthetic import skewed_trace, uniform_trace


def all_cuts(layers: int, stages: int) -> list[tuple[Pack, ...]]:
    """Those whose stages end first come first."""
    inner = combinations(range(1, layers), stages - 1)
    return [tuple((first, stop - 1) for first, stop in pairwise((0, *cuts, layers))) for cuts in inner]


def longest_ns(costs: Costs, stages: tuple[Pack, ...], u: int) -> int:
    return max(costs.forward_ns(*stage, u) + costs.backward_ns(*stage, u) for stage in stages)


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 5), st.sampled_from((1, 3, 8)))
def test_no_cut_has_a_shorter_longest_stage_and_none_as_good_ends_earlier(seed, layers, gpus, u):
    costs = Costs(skewed_trace(seed, layers))
    if gpus > layers:
        with pytest.raises(PlanError, match=f"a pipeline over {gpus} GPUs needs at least as many layers"):
            cut_stages(costs, gpus, u)
        return
    best = min(all_cuts(layers, gpus), key=lambda stages: longest_ns(costs, stages, u))  # the first of the best
    assert cut_stages(costs, gpus, u) == best


def test_ties_go_to_the_cut_that_ends_first():
    costs = Costs(uniform_trace(5))
    assert cut_stages(costs, 2, 1) == ((0, 1), (2, 4))
    assert cut_stages(costs, 3, 1) == ((0, 0), (1, 2), (3, 4))
    assert cut_stages(costs, 4, 1) == ((0, 0), (1, 1), (2, 2), (3, 4))


def shown(policy: Policy, stage: int, stages: int, microbatches: int) -> str:
    letters = {TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B"}
    return " ".join(f"{letters[kind]}{microbatch}" for kind, microbatch in turns(policy, stage, stages, microbatches))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gpipe_goes_forward_with_all_then_back_in_reverse_order(stage):
    assert shown(Policy.GPIPE_SWAP, stage, 3, 3) == "F0 F1 F2 B2 B1 B0"


@pytest.mark.parametrize(
    ("stage", "microbatches", "order"),
    [
        (0, 4, "F0 F1 F2 B0 F3 B1 B2 B3"),
        (1, 4, "F0 F1 B0 F2 B1 F3 B2 B3"),
        (2, 4, "F0 B0 F1 B1 F2 B2 F3 B3"),
        (0, 2, "F0 F1 B0 B1"),
        (0, 1, "F0 B0"),
        (2, 1, "F0 B0"),
    ],
)
def test_1f1b_runs_ahead_by_the_stages_after_it(stage, microbatches, order):
    assert shown(Policy.ONE_F_ONE_B_SWAP, stage, 3, microbatches) == order


def test_dp_swap_finishes_a_microbatch_before_the_next():
    assert shown(Policy.DP_SWAP, 0, 1, 3) == "F0 B0 F1 B1 F2 B2"
