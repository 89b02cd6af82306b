from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from executor.errors import OutOfArena
from executor.running.arena import Arena
from sim.schedule import Buffer, TensorKind


def buffer(number: int, size: int, offset: int | None, kind: TensorKind = TensorKind.WEIGHT, gpu: int = 0) -> Buffer:
    return Buffer(id=number, gpu=gpu, kind=kind, layer_first=2, layer_last=3, bytes=size, offset=offset)


def take(size: int) -> Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def test_placed_buffers_lie_where_the_schedule_puts_them() -> None:
    first, second = buffer(0, 10, 0), buffer(1, 6, 16)
    arena = Arena(0, [first, second, buffer(2, 50, 40, gpu=1)], 100, take)
    assert arena.allocate(first) == 10
    assert arena.allocate(second) == 6
    a, b = arena.block(first).bytes, arena.block(second).bytes
    assert (len(a), len(b)) == (10, 6)
    assert b.data_ptr() - a.data_ptr() == 16


def test_a_placed_buffer_finds_its_memory_and_views_again() -> None:
    only = buffer(0, 10, 0)
    arena = Arena(0, [only], 100, take)
    arena.allocate(only)
    arena.block(only).views["what"] = "kept"
    assert arena.free(only) == 10
    arena.allocate(only)
    assert arena.block(only).views == {"what": "kept"}


def test_counted_buffers_are_separate_and_new_each_time() -> None:
    first, second = buffer(0, 10, None), buffer(1, 10, None)
    arena = Arena(0, [first, second], 20, take)
    arena.allocate(first)
    arena.allocate(second)
    block = arena.block(first)
    assert block.bytes.untyped_storage().data_ptr() != arena.block(second).bytes.untyped_storage().data_ptr()
    arena.free(first)
    arena.allocate(first)
    assert arena.block(first) is not block


def test_a_placed_buffer_past_the_cap_is_refused_before_anything_runs() -> None:
    with pytest.raises(OutOfArena) as refusal:
        Arena(0, [buffer(0, 10, 91)], 100, take)
    assert str(refusal.value) == (
        "GPU 0 has no room for buffer 0 (weight of 2-3), 10 B (10 B): it would end at 101; the cap is 100 B (100 B). "
        "Build the schedule for this machine's memory"
    )


def test_counted_buffers_past_the_cap_are_refused() -> None:
    first, second = buffer(0, 60, None), buffer(1, 41, None)
    arena = Arena(0, [first, second], 100, take)
    arena.allocate(first)
    with pytest.raises(OutOfArena, match=r"41 B.*60 B are held; the cap is 100 B"):
        arena.allocate(second)
    arena.free(first)
    arena.allocate(second)


@pytest.mark.parametrize("offset", [0, 5, 9, 15, 19])
def test_buffers_must_not_overlap(offset: int) -> None:
    there, other = buffer(0, 10, 10), buffer(1, 5 if offset < 10 else 10, offset)
    arena = Arena(0, [there, other], 100, take)
    arena.allocate(there)
    if offset + other.bytes <= 10:
        arena.allocate(other)
        return
    with pytest.raises(OutOfArena, match="buffer 0 lies at 10-20, this one would at"):
        arena.allocate(other)


def test_a_workspace_takes_its_place_but_no_memory() -> None:
    space, other = buffer(0, 60, 0, TensorKind.WORKSPACE), buffer(1, 10, 30)
    taken = []

    def count(size: int) -> Tensor:
        taken.append(size)
        return take(size)

    arena = Arena(0, [space, other], 100, count, {space.id})
    assert taken == [40]
    arena.allocate(space)
    with pytest.raises(OutOfArena, match="buffer 0 lies at 0-60"):
        arena.allocate(other)
    arena.free(space)
    arena.allocate(other)


def test_nothing_is_used_that_is_not_held() -> None:
    only = buffer(0, 10, 0)
    arena = Arena(0, [only], 100, take)
    with pytest.raises(OutOfArena, match="a task uses it while it is not held"):
        arena.block(only)
    with pytest.raises(OutOfArena, match="it is freed but not held"):
        arena.free(only)
    arena.allocate(only)
    with pytest.raises(OutOfArena, match="it is allocated already"):
        arena.allocate(only)
    arena.clear()
    arena.allocate(only)


def test_residents_are_held_from_the_start_and_for_good() -> None:
    resident, other = replace(buffer(0, 10, 0), resident=True), buffer(1, 10, 5)
    arena = Arena(0, [resident, other], 100, take)
    memory = arena.block(resident).bytes
    assert arena.held() == []
    with pytest.raises(OutOfArena, match="buffer 0 lies at 0-10"):
        arena.allocate(other)
    arena.clear()
    assert arena.block(resident).bytes is memory
