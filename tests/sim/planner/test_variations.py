"""Which plans a search tries beside the best ones that it enumerates."""

from __future__ import annotations

from msgspec.structs import replace

from sim.hardware.files import load_machine
from sim.plan import PagedPlan, Policy, StashPlace, UpdateOn
from sim.planner.space import Space
from sim.planner.variations import variations
from tests.sim.handmade import plan
from traces.costs import Costs
from traces.synthetic import uniform_trace

COSTS = Costs(uniform_trace(2))
TWO_SWITCHES = load_machine("8x1080ti-2switch")
CROSSING = (0, 4, 1, 5, 2, 6, 3, 7)
PLAN = plan(gpus=8, minibatch=8, policy=Policy.HARMONY_PP)


def varied(
    of: object, field: str, machine: object = TWO_SWITCHES, *, space: Space | None = None, costs: Costs = COSTS
) -> list[object]:
    """The other values that variations give to a field."""
    found = [getattr(each, field) for each in variations(of, costs, machine, space or Space())]
    return [value for value in found if value != getattr(of, field)]


def test_each_differs_in_one_field() -> None:
    for each in variations(PLAN, COSTS, TWO_SWITCHES, Space()):
        assert sum(getattr(each, name) != getattr(PLAN, name) for name in PLAN.__struct_fields__) == 1


def test_gpus_take_turns_across_switches_or_in_ascending_order() -> None:
    assert varied(PLAN, "gpu_order") == [CROSSING]
    assert varied(replace(PLAN, gpu_order=CROSSING), "gpu_order") == [None]
    assert varied(plan(gpus=4, minibatch=8), "gpu_order", load_machine("4x1080ti")) == []


def test_backwards_are_split_where_another_pack_waits_for_one_with_weights() -> None:
    split = replace(PLAN, gpus=2, packs_fwd=((0, 0), (1, 1)), packs_bwd=((0, 0), (1, 1), (2, 2)), minibatch=6)
    assert varied(split, "split_backward", load_machine("4x1080ti"), costs=Costs(uniform_trace(3))) == [1, 2, 4, 6]
    assert varied(PLAN, "split_backward") == []  # its second pack is the loss


def test_steps_overlap_or_do_not() -> None:
    assert varied(PLAN, "overlap_steps") == [True]
    assert varied(replace(PLAN, overlap_steps=True), "overlap_steps") == [False]
    assert varied(PLAN, "overlap_steps", space=Space(overlap_steps=(False,))) == []


def test_weights_and_state_of_no_packs_of_all_or_of_the_last_stay() -> None:
    of = replace(PLAN, packs_fwd=((0, 2),), packs_bwd=((0, 0), (1, 1), (2, 2), (3, 3)))
    costs = Costs(uniform_trace(4))
    assert varied(of, "resident_weights", costs=costs) == [(0, 1, 2, 3), (2, 3), (3,)]
    assert varied(of, "resident_state", costs=costs) == []
    on_gpu = replace(of, update=UpdateOn.GPU, resident_state=(3,))
    assert varied(on_gpu, "resident_state", costs=costs) == [(), (0, 1, 2, 3), (2, 3)]


def test_what_the_space_fixes_stays() -> None:
    assert varied(PLAN, "gpu_order", space=Space(gpu_order=(None,))) == []


def test_baselines_do_not_vary() -> None:
    paged = PagedPlan(policy=Policy.DP_SWAP, minibatch=8, gpus=8, u_fwd=1, u_bwd=1)
    assert list(variations(paged, COSTS, TWO_SWITCHES, Space())) == []


def test_stashes_wait_in_one_place_or_the_last_packs_keep_theirs() -> None:
    of = replace(PLAN, packs_fwd=((0, 4),), packs_bwd=((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 6)))
    costs = Costs(uniform_trace(7))
    keep, swap, recompute = StashPlace.KEEP, StashPlace.SWAP, StashPlace.RECOMPUTE
    partly = [(swap, swap, keep, keep), (swap, swap, swap, keep)]
    assert varied(of, "stash", costs=costs) == [keep, recompute, *partly]
    assert varied(of, "stash", costs=costs, space=Space(stash=(swap,))) == []
    assert keep not in varied(replace(of, u_fwd=of.u_bwd + 1), "stash", costs=costs)
    assert varied(PLAN, "stash") == []
