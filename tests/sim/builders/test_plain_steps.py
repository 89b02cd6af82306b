"""What each step of a plain schedule touches."""

from itertools import chain

import pytest

from sim.builders.baselines import plain_steps
from sim.builders.paging import Event, Home, PagedStep
from sim.plan import PagedPlan, Policy
from sim.schedule import TaskKind, TensorKind
from traces.costs import Costs
from traces.synthetic import uniform_trace, with_frozen, with_tied

LAYERS = 4
"""The last one is the loss, without weights; layer 0's input has no gradient."""

TRACE = with_tied(uniform_trace(LAYERS), (0, 2), 1000)
W, G, X, DX = TensorKind.WEIGHT, TensorKind.GRADIENT, TensorKind.STASH, TensorKind.ACTIVATION_GRADIENT
DATA, K, OUT = TensorKind.DATA, TensorKind.OPTIMIZER_STATE, TensorKind.ACTIVATION


def of_gpus(
    policy: Policy, gpus: int, *, recompute: bool = True, costs: Costs | None = None
) -> tuple[list[PagedStep], ...]:
    """Three samples in two microbatches."""
    plan = PagedPlan(policy=policy, minibatch=3, gpus=gpus, u_fwd=2, u_bwd=2, recompute=recompute)
    return tuple(plain_steps(plan, costs or Costs(TRACE)))


def steps(*, recompute: bool = True) -> list[PagedStep]:
    (only,) = of_gpus(Policy.DP_SWAP, 1, recompute=recompute)
    return only


def kinds(step: PagedStep) -> list[tuple[TensorKind, int]]:
    return [(tensor.kind, tensor.layer) for tensor in step.touches]


def find(made: list[PagedStep], kind: TaskKind, layer: int) -> list[PagedStep]:
    return [step for step in made if step.kind is kind and step.layer == layer]


def test_steps_touch_in_pin_order():
    made = steps()
    assert [kinds(step) for step in made[:8]] == [
        [(W, 0), (DATA, 0), (X, 1)],
        [(W, 1), (X, 1), (X, 2)],
        [(W, 2), (X, 2), (X, 3)],
        [(X, 3), (DATA, 4)],
        [(X, 3), (DATA, 4), (DX, 3)],
        [(W, 2), (X, 2), (G, 2), (DX, 3), (DX, 2)],
        [(W, 1), (X, 1), (G, 1), (DX, 2), (DX, 1)],
        [(W, 0), (DATA, 0), (G, 0), (DX, 1)],
    ]
    assert [kinds(step) for step in made[16:]] == [
        [(W, 0), (G, 0), (G, 2), (K, 0)],
        [(W, 1), (G, 1), (K, 1)],
        [(W, 2), (G, 2), (K, 2)],
    ]


def test_without_recompute_what_autograd_saved_lives_from_the_forward_to_the_backward():
    made = steps(recompute=False)
    assert [kinds(step) for step in made[:8]] == [
        [(W, 0), (DATA, 0), (X, 1), (X, 0)],
        [(W, 1), (X, 1), (X, 2), (X, 1)],
        [(W, 2), (X, 2), (X, 3), (X, 2)],
        [(X, 3), (DATA, 4), (X, 3)],
        [(X, 3), (DATA, 4), (X, 3), (DX, 3)],
        [(W, 2), (X, 2), (X, 2), (G, 2), (DX, 3), (DX, 2)],
        [(W, 1), (X, 1), (X, 1), (G, 1), (DX, 2), (DX, 1)],
        [(W, 0), (DATA, 0), (X, 0), (G, 0), (DX, 1)],
    ]
    for layer, saved_bytes in enumerate((4_000_000, 4_000_000, 4_000_000, 2_000_000)):  # of two samples
        (forward, _), (backward, _) = (find(made, kind, layer) for kind in (TaskKind.FORWARD, TaskKind.BACKWARD))
        (saved,) = [tensor for tensor in forward.touches if tensor.is_saved]
        assert saved.bytes == saved_bytes  # the output aside; of the loss, with it
        assert saved in forward.creates
        assert saved in backward.dies
        assert backward.recompute is False


def test_a_backward_that_does_not_recompute_needs_no_room_for_what_was_saved():
    costs = Costs(TRACE)
    for layer in range(LAYERS):
        with_room, without = (
            find(steps(recompute=each), TaskKind.BACKWARD, layer)[0].workspace_bytes for each in (True, False)
        )
        assert with_room - without == costs.remainder_bytes(layer, 2)


