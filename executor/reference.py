"""Plain PyTorch, to compare with: the same model, batches and optimizer in one loop that knows nothing of schedules."""

from __future__ import annotations

import torch

from .models.inputs import Inputs, call_model, logits_of
from .models.workloads import Workload, adam
from .reporting import Progress, silent
from .running.optimizer import OptimizerFactory


def plain_losses(
    workload: Workload,
    minibatch: int,
    steps: int,
    *,
    optimizer: OptimizerFactory = adam,
    seed: int = 0,
    progress: Progress = silent,
) -> tuple[float, ...]:
    """The loss of each step k, before its update, when training on ``workload.batch(minibatch, seed + k)``.

    These are the batches of :func:`executor.run.run` with the same seed. The model is changed.
    """
    update = optimizer(workload.model.parameters())
    losses = []
    for number in range(steps):
        progress(number / steps, f"step {number + 1} of {steps}")
        inputs, labels = workload.batch(minibatch, seed + number)
        update.zero_grad()
        outputs = call_model(workload.model, Inputs.of(inputs))
        loss = workload.loss_fn(logits_of(outputs), labels)
        torch.autograd.backward(loss)
        update.step()
        losses.append(float(loss.detach()))
    return tuple(losses)
