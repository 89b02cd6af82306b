"""Clipping, loss scales and skipped steps, beside plain PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.optim import Optimizer

from executor.errors import NonFiniteGradient, NonFiniteLoss, RuleError
from executor.models.workloads import Workload
from executor.running.rules import Skip, UpdateRule
from executor.running.session import Session, StepResult
from sim.plan import HarmonyPlan, Plan, Policy, Reduce, UpdateOn, UpdateWhen
from tests.executor.running.test_session import PACKS, assert_close, start
from tests.executor.trained import (
    MINIBATCH,
    SEED,
    Make,
    adam,
    chain,
    dp_swap,
    gpt2,
    gradient_step,
    harmony,
    name_of,
    normalised_chain,
    paged,
    sharded,
    tied_chain,
)

END = UpdateWhen.END
DP, PP = Policy.HARMONY_DP, Policy.HARMONY_PP
MAX_NORMS = (0.05, 0.1, 1e9)
"""Of three steps: the first two are clipped."""


def at_end() -> Iterator[Plan]:
    """Plans of several kinds, with microbatches of 3, 3 and 2."""
    for update in UpdateOn:
        for reduce in Reduce:
            yield harmony(DP, 2, (3, 3), PACKS, update=update, update_when=END, reduce=reduce)
        yield harmony(PP, 2, (4, 3), PACKS, update=update, update_when=END)
        yield harmony(PP, 3, (3, 3), PACKS, update=update, update_when=END, split_backward=2, resident_weights=(1,))
        state = (0,) if update is UpdateOn.GPU else ()
        stays: dict[str, Any] = {"resident_weights": (0, 2), "resident_state": state}
        yield harmony(DP, 3, (3, 3), PACKS, update=update, update_when=END, reduce=Reduce.SCATTER, **stays)
    yield sharded(2, 3, update_when=END)


AT_END = list(at_end())
EACH_POLICY = [
    harmony(DP, 2, (2, 2), PACKS),
    harmony(DP, 2, (2, 2), PACKS, update=UpdateOn.GPU, reduce=Reduce.SCATTER),
    harmony(PP, 2, (2, 2), PACKS),
    harmony(PP, 3, (2, 2), PACKS, update=UpdateOn.GPU),
    harmony(PP, 2, (2, 2), PACKS, update=UpdateOn.GPU, update_when=END),
    dp_swap(2, 2),
    paged(Policy.GPIPE_SWAP, 2, 2),
    paged(Policy.ONE_F_ONE_B_SWAP, 2, 2),
    sharded(2, 2),
]


def id_of(plan: Plan) -> str:
    return name_of(plan) + (f"-{plan.update_when.value}" if hasattr(plan, "update_when") else "")


def for_layers(plan: Plan, layers: int) -> Plan:
    """The same for a model of another number of layers: its last backward pack takes what is left."""
    if not isinstance(plan, HarmonyPlan) or plan.layer_count == layers:
        return plan
    return replace(plan, packs_fwd=((0, 0), (1, 1)), packs_bwd=((0, 0), (1, 1), (2, layers - 1)))


def grouped(kind: Callable[..., Optimizer], model: nn.Module) -> Optimizer:
    """Every other parameter is in a group with options of its own, so packs cut through both groups."""
    parameters = list(model.parameters())
    return kind([{"params": parameters[::2], "lr": 0.02}, {"params": parameters[1::2], "weight_decay": 0.1}], lr=0.005)


def plain_step(workload: Workload, optimizer: Optimizer, number: int, max_norm: float) -> tuple[float, float]:
    """The loss, and the norm of the gradient before it is clipped."""
    inputs, labels = workload.batch(MINIBATCH, SEED + number)
    optimizer.zero_grad()
    outputs: Any = workload.model(**inputs) if isinstance(inputs, dict) else workload.model(inputs)
    loss: Any = workload.loss_fn(getattr(outputs, "logits", outputs), labels)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(workload.model.parameters(), max_norm)
    optimizer.step()
    return float(loss.detach()), norm.item()


def step(session: Session, workload: Workload, number: int = 0, rule: UpdateRule | None = None) -> StepResult:
    inputs, labels = workload.batch(MINIBATCH, SEED + number)
    return session.step(inputs, labels, rule=rule or UpdateRule())


def spoilt(workload: Workload, sample: int) -> tuple[Tensor, Tensor]:
    """A batch whose loss is not a number, because of one sample."""
    inputs, labels = workload.batch(MINIBATCH, SEED)
    inputs[sample] = math.nan
    return inputs, labels


class Everything:
    """All that a step may change, to the bit."""

    def __init__(self, workload: Workload, optimizer: Optimizer, session: Session) -> None:
        session.write_home()
        self._now = copy.deepcopy((dict(workload.model.state_dict()), optimizer.state_dict()["state"]))

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Everything)
        return _same(self._now, other._now)

    __hash__ = None  # type: ignore[assignment]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, tuple):
        return all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


# ---------------------------------------------------------------------------------------------------- clipping


ADAM, SGD = torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(
    ("make", "kind", "plan"),
    [
        *((chain, (ADAM, SGD)[number % 2], plan) for number, plan in enumerate(AT_END)),
        *((partial(tied_chain, bias=True), (SGD, ADAM)[number % 2], plan) for number, plan in enumerate(AT_END)),
        *((gpt2, SGD, plan) for plan in AT_END[3:12:4]),
    ],
)
def test_clipping_by_the_norm_of_the_whole_model_as_plain_pytorch_does(
    make: Make, kind: Callable[..., Optimizer], plan: Plan
) -> None:
    """Also with weights that two packs share, and groups of parameters that packs cut through."""
    workload, reference = make(), make()
    optimizer, expected = grouped(kind, workload.model), grouped(kind, reference.model)
    state_tensors = 2 if kind is ADAM else 1
    session = start(workload, for_layers(plan, len(workload.layers())), optimizer, state_tensors=state_tensors)
    for number, max_norm in enumerate(MAX_NORMS):
        loss, norm = plain_step(reference, expected, number, max_norm)
        result = step(session, workload, number, UpdateRule(max_norm=max_norm))
        assert result.loss == pytest.approx(loss, abs=1e-10)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-10)
        assert not result.skipped
        assert (norm > max_norm) is (number < 2)
    session.write_home()
    assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))
    assert_close(optimizer.state_dict()["state"], expected.state_dict()["state"])


@pytest.mark.parametrize("plan", [AT_END[0], AT_END[-2]], ids=id_of)
def test_frozen_weights_count_for_nothing(plan: Plan) -> None:
    workload, reference = chain(frozen=True), chain(frozen=True)
    plan = replace(plan, reduce=Reduce.RING)  # of layers of which some weights are frozen no shards are updated
    session = start(workload, plan, adam(workload.model.parameters()))
    _, norm = plain_step(reference, adam(reference.model.parameters()), 0, 0.05)
    assert step(session, workload, 0, UpdateRule(max_norm=0.05)).gradient_norm == pytest.approx(norm, rel=1e-10)
    assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))


@pytest.mark.parametrize("plan", [*EACH_POLICY, AT_END[0]], ids=id_of)
def test_a_loss_scale_changes_nothing_but_what_happens_in_between(plan: Plan) -> None:
    """A power of two, so it leaves no trace at all."""
    trained = []
    for scale in (1.0, 2.0**14):
        workload = chain()
        session = start(workload, plan, adam(workload.model.parameters()))
        results = [step(session, workload, number, UpdateRule(loss_scale=scale)) for number in range(2)]
        trained.append(([(result.loss, result.gradient_norm) for result in results], dict(workload.model.state_dict())))
    assert trained[0][0] == trained[1][0]
    assert _same(trained[0][1], trained[1][1])
    takes_norm = getattr(plan, "update_when", None) is END
    assert all((norm is not None) is takes_norm for _, norm in trained[0][0])


def test_the_norm_is_known_without_clipping_and_with_steps_that_overlap() -> None:
    plan = harmony(PP, 2, (3, 3), PACKS, update_when=END, overlap_steps=True)
    workload, reference = chain(), chain()
    expected = adam(reference.model.parameters())
    session = start(workload, plan, adam(workload.model.parameters()))
    results = session.overlapping_steps([workload.batch(MINIBATCH, SEED + number) for number in range(3)])
    for number, result in enumerate(results):
        _, norm = plain_step(reference, expected, number, math.inf)
        assert result.gradient_norm == pytest.approx(norm, rel=1e-10)
    assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))


# ------------------------------------------------------------------------------------------ losses that are none


@pytest.mark.parametrize("make", [chain, normalised_chain], ids=["chain", "normalised"])
@pytest.mark.parametrize("plan", EACH_POLICY, ids=id_of)
def test_a_loss_that_is_not_finite_names_its_samples_and_changes_nothing(plan: Plan, make: Make) -> None:
    """Nor does a step that is skipped; and training goes on after either."""
    workload, untroubled = make(), make()
    plan = for_layers(plan, len(workload.layers()))
    optimizer, other = adam(workload.model.parameters()), adam(untroubled.model.parameters())
    session, reference = start(workload, plan, optimizer), start(untroubled, plan, other)
    for each, of in ((session, workload), (reference, untroubled)):
        step(each, of)
    before = Everything(workload, optimizer, session)
    with pytest.raises(NonFiniteLoss, match=r"^step 1: the loss of the microbatch of samples 4-5 is nan"):
        session.step(*spoilt(workload, 5))
    assert Everything(workload, optimizer, session) == before
    result = session.step(*spoilt(workload, 5), rule=UpdateRule(skip=Skip.LOSS))
    assert result.skipped
    assert math.isnan(result.loss)
    assert Everything(workload, optimizer, session) == before
    reference.go_on(2, SEED)  # the step that was skipped counts: what is drawn at random is drawn anew
    step(session, workload, 1)
    step(reference, untroubled, 1)
    assert Everything(workload, optimizer, session) == Everything(untroubled, other, reference)


@pytest.mark.parametrize("stays", [False, True])
def test_a_first_step_that_is_skipped_leaves_no_state(stays: bool) -> None:
    plan = harmony(DP, 2, (3, 3), PACKS, update=UpdateOn.GPU, resident_weights=(0, 1, 2) if stays else ())
    workload, reference = chain(), chain()
    optimizer = adam(workload.model.parameters())
    session = start(workload, plan, optimizer)
    assert session.step(*spoilt(workload, 0), rule=UpdateRule(skip=Skip.LOSS)).skipped
    assert not optimizer.state_dict()["state"]
    step(session, workload)
    plain_step(reference, adam(reference.model.parameters()), 0, math.inf)
    session.write_home()
    assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))


def test_of_steps_that_overlap_those_from_the_bad_one_on_update_nothing() -> None:
    plan = harmony(PP, 2, (3, 3), PACKS, overlap_steps=True)
    workload, reference = chain(), chain()
    session = start(workload, plan, adam(workload.model.parameters()))
    good = workload.batch(MINIBATCH, SEED)
    with pytest.raises(NonFiniteLoss, match=r"^step 1: the loss of the microbatch of samples 6-7 "):
        session.overlapping_steps([good, spoilt(workload, 7), good])
    plain_step(reference, adam(reference.model.parameters()), 0, math.inf)
    assert_close(dict(workload.model.state_dict()), dict(reference.model.state_dict()))


# --------------------------------------------------------------------------------------- gradients that are none


class Kink(nn.Module):
    """Adds |p|, whose gradient at 0 is not a number; that of its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(10, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        kinked: Tensor = x + (self.p**2).sqrt()
        return kinked


@pytest.mark.parametrize("plan", AT_END, ids=id_of)
def test_a_gradient_that_is_not_finite_names_its_parameter_and_changes_nothing(plan: Plan) -> None:
    workload = chain()
    workload.model[1] = Kink()
    optimizer = adam(workload.model.parameters())
    session = start(workload, plan, optimizer)
    before = Everything(workload, optimizer, session)
    with pytest.raises(NonFiniteGradient, match=r"^step 0: the norm of the gradient is nan, and first that of 1\.p \("):
        step(session, workload)
    with pytest.raises(NonFiniteGradient):
        step(session, workload, 0, UpdateRule(skip=Skip.LOSS, max_norm=1.0))
    assert Everything(workload, optimizer, session) == before
    result = step(session, workload, 0, UpdateRule(skip=Skip.GRADIENT, max_norm=1.0))
    assert result.skipped
    assert math.isnan(result.gradient_norm or 0.0)
    assert math.isfinite(result.loss)
    assert Everything(workload, optimizer, session) == before


def test_a_loss_scale_that_is_too_large_is_skipped_and_a_smaller_one_trains() -> None:
    workload, reference = normalised_chain(), normalised_chain()
    plan = for_layers(harmony(DP, 1, (3, 3), PACKS, update_when=END), len(workload.layers()))
    optimizer, expected = adam(workload.model.parameters()), adam(reference.model.parameters())
    session, other = start(workload, plan, optimizer), start(reference, plan, expected)
    before = Everything(workload, optimizer, session)
    assert step(session, workload, 0, UpdateRule(loss_scale=1e308, skip=Skip.GRADIENT)).skipped
    assert Everything(workload, optimizer, session) == before
    step(session, workload, 0, UpdateRule(loss_scale=1024.0, skip=Skip.GRADIENT))
    other.go_on(1, SEED)
    step(other, reference)
    assert Everything(workload, optimizer, session) == Everything(reference, expected, other)


# ------------------------------------------------------------------------------------------- what cannot be done


@pytest.mark.parametrize("plan", [each for each in EACH_POLICY if getattr(each, "update_when", None) is not END])
@pytest.mark.parametrize("rule", [UpdateRule(max_norm=1.0), UpdateRule(skip=Skip.GRADIENT)])
def test_a_rule_that_needs_the_norm_is_refused_before_anything_happens(rule: UpdateRule, plan: Plan) -> None:
    workload = chain()
    optimizer = gradient_step(workload.model.parameters())
    session = start(workload, plan, optimizer, state_tensors=1)
    before = Everything(workload, optimizer, session)
    with pytest.raises(RuleError, match="plan again with --update-when end"):
        step(session, workload, 0, rule)
    assert Everything(workload, optimizer, session) == before


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"max_norm": 0.0}, "max_norm is 0.0"),
        ({"max_norm": math.nan}, "max_norm is nan"),
        ({"loss_scale": 0.0}, "loss_scale is 0.0"),
        ({"loss_scale": math.inf}, "loss_scale is inf"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(fields: dict[str, Any], what: str) -> None:
    with pytest.raises(RuleError, match=what):
        UpdateRule(**fields)
