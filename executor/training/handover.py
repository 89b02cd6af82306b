"""Between two steps the user has the values: brought home if they stay on GPUs, and taken over with all changes."""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import nn
from torch.optim import Optimizer

from ..errors import ModelError
from ..models.losses import LossFunction
from ..running.session import Session
from .changes import Changes


class Handover:
    """For a ``session`` whose values are those of the model, the loss and the optimizer."""

    def __init__(self, session: Session, model: nn.Module, loss_fn: LossFunction, optimizer: Optimizer) -> None:
        self._session = session
        self._changes = Changes(model, loss_fn, optimizer)
        self._away = False  # values on GPUs are newer
        self._handed = False  # the user may have changed anything
        self._updates_residents = session.updates_residents
        if self._updates_residents:
            self._sync_before_access(model, optimizer)

    def sync(self) -> None:
        """Bring home what is newer on GPUs."""
        if self._away:
            self._session.write_home()
            self._changes.note()
            self._away = False
        self._handed = True

    def take_over(self) -> None:
        """Before a step: what the user changed is what trains on.

        Raises ModelError or OptimizerError for a change that no step can follow, or of values that were old.
        """
        self._changes.check()
        changed = self._changes.values()
        if self._away and changed:
            raise ModelError(
                f"{', '.join(changed[:5])} changed while newer values stayed on GPUs; call sync() of the Trainer "
                "before you change them"
            )
        if changed or self._handed or not self._session.homes_agree:
            self._session.read_home()
        self._handed = False
        self._away = self._updates_residents

    def give_back(self) -> None:
        """After a step, even if it failed."""
        self._changes.note()

    def _sync_before_access(self, model: nn.Module, optimizer: Optimizer) -> None:
        """States are current when the user asks for them, and known to be old when the user loads others."""
        handover = ref(self)  # a copy of the model must not copy all this

        def sync(*_: Any) -> None:
            if (own := handover()) is not None:
                own.sync()

        for module in model.modules():
            module.register_state_dict_pre_hook(sync)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(sync)  # type: ignore[no-untyped-call]
        optimizer.register_state_dict_pre_hook(sync)
        optimizer.register_load_state_dict_pre_hook(sync)