def test_a_gradient_is_created_by_the_first_backward_and_complete_with_the_last():
    backwards = find(steps(), TaskKind.BACKWARD, 1)
    gradient = backwards[0].touches[2]
    assert [gradient in step.creates for step in backwards] == [True, False]
    assert [gradient in step.changes for step in backwards] == [False, True]
    assert [step.completes for step in backwards] == [None, gradient]


def test_every_tensor_of_the_store_has_its_own_home_but_tied_weights_share_one():
    tensors = dict.fromkeys(chain.from_iterable(step.touches for step in steps()))
    by_home: dict[Home, list[tuple[TensorKind, int]]] = {}
    for tensor in tensors:
        if tensor.home is not None:
            by_home.setdefault(tensor.home, []).append((tensor.kind, tensor.layer))
    shared = [sorted(layer for _, layer in users) for users in by_home.values() if len(users) > 1]
    assert shared == [[0, 2]]
    homeless = {tensor.kind for tensor in tensors if tensor.home is None}
    assert homeless == {TensorKind.STASH, TensorKind.ACTIVATION_GRADIENT}


@pytest.mark.parametrize("policy", [Policy.GPIPE_SWAP, Policy.ONE_F_ONE_B_SWAP])
def test_a_stage_sends_what_its_neighbour_receives(policy):
    """Two stages of two layers each: x(2) goes on, g(2) comes back."""
    first, second = of_gpus(policy, 2, costs=Costs(uniform_trace(LAYERS)))
    assert {step.layer for step in first} == {0, 1}
    assert {step.layer for step in second} == {2, 3}
    for microbatch in (0, 1):
        sends, receives = (
            [find(made, TaskKind.FORWARD, at)[microbatch] for made, at in ((first, 1), (second, 2))],
            [find(made, TaskKind.BACKWARD, at)[microbatch] for made, at in ((second, 2), (first, 1))],
        )
        for what, (sender, receiver) in (("x", sends), ("g", receives)):
            assert sender.sends is not None
            assert receiver.receives is not None
            assert sender.sends in sender.creates
            assert receiver.receives not in receiver.creates
            assert sender.sends.bytes == receiver.receives.bytes
            assert sender.causes == receiver.waits_for == (Event(what, 2, sender.microbatch),)
        assert (kinds(sends[0])[-1], kinds(sends[1])[1]) == ((OUT, 2), (X, 2))
    passed = {Event(what, 2, m) for what in "xg" for m in (0, 1)}
    waits = [event for step in first + second for event in step.waits_for]
    assert passed <= set(waits)
    assert len(waits) == len(set(waits))


def test_a_pipeline_never_completes_a_gradient_for_others_to_reduce():
    assert not any(step.completes for made in of_gpus(Policy.GPIPE_SWAP, 2) for step in made)


class TestTiedOverStages:
    """Layers 0 and 2 share a weight and are on different GPUs; both have weights of their own."""

    def test_the_user_sends_its_partial_gradient_home_and_forgets_the_weights(self):
        _, user = of_gpus(Policy.ONE_F_ONE_B_SWAP, 2)
        early, late = find(user, TaskKind.BACKWARD, 2)
        assert (early.signals, early.goes_out, early.stale) == ((), (), ())
        assert late.signals == (Event("gradient", 2),)
        assert [(t.kind, t.layer) for t in late.goes_out + late.stale] == [(G, 2), (W, 2)]

    def test_the_owner_updates_with_it_and_the_user_after_that(self):
        owner, user = of_gpus(Policy.ONE_F_ONE_B_SWAP, 2)
        (first,), (second,) = find(owner, TaskKind.UPDATE, 0), find(user, TaskKind.UPDATE, 2)
        assert kinds(first) == [(W, 0), (G, 0), (G, 2), (K, 0)]
        assert first.awaits == (Event("gradient", 2),)
        assert first.signals == (Event("weight", 0),)
        assert [(t.kind, t.layer) for t in first.goes_out] == [(W, 0)]
        assert second.awaits == (Event("weight", 0),)

    def test_nothing_is_awaited_of_an_owner_that_is_not_trained(self):
        owner, user = of_gpus(Policy.ONE_F_ONE_B_SWAP, 2, costs=Costs(with_frozen(TRACE, [0])))
        assert not find(owner, TaskKind.UPDATE, 0)
        assert find(user, TaskKind.UPDATE, 2)
        assert not any(step.awaits for step in owner + user)
