from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from executor.devices.emulated import EmulatedDevices
from executor.errors import NeverFreed, TaskFailed
from executor.models.workloads import Workload
from executor.running.session import Session
from sim.builders import build
from sim.plan import HarmonyPlan, Plan, Policy, Reduce, Residency, StashPlace, UpdateOn
from sim.schedule import Schedule
from tests.executor import made
from tests.executor.trained import (
    MINIBATCH,
    SEED,
    Make,
    adam,
    chain,
    dp_swap,
    harmony,
    name_of,
    tied_chain,
    trace_of,
    train_plainly,
)

PACKS = ((0, 1), (2, 4)), ((0, 2), (3, 4), (5, 7))
HARMONY_PLANS = [
    harmony(Policy.HARMONY_DP, 2, (3, 3), PACKS),
    harmony(Policy.HARMONY_DP, 2, (3, 3), PACKS, update=UpdateOn.GPU),
    harmony(Policy.HARMONY_PP, 2, (4, 2), PACKS, update=UpdateOn.GPU),
]
EACH_UPDATE = pytest.mark.parametrize("plan", [*HARMONY_PLANS, dp_swap(2, 3, residency=Residency.NONE)], ids=name_of)


def start(
    workload: Workload,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    changed: Callable[[Schedule], Schedule] = lambda schedule: schedule,
    state_tensors: int = 2,
) -> Session:
    machine = made.machine(plan.gpus)
    schedule = changed(build(plan, trace_of(workload, state_tensors=state_tensors), machine))
    devices = EmulatedDevices(machine)
    return Session(schedule, workload.layers(), optimizer, devices, seed=SEED)


