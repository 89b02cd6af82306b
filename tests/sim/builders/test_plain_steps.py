"""What each step of a plain schedule touches."""

from itertools import chain

from sim.builders.baselines import dp_swap_steps
from sim.builders.paging import PagedStep
from sim.schedule import TaskKind, TensorKind
from traces.costs import Costs
from traces.synthetic import uniform_trace, with_tied

LAYERS = 4
"""The last one is the loss, without weights; layer 0's input has no gradient."""


def steps() -> list[PagedStep]:
    trace = with_tied(uniform_trace(LAYERS), (0, 2), 1000)
    return dp_swap_steps(Costs(trace), [(0, 2), (2, 3)])


def kinds(step: PagedStep) -> list[tuple[TensorKind, int]]:
    return [(tensor.kind, tensor.layer) for tensor in step.touches]


def test_steps_touch_in_pin_order():
    W, G, X, DX = TensorKind.WEIGHT, TensorKind.GRADIENT, TensorKind.STASH, TensorKind.ACTIVATION_GRADIENT  # noqa: N806
    DATA, K = TensorKind.DATA, TensorKind.OPTIMIZER_STATE  # noqa: N806
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


def test_a_gradient_is_created_by_the_first_backward_and_complete_with_the_last():
    backwards = [step for step in steps() if step.kind is TaskKind.BACKWARD and step.layer == 1]
    gradient = backwards[0].touches[2]
    assert [gradient in step.creates for step in backwards] == [True, False]
    assert [gradient in step.changes for step in backwards] == [False, True]
    assert [step.completes for step in backwards] == [None, gradient]


def test_every_tensor_of_the_store_has_its_own_home_but_tied_weights_share_one():
    tensors = dict.fromkeys(chain.from_iterable(step.touches for step in steps()))
    by_home: dict[int, list[tuple[TensorKind, int]]] = {}
    for tensor in tensors:
        if tensor.home is not None:
            by_home.setdefault(tensor.home, []).append((tensor.kind, tensor.layer))
    shared = [sorted(layer for _, layer in users) for users in by_home.values() if len(users) > 1]
    assert shared == [[0, 2]]
    homeless = {tensor.kind for tensor in tensors if tensor.home is None}
    assert homeless == {TensorKind.STASH, TensorKind.ACTIVATION_GRADIENT}
