"""Shards: nothing is lost, no element is cut, and all GPUs have about as much."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sim.schedule import TensorKind
from sim.shards import GRAIN_BYTES, Shards, cuts
from tests.strategies import linear_traces
from traces.costs import Costs
from traces.schema import Trace
from traces.synthetic import skewed_trace, with_tied

WEIGHT, GRADIENT, STATE = TensorKind.WEIGHT, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE


def test_the_first_parts_have_a_grain_more() -> None:
    assert cuts(72, 2) == [0, 48, 72]
    assert cuts(160, 4) == [0, 48, 96, 128, 160]
    assert cuts(20, 3) == [0, 16, 20, 20]
    assert cuts(0, 2) == [0, 0, 0]


@given(st.integers(0, 10_000), st.integers(1, 9))
def test_parts_are_whole_grains_of_nearly_one_size(size: int, parts: int) -> None:
    at = cuts(size, parts)
    sizes = [stop - start for start, stop in pairwise(at)]
    assert (at[0], at[-1], len(sizes)) == (0, size, parts)
    assert all(cut % GRAIN_BYTES == 0 for cut in at if cut < size)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) < 2 * GRAIN_BYTES


@given(linear_traces(tied=True, frozen=True), st.integers(1, 5), st.data())
def test_the_shards_of_a_run_are_the_run(trace: Trace, gpus: int, data: st.DataObject) -> None:
    costs, shards = Costs(trace), Shards(Costs(trace), gpus)
    first = data.draw(st.integers(0, costs.layer_count - 1))
    run = (first, data.draw(st.integers(first, costs.layer_count - 1)))
    for kind, whole in (
        (WEIGHT, costs.weight_bytes(*run)),
        (GRADIENT, costs.gradient_bytes(*run)),
        (STATE, costs.optimizer_state_bytes(*run)),
    ):
        assert sum(shards.bytes(kind, run, shard) for shard in range(gpus)) == whole
    updated = any(costs.updates(layer) for layer in range(run[0], run[1] + 1))
    assert abs(sum(shards.updated(run, shard) for shard in range(gpus)) - updated) < 1e-9


def test_a_tied_parameter_is_cut_by_itself_and_its_state_goes_with_its_owner() -> None:
    """Layer 0 owns a parameter of 100 000 bytes that layer 2 borrows; Adam keeps twice what is owned."""
    plain = skewed_trace(1, 4)
    before, after = Shards(Costs(plain), 3), Shards(Costs(with_tied(plain, (0, 2), 100_000)), 3)
    for shard, tied in enumerate((33_344, 33_328, 33_328)):
        for layer in (0, 2):
            run, own = (layer, layer), before.bytes(WEIGHT, (layer, layer), shard)
            assert after.bytes(WEIGHT, run, shard) == after.bytes(GRADIENT, run, shard) == own + tied
            assert after.bytes(STATE, run, shard) == 2 * (own + (tied if layer == 0 else 0))
