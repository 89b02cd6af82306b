"""Schedules without recompute: what autograd saved leaves the GPU and comes back, and the results stay the same."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from executor.errors import DifferentModel, ModelError
from executor.measuring.profile import profile
from executor.models.workloads import Workload
from executor.running.recording import Recording, Region, SavedTensors
from executor.running.run import run
from sim.builders import build
from sim.plan import PagedPlan, Policy, Residency, Writeback
from sim.schedule import Schedule
from sim.validation.validate import validate
from tests.executor import made
from tests.executor.trained import (
    SEED,
    Make,
    Trained,
    adam,
    chain,
    cut_of,
    differences,
    gpt2,
    gradient_step,
    moved_in,
    normalised_chain,
    paged,
    plainly,
    tied_chain,
    train_in_pieces,
)
from tests.sim.closed_forms import moved
from traces.schema import Trace

BASELINES = [Policy.DP_SWAP, Policy.GPIPE_SWAP, Policy.ONE_F_ONE_B_SWAP]
FROZEN = partial(chain, frozen=True)
UNRECOMPUTED = partial(paged, recompute=False)


def trace_of(workload: Workload, optimizer: Any) -> Trace:
    return profile(workload, microbatches=(2, 3, 4), optimizer=optimizer, repeats=1, warmups=0, budget_s=0.1)


def train(make: Make, plan: PagedPlan, steps: int = 1, optimizer: Any = gradient_step) -> tuple[Trained, Schedule]:
    """On memory that just suffices, with autograd's memory checked in every step."""
    workload = make()
    machine = made.machine(plan.gpus)
    trace = trace_of(workload, optimizer)
    schedule = build(plan, trace, machine)
    assert not validate(schedule, trace)
    result = run(schedule, workload, machine, steps=1, warmup_steps=steps, optimizer=optimizer, seed=SEED)
    assert moved_in(result.timeline) == moved(schedule)
    return Trained(result.losses, copy.deepcopy(workload.model.state_dict())), schedule


@pytest.mark.parametrize(
    "make", [chain, partial(chain, frozen=True), tied_chain, gpt2], ids=["chain", "frozen", "tied", "gpt2"]
)
@pytest.mark.parametrize("policy", BASELINES)
@pytest.mark.parametrize("gpus", [1, 2])
def test_training_is_that_of_plain_pytorch(make: Make, policy: Policy, gpus: int) -> None:
    trained, _ = train(make, UNRECOMPUTED(policy, gpus, 2 if gpus == 1 else 4), optimizer=adam)
    assert differences(trained, plainly(make, 2, adam)) == {}


@pytest.mark.parametrize("policy", BASELINES)
@pytest.mark.parametrize(
    ("residency", "writeback", "depth"),
    [(Residency.NONE, Writeback.ALWAYS, 0), (Residency.NEXT, Writeback.DROP, 0), (Residency.NONE, Writeback.DROP, 2)],
)
def test_what_was_saved_may_leave_and_come_back(
    policy: Policy, residency: Residency, writeback: Writeback, depth: int
) -> None:
    plan = UNRECOMPUTED(policy, 2, 2, residency=residency, writeback=writeback, prefetch_depth=depth)
    trained, schedule = train(chain, plan)
    assert any(task.is_saved for task in schedule.tasks if task.kind.is_copy)
    assert differences(trained, plainly(chain, 2)) == {}


@pytest.mark.parametrize("make", [normalised_chain, partial(gpt2, dropout=0.3)], ids=["norm", "dropout"])
@pytest.mark.parametrize("policy", BASELINES)
def test_statistics_and_masks_are_those_of_one_forward(make: Make, policy: Policy) -> None:
    plan = UNRECOMPUTED(policy, 2, 2, residency=Residency.NONE)
    trained, _ = train(make, plan)
    assert differences(trained, train_in_pieces(make(), cut_of(plan), 2)) == {}


class TestSavedTensors:
    @given(data=st.data())
    def test_take_no_more_room_than_they_have_bytes(self, data: st.DataObject) -> None:
        dtypes = [torch.float64, torch.bool] if data.draw(st.booleans()) else [torch.float32, torch.uint8, torch.int64]
        kept = [
            torch.randint(2, (data.draw(st.integers(1, 9)),)).to(data.draw(st.sampled_from(dtypes)))
            for _ in range(data.draw(st.integers(1, 6)))
        ]
        room = torch.zeros(sum(tensor.nbytes for tensor in kept), dtype=torch.uint8)
        saved = SavedTensors({Region.SAVED: room})
        places = [saved._pack(tensor) for tensor in kept]
        moved_to = room.clone()
        room.fill_(255)
        saved.memory = {Region.SAVED: moved_to}
        assert all(torch.equal(saved._unpack(place), tensor) for place, tensor in zip(places, kept, strict=True))

    def test_that_share_memory_are_kept_once(self) -> None:
        whole = torch.arange(12.0).reshape(3, 4)
        saved = SavedTensors({Region.SAVED: torch.zeros(whole.nbytes, dtype=torch.uint8)})
        views = [whole, whole.t(), whole[1:, ::2], whole[:1].expand(5, 4)]
        for view, place in [(view, saved._pack(view)) for view in views]:
            assert torch.equal(saved._unpack(place), view)

    def test_that_have_no_room_are_refused_with_what_to_do(self) -> None:
        saved = SavedTensors({Region.SAVED: torch.zeros(8, dtype=torch.uint8)})
        with pytest.raises(DifferentModel, match=r"more than the 8 B .* profile this model"):
            saved._pack(torch.zeros(3))


class _Hoarder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_functions_that_hide_tensors_from_autograd_are_refused() -> None:
    x = torch.ones(3, requires_grad=True)
    saved = SavedTensors({})
    output: Tensor = _Hoarder.apply(x)  # type: ignore[no-untyped-call]
    with pytest.raises(ModelError, match=r"_Hoarder.* keeps a tensor .*save_for_backward"):
        Recording(saved, [x], [output], {}).check()


def test_a_trace_says_which_layers_need_their_own_output() -> None:
    layers = nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.ReLU(inplace=True), nn.Flatten(), nn.Softmax(dim=1)
    workload = Workload("mixed", nn.Sequential(*layers).double(), nn.functional.cross_entropy, made.vectors())
    trace = trace_of(workload, gradient_step)
    assert [layer.saves_output for layer in trace.layers] == [False, True, False, True, False, True, False]


class TestWhatStays:
    def test_what_no_task_moves_is_not_copied(self) -> None:
        x = torch.randn(3, 4, requires_grad=True)
        saved = SavedTensors({}, kept_bytes=3 * 4 * 4)
        with saved.hooks():
            y = x.detach().exp().requires_grad_().exp()
        assert [node.data_ptr() for node in [y.grad_fn._saved_result]] == [y.data_ptr()]

    def test_more_than_is_reserved_is_an_error(self) -> None:
        saved = SavedTensors({}, kept_bytes=3 * 4 * 4 - 1)
        with saved.hooks(), pytest.raises(DifferentModel, match="more than the 47 B"):
            torch.randn(3, 4, requires_grad=True).exp()

    def test_a_change_in_place_is_noticed(self) -> None:
        saved = SavedTensors({}, kept_bytes=1000)
        with saved.hooks():
            y = torch.randn(3, 4, requires_grad=True).exp()
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(ModelError, match=r"shape \[3, 4\] in place"):
            y.sum().backward()
