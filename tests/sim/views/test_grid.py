"""The printed schedule, word for word."""

from __future__ import annotations

from textwrap import dedent

import pytest

from sim.errors import ScheduleError
from sim.schedule import TaskKind, TensorKind
from sim.views.grid import LEGEND, grid
from tests.sim.handmade import Hand, one_gpu_schedule, plan


def expected(text: str) -> str:
    return dedent(text).strip("\n") + f"\n\n{LEGEND}\n"


def test_one_gpu() -> None:
    assert grid(one_gpu_schedule()) == expected(
        """
        slot           0  1    2    3    4    5    6    7    8    9    10   11   12   13   14  15
        gpu 0 compute  .  .    F0.0 F0.1 .    .    B1.0 .    B1.1 .    .    B0.0 .    B0.1 .   .
              swap in  w0 d0.0 d0.1 w1   x1.0 d2.0 x1.1 d2.1 w0   d0.0 g1.0 d0.1 g1.1 .    .   .
              swap out .  .    .    x1.0 x1.1 .    .    g1.0 .    g1.1 dw1  .    .    .    dw0 .
        host  update   .  .    .    .    .    .    .    .    .    .    .    U1   .    .    .   U0
        """
    )


def test_a_pipeline_over_two_gpus() -> None:
    """Two packs, two microbatches: the second GPU starts when the first microbatch has come over."""
    hand = Hand(plan(gpus=2))
    weight, activation = TensorKind.WEIGHT, TensorKind.ACTIVATION
    loads = [hand.task(TaskKind.SWAP_IN, (2 * g, 2 * g + 1), gpu=g, tensor_kind=weight) for g in (0, 1)]
    for m in (0, 1):
        made = hand.task(TaskKind.FORWARD, (0, 1), microbatch=m, waits_for=(loads[0],))
        sent = hand.task(TaskKind.P2P, 2, peer=1, microbatch=m, tensor_kind=activation, waits_for=(made,))
        hand.task(TaskKind.BACKWARD, (2, 3), gpu=1, microbatch=m, waits_for=(loads[1], sent))
    assert grid(hand.schedule()) == expected(
        """
        slot          0    1      2      3      4
        gpu 0 compute .    F0-1.0 F0-1.1 .      .
              swap in w0-1 .      .      .      .
              p2p out .    .      x2.0>1 x2.1>1 .
        gpu 1 compute .    .      .      B2-3.0 B2-3.1
              swap in w2-3 .      .      .      .
              p2p in  .    .      x2.0<0 x2.1<0 .
        """
    )


def test_all_kinds_of_tasks() -> None:
    hand = Hand(plan(gpus=2))
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.OPTIMIZER_STATE)
    hand.task(TaskKind.UPDATE, (0, 1), waits_for=(0,))
    hand.task(TaskKind.SWAP_IN, gpu=1, tensor_kind=TensorKind.BUFFER)
    hand.task(TaskKind.ALLREDUCE, (0, 1), gpu=None, tensor_kind=TensorKind.GRADIENT, waits_for=(1, 2))
    hand.task(TaskKind.REDUCE, 1, gpu=None, tensor_kind=TensorKind.GRADIENT, waits_for=(3,))
    assert grid(hand.schedule()) == expected(
        """
        slot             0  1    2    3
        gpu 0 compute    .  U0-1 .    .
              swap in    k0 .    .    .
        gpu 1 swap in    b0 .    .    .
        host  update     .  .    .    R1
        all   collective .  .    A0-1 .
        """
    )


def test_long_schedules_wrap_and_are_cut() -> None:
    assert grid(one_gpu_schedule(), width=40, max_slots=9) == expected(
        """
        slot           0  1    2    3    4
        gpu 0 compute  .  .    F0.0 F0.1 .
              swap in  w0 d0.0 d0.1 w1   x1.0
              swap out .  .    .    x1.0 x1.1
        host  update   .  .    .    .    .

        slot           5    6    7    8
        gpu 0 compute  .    B1.0 .    B1.1
              swap in  d2.0 x1.1 d2.1 w0
              swap out .    .    g1.0 .
        host  update   .    .    .    .

        … and 7 more slots of 16; ask for more with max_slots=16
        """
    )


@pytest.mark.parametrize(("width", "columns"), [(41, 5), (42, 6)])
def test_a_block_is_as_wide_as_fits(width: int, columns: int) -> None:
    """Fourteen characters of names; then a column of two and others of four, each after a blank."""
    header = grid(one_gpu_schedule(), width=width).splitlines()[0]
    assert header.split() == ["slot", *map(str, range(columns))]


def test_a_narrow_page_still_shows_a_column_a_block() -> None:
    assert grid(one_gpu_schedule(), width=1, max_slots=3).count("slot  ") == 3


def test_an_empty_schedule() -> None:
    assert grid(Hand().schedule()) == f"slot\n\n{LEGEND}\n"


def test_a_dependency_on_a_later_task_has_no_place() -> None:
    hand = Hand()
    hand.task(TaskKind.FORWARD, samples=(0, 1), waits_for=(1,))
    hand.task(TaskKind.SWAP_IN, tensor_kind=TensorKind.WEIGHT)
    with pytest.raises(ScheduleError, match="comes later"):
        grid(hand.schedule())
