"""Adam as mixed precision wants it: weights in half precision, and beside them a copy in float32 that is updated."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

MASTER = "master"
"""The entry of the state that holds the copy."""


class AdamWithMasters(Optimizer):
    """Adam on a float32 copy of every parameter, with its moments in float32; parameters are the copy, rounded."""

    def __init__(
        self, parameters: Any, lr: float = 3e-4, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # nothing is evaluated anew
        """Update what has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, options: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state[MASTER] = parameter.detach().float().clone()
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(state[MASTER]), torch.zeros_like(state[MASTER])
        state["step"] += 1
        first, second = options["betas"]
        gradient, mean, square = parameter.grad.float(), state["exp_avg"], state["exp_avg_sq"]  # type: ignore[union-attr]
        mean.lerp_(gradient, 1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        steps = state["step"].item()
        spread = (square / (1 - second**steps)).sqrt_().add_(options["eps"])
        state[MASTER].addcdiv_(mean, spread, value=-options["lr"] / (1 - first**steps))
        parameter.copy_(state[MASTER])
