"""What a choice fixes, and for which plans."""

from __future__ import annotations

import pytest

from sim.errors import PlanError
from sim.plan import Policy, Reduce, Residency, UpdateOn
from sim.planner.choice import PlanChoice


def test_a_field_that_a_policy_lacks_is_refused_by_its_option() -> None:
    with pytest.raises(PlanError, match=r"--packs-bwd, --slots is not an option of dp-swap plans"):
        PlanChoice(packs_bwd=2, slots=1, u_fwd=1).fixed_for(Policy.DP_SWAP)
    with pytest.raises(PlanError, match="--residency is not an option of harmony-pp plans"):
        PlanChoice(residency=Residency.LRU).fixed_for(Policy.HARMONY_PP)
    with pytest.raises(PlanError, match="--reduce is not an option of harmony-pp plans"):
        PlanChoice(reduce=Reduce.HOST).fixed_for(Policy.HARMONY_PP)
    with pytest.raises(PlanError, match="--slots is not an option of harmony-dp plans"):
        PlanChoice(slots=1).fixed_for(Policy.HARMONY_DP)
    assert PlanChoice(u_fwd=1, update=UpdateOn.GPU).fixed_for(Policy.HARMONY_DP) == {"u_fwd": 1, "update": UpdateOn.GPU}
