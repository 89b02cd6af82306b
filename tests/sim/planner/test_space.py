"""Which plans a search looks at."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sim.errors import PlanError
from sim.plan import Policy, Reduce, Residency, UpdateOn
from sim.planner.choice import PlanChoice
from sim.planner.space import ALL_COUNTS, Space, pack_counts


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_few_numbers_of_packs_are_all_tried(gpus: int) -> None:
    assert pack_counts(3, 3 + ALL_COUNTS - 1, gpus) == tuple(range(3, 3 + ALL_COUNTS))
    assert pack_counts(5, 5, gpus) == (5,)


@pytest.mark.parametrize("gpus", [1, 2, 4, 7])
@pytest.mark.parametrize(("smallest", "most"), [(1, 33), (3, 52), (2, 400), (40, 1000)])
def test_many_are_thinned_out_from_both_ends_known_to_multiples_of_the_gpus(
    gpus: int, smallest: int, most: int
) -> None:
    counts = pack_counts(smallest, most, gpus)
    assert list(counts) == sorted(set(counts))
    assert counts[:8] == tuple(range(smallest, smallest + 8))
    assert counts[-1] == most
    assert len(counts) < most - smallest + 1
    multiples = [count for count in counts if count % gpus == 0]
    for count in counts[8:-1]:
        if gpus > 1:
            assert count % gpus in (0, 1, gpus - 1)
    # No gap is wider than the growth from one multiple to the next, rounded to multiples on either side.
    assert all(b <= 1.3 * a + 2 * gpus for a, b in pairwise(multiples))


def test_what_is_fixed_has_one_value_and_the_rest_is_open() -> None:
    space = Space.of(PlanChoice(u_fwd=2, packs_bwd=((0, 1), (2, 3)), update=UpdateOn.GPU, prefetch=False))
    assert space == Space(u_fwd=(2,), packs_bwd=(((0, 1), (2, 3)),), update=(UpdateOn.GPU,), prefetch=(False,))
    assert Space.of(PlanChoice()) == Space()


def test_restrictions_must_concern_some_policy() -> None:
    harmony, swap = (Policy.HARMONY_DP, Policy.HARMONY_PP), (Policy.DP_SWAP,)
    Space(slots=(1,), residency=(Residency.NONE,)).check((*harmony, *swap))
    Space(u_fwd=(1,)).check(swap)
    with pytest.raises(PlanError, match="slots, prefetch: not a field of dp-swap plans"):
        Space(slots=(1,), prefetch=(False,)).check(swap)
    with pytest.raises(PlanError, match="residency: not a field of harmony-dp, harmony-pp plans"):
        Space(residency=(Residency.NONE,), reduce=(Reduce.HOST,)).check(harmony)
