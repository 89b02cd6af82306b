"""Vector clocks against reachability in the graph of predecessors."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.builders import build
from sim.schedule import Schedule, TaskKind, TensorKind
from sim.validation.happens_before import HappensBefore
from tests.random_plans import random_case
from tests.sim.handmade import Hand, plan


def agrees_with_reachability(schedule: Schedule) -> bool:
    graph = nx.DiGraph((before, task.id) for task in schedule.tasks for before in schedule.predecessors[task.id])
    graph.add_nodes_from(range(len(schedule.tasks)))
    surely = HappensBefore(schedule)
    everyone = range(len(schedule.tasks))
    return all(
        surely(first, then) == (then in after) for first in everyone for after in [nx.descendants(graph, first)]
        for then in everyone
    )  # fmt: skip


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    hand = Hand(plan(gpus=3, minibatch=3))
    for number in range(draw(st.integers(1, 20))):
        waits = tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=2)))) if number else ()
        gpu = draw(st.integers(0, 2))
        if draw(st.booleans()):
            peer = (gpu + draw(st.integers(1, 2))) % 3
            hand.task(TaskKind.P2P, gpu=gpu, peer=peer, tensor_kind=TensorKind.ACTIVATION, waits_for=waits)
        else:
            hand.task(TaskKind.FORWARD, gpu=gpu, samples=(0, 1), waits_for=waits)
    return hand.schedule()


@given(schedules())
@settings(max_examples=80, deadline=None)
def test_random_schedules(schedule: Schedule) -> None:
    assert agrees_with_reachability(schedule)


@pytest.mark.parametrize("seed", [1, 4])
def test_built_schedules(seed: int) -> None:
    case = random_case(seed, layers=4)
    assert agrees_with_reachability(build(case.plan, case.trace, case.machine))


def test_the_drawing_in_the_docstring() -> None:
    """A0 → A1 on one lane, B0 → B1 on another; B1 waits for A1."""
    hand = Hand(plan(gpus=2))
    for gpu, waits in ((0, ()), (0, ()), (1, ()), (1, (1,))):
        hand.task(TaskKind.FORWARD, gpu=gpu, samples=(0, 1), waits_for=waits)
    surely = HappensBefore(hand.schedule())
    assert surely.ended(3) == [2, 1]
    assert [surely(task, 3) for task in range(4)] == [True, True, True, False]
    assert not surely(0, 2)
    assert surely.place(1) == (0, 2)
