"""Updates at the end of the step: results are those of plain PyTorch, and bytes those of the prediction."""

from __future__ import annotations

from itertools import product

import pytest

from sim.engine.simulate import simulate
from sim.plan import Plan, Policy, Reduce, UpdateOn, UpdateWhen
from sim.schedule import TaskKind
from tests.executor.trained import (
    Make,
    adam,
    chain,
    differences,
    harmony,
    moved_in,
    name_of,
    plainly,
    sharded,
    tied_chain,
    train,
)
from tests.sim.closed_forms import moved

CHAIN = (((0, 3),), ((0, 1), (2, 3), (4, 7)))
TIED = (((0, 1),), ((0, 1), (2, 4)))


def plans(packs: tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]) -> list[Plan]:
    when = UpdateWhen.END
    return [
        *(
            harmony(policy, gpus, (3, 3), packs, update=update, update_when=when)
            for policy in (Policy.HARMONY_DP, Policy.HARMONY_PP)
            for gpus in (1, 2)
            for update in UpdateOn
        ),
        *(
            harmony(Policy.HARMONY_DP, 2, (3, 3), packs, update=update, update_when=when, reduce=reduce)
            for update, reduce in product(UpdateOn, Reduce)
        ),
        sharded(2, 3, update_when=when),
    ]


@pytest.mark.parametrize(
    ("make", "plan"),
    [
        pytest.param(make, plan, id=f"{make.__name__}-{number}-{name_of(plan)}")
        for make, packs in ((chain, CHAIN), (tied_chain, TIED))
        for number, plan in enumerate(plans(packs))
    ],
)
def test_training_is_that_of_plain_pytorch(make: Make, plan: Plan) -> None:
    ran = train(make(), plan, steps=2, optimizer=adam, state_tensors=2)
    assert differences(ran.trained, plainly(make, 2, adam)) == {}
    predicted = simulate(ran.schedule, ran.trace, ran.machine)
    assert moved_in(ran.timeline) == moved(ran.schedule) == moved_in(predicted)
    updates = [task.id for task in ran.schedule.copies(TaskKind.UPDATE)]
    (norm,) = ran.schedule.copies(TaskKind.NORM)
    last_backward = max(task.id for task in ran.schedule.copies(TaskKind.BACKWARD))
    assert last_backward < norm.id < min(updates)