def plain_step(workload: Workload, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs, labels = workload.batch(MINIBATCH, SEED + number)
    optimizer.zero_grad()
    loss: Any = workload.loss_fn(workload.model(inputs), labels)
    loss.backward()
    optimizer.step()


def assert_close(found: Any, expected: Any) -> None:
    """Dictionaries of dictionaries of tensors and numbers, alike to 1e-10."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_close(found[key], expected[key])
    elif isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    else:
        assert found == expected


@EACH_UPDATE
def test_goes_on_from_an_optimizer_with_a_past_and_leaves_it_current(plan: Plan) -> None:
    """Its state comes along, and can be saved, or used by plain PyTorch, after any step."""
    workload, reference = chain(), chain()
    optimizer, expected = adam(workload.model.parameters()), adam(reference.model.parameters())
    for number in range(4):
        plain_step(reference, expected, number)
    plain_step(workload, optimizer, 0)
    session = start(workload, plan, optimizer)
    for number in (1, 2):
        session.step(*workload.batch(MINIBATCH, SEED + number))
    plain_step(workload, optimizer, 3)
    assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))
    assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"])


@EACH_UPDATE
def test_a_step_that_failed_can_be_tried_again(plan: Plan) -> None:
    """In its forward, that is: later, weights may have been updated already."""
    faults: list[str] = []

    class FailsOnce(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if faults:
                raise OSError(faults.pop())
            return x.tanh()

    workload = chain()
    workload.model[2] = FailsOnce()
    session = start(workload, plan, adam(workload.model.parameters()))
    batch = workload.batch(MINIBATCH, SEED)
    faults.append("once")
    with pytest.raises(TaskFailed, match="OSError: once"):
        session.step(*batch)
    loss = session.step(*batch).loss
    expected = train_plainly(chain(), optimizer=adam)
    assert loss == pytest.approx(expected.losses[0], abs=1e-10)
    assert_close(dict(workload.model.state_dict()), dict(expected.tensors))


@pytest.mark.parametrize("in_host", [False, True])
def test_a_step_that_leaves_a_buffer_behind_is_an_error_that_names_it(in_host: bool) -> None:
    """The schedule forgets to free the last buffer of a GPU, or of the host."""
    workload = chain()
    forgotten: list[str] = []

    def forgetful(schedule: Schedule) -> Schedule:
        freed = [(task, schedule.buffers[number]) for task in schedule.tasks for number in task.frees]
        task, buffer = [item for item in freed if (item[1].gpu is None) is in_host][-1]
        forgotten.append(str(buffer))
        changed = replace(task, frees=tuple(number for number in task.frees if number != buffer.id))
        return replace(schedule, tasks=(*schedule.tasks[: task.id], changed, *schedule.tasks[task.id + 1 :]))

    plan = harmony(Policy.HARMONY_DP, 2, (3, 3), PACKS)
    session = start(workload, plan, adam(workload.model.parameters()), forgetful)
    for _ in range(2):  # also the second time: nothing of the first is left
        with pytest.raises(NeverFreed) as caught:
            session.step(*workload.batch(MINIBATCH, SEED))
        assert caught.value.buffers == tuple(forgotten)
        assert f"never freed {forgotten[0]}; " in str(caught.value)


def test_learning_rates_may_change_between_steps() -> None:
    workload, reference = chain(), chain()
    optimizer, expected = adam(workload.model.parameters()), adam(reference.model.parameters())
    session = start(workload, dp_swap(2, 3), optimizer)
    for number in range(3):
        for each in (optimizer, expected):
            each.param_groups[0]["lr"] = 0.1 / (number + 1)
        session.step(*workload.batch(MINIBATCH, SEED + number))
        plain_step(reference, expected, number)
    assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))


def batches(workload: Workload, steps: int) -> list[tuple[Tensor, Tensor]]:
    return [workload.batch(MINIBATCH, SEED + number) for number in range(steps)]


STAGES = ((0, 0), (1, 2), (3, 3), (4, 4)), ((0, 0), (1, 2), (3, 3), (4, 4), (5, 7))
OVERLAPPING = [
    *(
        harmony(policy, 2, sizes, PACKS, update=update, overlap_steps=True)
        for policy in (Policy.HARMONY_DP, Policy.HARMONY_PP)
        for update in UpdateOn
        for sizes in ((3, 3), (4, 2))
    ),
    harmony(Policy.HARMONY_DP, 3, (2, 2), PACKS, reduce=Reduce.HOST, overlap_steps=True),
    harmony(Policy.HARMONY_PP, 3, (2, 2), STAGES, slots=1, gpu_order=(0, 2, 1), overlap_steps=True),
    harmony(Policy.HARMONY_PP, 3, (2, 2), STAGES, stash=StashPlace.KEEP, update=UpdateOn.GPU, overlap_steps=True),
]


@pytest.mark.parametrize("make", [chain, tied_chain], ids=["chain", "tied"])
@pytest.mark.parametrize("plan", OVERLAPPING, ids=name_of)
def test_steps_that_overlap_train_as_plain_pytorch_does(make: Make, plan: Plan) -> None:
    """A step alone, and then three without a barrier between them."""
    workload = make()
    last = len(workload.layers()) - 1
    if make is tied_chain:
        plan = replace(plan, packs_fwd=((0, 0), (1, 1)), packs_bwd=((0, 0), (1, 1), (2, last)), stash=StashPlace.SWAP)
    expected = train_plainly(workload, 4, optimizer=adam)
    session = start(workload, plan, adam(workload.model.parameters()))
    first, *others = batches(workload, 4)
    alone = session.step(*first)
    together = session.overlapping_steps(others)
    losses = [result.loss for result in (alone, *together)]
    assert losses == pytest.approx(expected.losses, abs=1e-10)
    assert_close(workload.model.state_dict(), expected.tensors)
    ids = range(len(session.schedule.tasks))
    for before, after in pairwise(together):
        assert max(before.times.end_ns) <= max(after.times.end_ns)
        assert after.times.copied_bytes == before.times.copied_bytes == alone.times.copied_bytes
        assert all(after.times.start_ns[task] >= before.times.end_ns[task] for task in ids)
    assert min(together[2].times.start_ns) >= max(together[0].times.end_ns)


@pytest.mark.parametrize("plan", HARMONY_PLANS, ids=name_of)
def test_what_stays_on_gpus_comes_home_when_asked(plan: HarmonyPlan) -> None:
    """In between, training goes on from what stays there."""
    packs = tuple(range(len(plan.packs_bwd)))
    stays = replace(plan, resident_weights=packs, resident_state=packs if plan.update is UpdateOn.GPU else ())
    workload, reference = chain(), chain()
    optimizer, expected = adam(workload.model.parameters()), adam(reference.model.parameters())
    session = start(workload, stays, optimizer)
    for number in range(3):
        session.step(*workload.batch(MINIBATCH, SEED + number))
        plain_step(reference, expected, number)
        if number != 0:
            session.write_home()
            assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))
            assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"])


def test_a_step_that_fails_leaves_what_stays_where_it_was() -> None:
    workload = chain()
    plan = harmony(Policy.HARMONY_DP, 1, (4, 4), PACKS, resident_weights=(0, 1))
    session = start(workload, plan, adam(workload.model.parameters()))
    inputs, labels = workload.batch(MINIBATCH, SEED)
    with pytest.raises(TaskFailed):
        session.step(inputs, labels + 100)
    session.step(inputs, labels)
