"""How a Trainer comes by its schedule: it is given, or found with the first batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from sim.errors import PlanError
from sim.plan import Policy, UpdateWhen
from sim.schedule import Schedule
from sim.schedule_files import load_schedule
from sim.validation.validate import validate

from ..errors import OptimizerError
from ..models.losses import LossFunction
from ..reporting import on_terminal
from .automatic import Planned, choice_for, plan_automatically
from .batches import Batch
from .target import Target

AUTO = "auto"
"""In place of a schedule: find the best one."""


@dataclass(frozen=True)
class Planning:
    """A schedule that is ``given``, or else the ``policies`` to search, and where it is to run."""

    given: Schedule | None
    policies: tuple[Policy, ...]
    target: Target
    update_when: UpdateWhen | None = None

    @staticmethod
    def of(
        schedule: Schedule | str | Path,
        policies: Sequence[Policy | str],
        target: Target,
        update_when: UpdateWhen | None = None,
    ) -> Planning:
        """From a Schedule, the path of its file, or :data:`AUTO`. Raises ScheduleError for a file that holds none,
        PlanError for a policy that is not known."""
        try:
            wanted = tuple(Policy(policy) for policy in policies)
        except ValueError as error:
            known = ", ".join(policy.value for policy in Policy)
            raise PlanError(f"{error}; policies are a list of some of {known}") from None
        return Planning(None if schedule == AUTO else _loaded(schedule), wanted, target, update_when)

    def plan(self, model: nn.Module, loss_fn: LossFunction, optimizer: Optimizer, batch: Batch) -> Planned:
        """The schedule, for batches like this one. A search shows how far it is, on a terminal.

        Raises OptimizerError for the optimizer of another model, DifferentModel for a batch of another size.
        """
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if trained.isdisjoint(id(parameter) for parameter in model.parameters()):
            raise OptimizerError(
                f"{type(optimizer).__name__} has no parameter of the model; make it with model.parameters()"
            )
        if self.given is not None:
            batch.check_makes_up(self.given.plan.minibatch)
            return Planned(self.given, self.target.fitting(self.given))
        with on_terminal() as progress:
            choice = choice_for(self.policies, self.update_when)
            return plan_automatically(model, loss_fn, optimizer, batch, self.target, self.policies, choice, progress)


def _loaded(schedule: Schedule | str | Path) -> Schedule:
    if isinstance(schedule, Schedule):
        return schedule
    loaded = load_schedule(schedule)
    validate(loaded)
    return loaded
