"""Forwards that leave no trace: in eval mode, without gradients, random state and training modes put back.

They run on the host, where the model's values are: what does not fit on the GPUs fits there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..models.inputs import Inputs, call_model, logits_of


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients; each module's own mode and the random state of the host are put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode


def outputs_of(model: nn.Module, inputs: Inputs) -> Tensor:
    """What the model makes of the inputs: what it returns, or its ``logits``."""
    with evaluating(model):
        return logits_of(call_model(model, inputs))
