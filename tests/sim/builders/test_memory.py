"""Arena placement, and the frees that allocations rely on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.builders.draft import Draft, assign_lifetimes
from sim.builders.memory import ALIGNMENT, Arena, Placement, count_host, count_pages, place
from sim.errors import DoesNotFit
from sim.schedule import Lane, TaskKind, TensorKind

UNIT = ALIGNMENT


def test_the_lowest_hole_that_fits_is_taken():
    arena = Arena(10 * UNIT)
    assert arena.allocate(2 * UNIT) == (0, [])
    assert arena.allocate(3 * UNIT) == (2 * UNIT, [])
    assert arena.allocate(1 * UNIT) == (5 * UNIT, [])
    arena.free(2 * UNIT, 3 * UNIT, freer=7)
    arena.free(0, 2 * UNIT, freer=4)
    assert arena.allocate(3 * UNIT) == (0, [4, 7])


def test_from_the_top_the_highest_hole_that_fits_is_taken():
    arena = Arena(10 * UNIT)
    assert arena.allocate(2 * UNIT, at_top=True) == (8 * UNIT, [])
    assert arena.allocate(UNIT, at_top=True) == (7 * UNIT, [])
    arena.free(8 * UNIT, 2 * UNIT, freer=3)
    assert arena.allocate(UNIT, at_top=True) == (9 * UNIT, [3])
    assert arena.allocate(7 * UNIT) == (0, [])
    assert arena.allocate(2 * UNIT) is None


def test_an_allocation_waits_only_for_the_frees_it_lies_on():
    arena = Arena(4 * UNIT)
    for offset in range(4):
        assert arena.allocate(UNIT) == (offset * UNIT, [])
    for offset in range(4):
        arena.free(offset * UNIT, UNIT, freer=10 + offset)
    assert arena.allocate(UNIT) == (0, [10])
    assert arena.allocate(2 * UNIT) == (UNIT, [11, 12])


def test_a_hole_freed_just_now_is_taken_only_if_nothing_else_fits():
    arena = Arena(3 * UNIT)
    arena.allocate(UNIT)
    arena.free(0, UNIT, freer=5)
    assert arena.allocate(UNIT, avoid_from=5) == (UNIT, [])
    assert arena.allocate(UNIT, avoid_from=5) == (2 * UNIT, [])
    assert arena.allocate(UNIT, avoid_from=5) == (0, [5])
    assert arena.allocate(UNIT, avoid_from=5) is None


@given(st.lists(st.integers(1, 5 * UNIT), max_size=40), st.data())
def test_live_allocations_never_overlap_and_stay_inside(sizes, data):
    arena = Arena(16 * UNIT)
    live: dict[int, tuple[int, int]] = {}
    freed: dict[int, int] = {}
    for index, size in enumerate(sizes):
        found = arena.allocate(size, at_top=data.draw(st.booleans()))
        if found is not None:
            offset, freers = found
            assert offset >= 0
            assert offset + size <= 16 * UNIT
            assert all(offset + size <= a or b <= offset for a, b in live.values())
            # It waits for whoever last freed each address it covers.
            for at, owner in freed.items():
                if offset <= at < offset + size:
                    assert owner in freers
            live[index] = (offset, offset + size)
        elif live:
            gone = data.draw(st.sampled_from(sorted(live)))
            start, stop = live.pop(gone)
            arena.free(start, stop - start, freer=index)
            for at in range(start, stop, UNIT):
                freed[at] = index


def loads(sizes: list[int], gpu: int = 0) -> Draft:
    """A draft that brings in one weight after another; each is used by the compute task that follows it."""
    draft = Draft()
    for size in sizes:
        buffer = draft.buffer(gpu, TensorKind.WEIGHT, (0, 0), size)
        draft.add(TaskKind.SWAP_IN, (gpu, Lane.SWAP_IN), (0, 0), writes=[buffer], group=3)
        draft.add(TaskKind.FORWARD, (gpu, Lane.COMPUTE), (0, 0), reads=[buffer])
    assign_lifetimes(draft)
    return draft


def test_the_second_weight_waits_for_the_first_ones_last_user_when_they_share_a_place():
    draft = loads([UNIT, UNIT])
    placed = place(draft, [UNIT])
    assert placed == Placement([0, 0], (UNIT,), ())
    assert 1 in draft.entries[2].after


def test_what_does_not_fit_is_refused_with_layer_bytes_and_cap():
    draft = loads([UNIT, 3 * UNIT])
    placed = place(draft, [2 * UNIT])
    assert placed.offsets == [0, None]
    (refusal,) = placed.refusals
    assert (refusal.gpu, refusal.layers, refusal.cap, refusal.group) == (0, (0, 0), 2 * UNIT, 3)
    assert str(3 * UNIT) in str(refusal)


def test_counted_allocations_wait_for_every_earlier_free_and_respect_the_cap():
    draft = loads([5, 7, 6])
    assert count_pages(draft, [7]) == (7,)
    assert 1 in draft.entries[2].after
    assert 3 in draft.entries[4].after
    with pytest.raises(DoesNotFit):
        count_pages(loads([8]), [7])


def host_moves(*moves: tuple[str, int]) -> Draft:
    """``("out", buffer)`` writes a host buffer of 10 bytes from GPU 0, ``("in", buffer)`` reads it last."""
    draft = Draft()
    ids: dict[int, int] = {}
    for what, name in moves:
        if what == "out":
            ids[name] = draft.buffer(None, TensorKind.STASH, (name, name), 10)
            draft.add(TaskKind.SWAP_OUT, (0, Lane.SWAP_OUT), (name, name), writes=[ids[name]])
        else:
            draft.add(TaskKind.SWAP_IN, (0, Lane.SWAP_IN), (name, name), reads=[ids[name]])
    assign_lifetimes(draft)
    return draft


def test_host_allocations_wait_for_just_enough_frees_to_keep_the_peak():
    draft = host_moves(("out", 0), ("out", 1), ("in", 0), ("out", 2), ("in", 1), ("in", 2), ("out", 3), ("in", 3))
    assert count_host(draft, gpus=1) == 20
    assert draft.entries[3].after >= {2}  # 20 bytes are held: the third needs the first one's free
    assert 4 in draft.entries[6].after  # the fourth needs one more, not the one after
    assert 5 not in draft.entries[6].after


def test_tensors_between_layers_lie_right_above_what_all_else_reaches():
    draft = Draft()
    weight = draft.buffer(0, TensorKind.WEIGHT, (0, 0), 3 * UNIT)
    space = draft.buffer(0, TensorKind.WORKSPACE, (0, 0), 2 * UNIT)
    small = draft.buffer(0, TensorKind.ACTIVATION, (0, 0), 5)
    draft.add(TaskKind.SWAP_IN, (0, Lane.SWAP_IN), (0, 0), writes=[weight])
    draft.add(TaskKind.FORWARD, (0, Lane.COMPUTE), (0, 0), reads=[weight], writes=[space, small])
    assign_lifetimes(draft)
    placed = place(draft, [100 * UNIT])
    assert placed == Placement([0, 3 * UNIT, 5 * UNIT], (6 * UNIT,), ())
