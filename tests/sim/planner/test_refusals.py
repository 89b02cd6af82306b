"""Refusals are counted by reason, with the nearest miss."""

from __future__ import annotations

from sim.errors import DoesNotFit, PlanError
from sim.plan import Policy
from sim.planner.refusals import Reason, Refusal, Refusals

DP, PP = Policy.HARMONY_DP, Policy.HARMONY_PP


def miss(needed: int, gpu: int | None = 0) -> DoesNotFit:
    return DoesNotFit(gpu, (0, 1), "weights", needed, 100)


def test_each_policy_and_reason_is_counted_and_keeps_its_nearest_miss() -> None:
    refusals = Refusals()
    far, near, equal = miss(300), miss(120), miss(120)
    for error in (far, near, equal):
        refusals.add_built(DP, error)
    host, wrong = miss(500, gpu=None), PlanError("wrong")
    refusals.add_built(DP, host)
    refusals.add_built(PP, wrong)
    refusals.add(PP, Reason.PACKS, far, 7)
    assert refusals.list() == (
        Refusal(DP, Reason.GPU, 3, near),
        Refusal(DP, Reason.HOST, 1, host),
        Refusal(PP, Reason.PLAN, 1, wrong),
        Refusal(PP, Reason.PACKS, 7, far),
    )
    assert (refusals.count(DP), refusals.count(PP), refusals.count(Policy.DP_SWAP)) == (4, 8, 0)


def test_a_plan_that_is_wrong_is_never_the_nearest_miss() -> None:
    refusals = Refusals()
    near = miss(10**12)
    refusals.add(DP, Reason.PLAN, PlanError("wrong"))
    refusals.add(DP, Reason.PLAN, near)
    refusals.add(DP, Reason.PLAN, PlanError("wrong again"))
    assert refusals.list()[0].nearest is near


def test_shown_with_bytes_where_there_are_any() -> None:
    refusal = Refusal(DP, Reason.GPU, 3, miss(120))
    assert refusal.line().startswith("harmony-dp: 3 x does not fit the GPU's memory when laid out; nearest miss: ")
    assert refusal.to_dict()["needed_bytes"] == 120
    assert refusal.to_dict()["cap_bytes"] == 100
    assert set(Refusal(DP, Reason.PLAN, 1, PlanError("wrong")).to_dict()) == {
        "policy", "reason", "count", "nearest_miss",
    }  # fmt: skip
