from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from executor.errors import OptimizerError
from executor.running.optimizer import Moved, PackOptimizer, State

Factory = Callable[[Any], Optimizer]

FACTORIES: dict[str, Factory] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.3),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}
STEPS = 3


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((3, 4), (4,), (2, 2, 2), ())
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=generator)) for shape in shapes]


def gradient(step: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + like.numel())
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)


def plain(factory: Factory) -> list[nn.Parameter]:
    """What the optimizer itself makes of the parameters."""
    expected = parameters()
    optimizer = factory(expected)
    for step in range(STEPS):
        for parameter in expected:
            parameter.grad = gradient(step, parameter)
        optimizer.step()
    return expected


@pytest.fixture(params=FACTORIES)
def factory(request: pytest.FixtureRequest) -> Factory:
    return FACTORIES[request.param]


def test_pack_by_pack_on_the_host_equals_all_at_once(factory: Factory) -> None:
    own = parameters()
    optimizer = factory(own)
    packs = PackOptimizer(optimizer)
    for step in range(STEPS):
        for pack in (own[2:], own[:2]):
            packs.update_on_host({parameter: gradient(step, parameter) for parameter in pack})
    assert all(torch.equal(a, b) for a, b in zip(own, plain(factory), strict=True))
    assert all(parameter.grad is None for parameter in own)


def test_pack_by_pack_on_a_gpu_equals_all_at_once(factory: Factory) -> None:
    """Weights and state come from a home and go back there around every update, as schedules move them."""
    own = parameters()
    packs = PackOptimizer(factory(own))
    home = {
        parameter: {
            entry: torch.zeros(parameter.shape, dtype=dtype) for entry, dtype in packs.state_entries(parameter).items()
        }
        for parameter in own
    }
    kept: dict[nn.Parameter, State] = {}
    for parameter, state in packs.optimizer.state.items():  # an optimizer may start with some
        left = dict(state)
        for entry, place in home[parameter].items():
            place.copy_(left.pop(entry))
        kept[parameter] = left
    for step in range(STEPS):
        for pack in (own[2:], own[:2]):
            moved = [
                Moved(
                    parameter,
                    parameter.detach().clone(),
                    gradient(step, parameter),
                    {entry: place.clone() for entry, place in home[parameter].items()},
                )
                for parameter in pack
            ]
            packs.update_on_gpu(moved, kept)
            for item in moved:
                item.parameter.data.copy_(item.weight)
                for entry, place in home[item.parameter].items():
                    place.copy_(item.state[entry])
                assert item.weight.grad is None
    assert all(torch.equal(a, b) for a, b in zip(own, plain(factory), strict=True))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", set()),
        ("momentum", {"momentum_buffer"}),
        ("adam", {"exp_avg", "exp_avg_sq"}),
        ("amsgrad", {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        ("adagrad", {"sum"}),
    ],
)
def test_state_in_the_parameters_shape(name: str, expected: set[str]) -> None:
    own = parameters()
    packs = PackOptimizer(FACTORIES[name](own))
    for parameter in own[:3]:
        assert packs.state_entries(parameter) == dict.fromkeys(expected, torch.float64)
    assert not any(parameter.grad is not None for parameter in own)
    assert packs.optimizer.state.keys() == ({*own} if name == "adagrad" else set())


def test_options_of_parameter_groups_hold_and_may_change_between_steps() -> None:
    def groups(own: list[nn.Parameter]) -> Optimizer:
        return torch.optim.SGD([{"params": own[:1], "lr": 0.5}, {"params": own[1:], "weight_decay": 0.1}], lr=0.1)

    own, expected = parameters(), parameters()
    optimizer, reference = groups(own), groups(expected)
    packs = PackOptimizer(optimizer)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, reference)]
    for step in range(STEPS):
        packs.update_on_host({parameter: gradient(step, parameter) for parameter in own[:2]})
        packs.update_on_host({parameter: gradient(step, parameter) for parameter in own[2:]})
        for parameter in expected:
            parameter.grad = gradient(step, parameter)
        reference.step()
        optimizer._opt_called = True  # type: ignore[attr-defined]  # what its own step would note
        for scheduler in schedulers:
            scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(own, expected, strict=True))


def test_the_optimizers_own_state_is_what_the_host_updates() -> None:
    own = parameters()
    optimizer = torch.optim.Adam(own)
    packs = PackOptimizer(optimizer)
    packs.update_on_host({own[0]: gradient(0, own[0])})
    assert optimizer.state_dict()["state"].keys() == {0}
    assert optimizer.state[own[0]]["step"] == 1


def test_hooks_of_the_optimizer_are_not_run_pack_by_pack() -> None:
    own, calls = parameters(), []
    optimizer = torch.optim.SGD(own, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    PackOptimizer(optimizer).update_on_host({own[0]: gradient(0, own[0])})
    assert calls == []


def test_parameters_that_the_optimizer_was_not_given_stay() -> None:
    own = parameters()
    packs = PackOptimizer(torch.optim.SGD(own[:1], lr=0.1))
    before = own[1].detach().clone()
    packs.update_on_host({own[1]: gradient(0, own[1])})
    packs.update_on_gpu([Moved(own[1], own[1].detach(), gradient(0, own[1]), {})], {})
    assert torch.equal(own[1], before)
    assert packs.state_entries(own[1]) == {}


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    with pytest.raises(OptimizerError, match=r"LBFGS cannot update a parameter of 2 dimension\(s\) by itself"):
        PackOptimizer(torch.optim.LBFGS(parameters()))


def test_state_in_another_shape_may_stay_on_the_host_but_cannot_move() -> None:
    own = parameters()
    packs = PackOptimizer(torch.optim.Adafactor(own))
    packs.update_on_host({own[0]: gradient(0, own[0])})
    with pytest.raises(OptimizerError, match=r"Adafactor keeps 'row_var' of shape .*: update on the CPU"):
        packs.state_entries(own[0])
