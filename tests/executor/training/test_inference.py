from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from executor.models.inputs import Inputs, call_model, logits_of
from executor.models.workloads import Workload
from executor.training.inference import outputs_by_layer
from sim.plan import Policy
from tests.executor.trained import CHAIN_PACKS, gpt2, harmony, normalised_chain, skips
from tests.executor.training.loops import batches, trainer_of


def test_evaluates_as_the_model_does_and_disturbs_nothing() -> None:
    """Before training, between steps, of other sizes; with dropout and batch statistics."""
    plan = harmony(Policy.HARMONY_DP, 2, (4, 4), (CHAIN_PACKS[0], ((0, 2), (3, 4), (5, 6))))
    workload, undisturbed = normalised_chain(), normalised_chain()
    trainer, other = trainer_of(workload, plan), trainer_of(undisturbed, plan)
    for number, batch in enumerate(batches(workload, 3)):
        inputs, labels = workload.batch(3 + number, 7)
        reference = copy.deepcopy(workload.model).eval()
        random = torch.get_rng_state()
        assert torch.equal(trainer.predict(inputs), reference(inputs))
        assert trainer.evaluate(inputs, labels) == workload.loss_fn(reference(inputs), labels).item()
        assert torch.equal(torch.get_rng_state(), random)
        assert workload.model.training
        assert trainer.step(*batch) == other.step(*batch)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, trainer.state_dict()[name])


@pytest.mark.parametrize("make", [normalised_chain, skips, gpt2])
def test_a_forward_by_layer_is_the_models(make: Callable[[], Workload]) -> None:
    workload = make()
    inputs, _ = workload.batch(5, 0)
    model = copy.deepcopy(workload.model).eval()
    given = Inputs.of(inputs)
    outputs = outputs_by_layer(workload.model, workload.loss_fn, given, torch.device("cpu"))
    assert torch.equal(outputs, logits_of(call_model(model, given)))
    assert workload.model.training
