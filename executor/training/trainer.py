"""Trainer: training a model by a schedule, in a loop of one's own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sim.hardware.machine import Machine
from sim.plan import Policy, UpdateWhen
from sim.schedule import Schedule
from sim.timelines.replay import StepTimes
from sim.timelines.timeline import Timeline

from ..devices.facade import DeviceKind
from ..errors import ModelError
from ..models.inputs import Inputs
from ..models.layers import decompose
from ..models.losses import LossFunction
from ..running.measured import measured_timeline
from ..running.opening import open_session
from ..running.rules import UpdateRule
from ..running.session import Session, StepResult
from .automatic import HARMONY, Planned
from .batches import Batch, joined
from .checkpoint import Position, load, save
from .handover import Handover
from .inference import outputs_by_layer, outputs_on_host
from .planning import AUTO, Planning
from .series import latest, save_step
from .target import Target, kind_of_device

REMEMBERED_STEPS = 10
"""So many of the last steps are in :meth:`Trainer.timeline`."""


class Trainer:
    """Trains ``model`` with ``loss_fn(outputs, labels)`` and ``optimizer`` as a schedule says.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3))
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> trainer = Trainer(model, torch.nn.functional.cross_entropy, optimizer, "auto", gpus=2)
    >>> for step in range(3):
    ...     inputs, labels = torch.randn(16, 8), torch.randint(3, (16,))
    ...     loss = trainer.step(inputs, labels)
    >>> trainer.predict(torch.randn(5, 8)).shape
    torch.Size([5, 3])

    ``model`` is any module that can be cut into layers, or a list of layers. ``schedule`` is a Schedule, the path of
    its file, or "auto": then the first batch is profiled, and the best schedule of the ``policies`` searched. Planning
    happens at the first step, or when :meth:`prepare` is called; ``sim.save_schedule(trainer.schedule, "best.json")``
    keeps what was found for the next time.

    ``machine`` is a machine's value, name or file; without one it is this computer: its CUDA devices, or, without any
    (or with ``device="emulated"``), emulated ones. ``gpus`` and ``gpu_memory`` (bytes, or such as "9 GB") say how much
    of it. ``seed`` is where dropout and the like draw from.

    A batch is given as inputs and labels, as a pair of them, or as one dictionary that holds "labels"; inputs are a
    tensor, a tuple, or a dictionary by names of the model's arguments.

    A step is forward, backward and update in one: there is nothing to zero, to clip or to step beside it. Schedulers of
    learning rates take the optimizer as always.

    ``rule`` says how gradients become an update: clipping by the norm of them all, a scale of the loss, and which steps
    are skipped; it may be changed between steps. What needs that norm takes a schedule with ``--update-when end``, for
    which "auto" then looks.

    The model stays the user's own, on the CPU: what it holds is what trains on, so its values, the optimizer's, and
    learning rates may be changed between steps. Some schedules let weights or optimizer state stay on GPUs: there,
    ``state_dict()`` of model and optimizer are current, and loading them works, but call :meth:`sync` before you look
    at parameters themselves or change them; a step that finds them changed without refuses.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[nn.Module],
        loss_fn: LossFunction,
        optimizer: Optimizer,
        schedule: Schedule | str | Path = AUTO,
        *,
        machine: Machine | str | Path | None = None,
        device: DeviceKind | str | None = None,
        gpus: int | None = None,
        gpu_memory: int | str | None = None,
        policies: Sequence[Policy | str] = HARMONY,
        seed: int = 0,
        rule: UpdateRule = UpdateRule(),  # noqa: B008  # immutable
    ) -> None:
        self.model = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        target = Target(machine, None if device is None else kind_of_device(device), gpus, gpu_memory)
        self._planning = Planning.of(schedule, policies, target, UpdateWhen.END if rule.needs_norm else None)
        self.rule = rule
        self.seed = seed
        self._planned: Planned | None = None
        self._session: Session | None = None
        self._handover: Handover | None = None
        self._times: deque[StepTimes] = deque(maxlen=REMEMBERED_STEPS)
        self.steps = 0
        self.last_step: StepResult | None = None

    # ------------------------------------------------------------------------------------------------ training

    def prepare(self, inputs: Any, labels: Tensor | None = None) -> None:
        """Plan, and move the model into the host store, with a batch as large as a step's. Steps do it by themselves.

        Raises ModelError for a model that cannot be cut into layers, NothingFits if no plan fits, DifferentModel if the
        schedule was made for another model or optimizer, DoesNotFit or DeviceError if the machine does not suffice.
        """
        self._prepared(Batch.of(inputs, labels))

    def step(self, inputs: Any, labels: Tensor | None = None) -> float:
        """Train on a minibatch: forward, backward and update. Returns its loss, before the update.

        Raises DifferentModel if it is not as large as the schedule's minibatch, ModelError or OptimizerError if the
        model or the optimizer changed in a way that no step can follow, TaskFailed when a task fails: then, weights may
        be updated in part.
        """
        return self.step_on([Batch.of(inputs, labels)])

    def step_on(self, batches: Iterable[Any]) -> float:
        """One :meth:`step` on several batches, which together make up its minibatch (gradient accumulation)."""
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
            raise ModelError(
                "autocast is on, which does not reach the devices of a schedule; leave it, and give the model the "
                "dtype that it is to compute in"
            )
        batch = joined([given if isinstance(given, Batch) else Batch.of(given) for given in batches])
        session, handover = self._prepared(batch)
        batch.check_makes_up(session.schedule.plan.minibatch)
        handover.take_over()
        try:
            result = session.step(batch.inputs, batch.labels, rule=self.rule)
        finally:
            handover.give_back()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # as schedulers of learning rates look for
        self.steps += 1
        self.last_step = result
        self._times.append(result.times)
        return result.loss

    def sync(self) -> None:
        """Bring the model and the optimizer up to date with what stays on GPUs; nothing to do for most schedules."""
        if self._handover is not None:
            self._handover.sync()

    # ---------------------------------------------------------------------------------------------- evaluation

    def predict(self, inputs: Any, *, on_host: bool = False) -> Tensor:
        """What the model returns (or its ``logits``) for inputs of any number of samples, in eval mode and without
        gradients. Nothing changes, and nothing is drawn.

        Runs on the host, where emulated GPUs compute too; with CUDA, layer by layer through the memory that the
        schedule leaves on GPU 0, but for ``on_host``.
        """
        self.sync()
        given = Inputs.of(inputs)
        if on_host or self._planning.target.kind is DeviceKind.EMULATED:
            return outputs_on_host(self.model, given)
        return outputs_by_layer(self.model, self.loss_fn, given, torch.device("cuda", 0))

    def evaluate(self, inputs: Any, labels: Tensor | None = None, *, on_host: bool = False) -> float:
        """The loss of a batch of any number of samples, as :meth:`predict` makes outputs."""
        batch = Batch.of(inputs, labels)
        outputs = self.predict(batch.inputs, on_host=on_host)
        return self.loss_fn(outputs, batch.labels).item()

    # --------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The model's, up to date."""
        self.sync()
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load the model's; what trains on."""
        self.sync()
        return self.model.load_state_dict(state, strict=strict)

    # --------------------------------------------------------------------------------------------- checkpoints

    def save(
        self,
        folder: str | Path,
        schedulers: Sequence[Any] = (),
        *,
        data: Any = None,
        extras: Any = None,
        random_state: bool = False,
    ) -> Path:
        """Write a checkpoint: model, optimizer, ``schedulers`` of learning rates, the number of steps and the seed.

        ``data`` says where the data goes on, ``extras`` are your own: numbers, texts, lists, dictionaries, tensors. See
        :func:`~executor.training.checkpoint.save`.
        """
        self.sync()
        position = Position(self.steps, self.seed, data, extras)
        return save(folder, self.model, self.optimizer, schedulers, position, random_state=random_state)

    def save_step(
        self,
        series: str | Path,
        schedulers: Sequence[Any] = (),
        *,
        keep: int | None = None,
        data: Any = None,
        extras: Any = None,
        random_state: bool = False,
    ) -> Path:
        """:meth:`save` a checkpoint ``step-000123`` into a folder of them, of which the newest ``keep`` stay."""

        def write(folder: Path) -> Path:
            return self.save(folder, schedulers, data=data, extras=extras, random_state=random_state)

        return save_step(series, self.steps, write, keep=keep)

    def load(self, folder: str | Path, schedulers: Sequence[Any] = ()) -> Position:
        """Go on from a checkpoint, bit for bit with the same schedule, or with one of the same microbatches. Returns
        what was saved with it. Raises CheckpointError, before anything changes, if it is not whole or of another model.
        """
        self.sync()
        position = load(folder, self.model, self.optimizer, schedulers)
        self.steps, self.seed = position.step, position.seed
        if self._session is not None:
            self._session.go_on(self.steps, self.seed)
        return position

    def resume(self, series: str | Path, schedulers: Sequence[Any] = ()) -> Position | None:
        """:meth:`load` the last whole checkpoint in a folder of them; None, and nothing changes, if there is none at
        all. Raises CheckpointError also if there are some and none is whole."""
        newest = latest(series)
        return None if newest is None else self.load(newest, schedulers)

    # --------------------------------------------------------------------------------------------------- plans

    @property
    def schedule(self) -> Schedule:
        """The schedule. With "auto", there is one after the first step or :meth:`prepare`."""
        return self._planning.given or self._plan().schedule

    @property
    def machine(self) -> Machine:
        """The machine that it runs on."""
        return self._plan().machine

    @property
    def predicted(self) -> Timeline | None:
        """The simulated step; None if the schedule was given."""
        return self._plan().predicted

    def timeline(self) -> Timeline:
        """The last steps as they were measured, to compare with :attr:`predicted`."""
        if self._session is None or not self._times:
            raise ModelError("no step has run yet; call step first")
        times = list(self._times)
        return measured_timeline(
            self.schedule,
            self.machine,
            self._planning.target.kind,
            times,
            warmup_steps=1 if 1 < len(times) == self.steps else 0,
            overruns=self._session.overruns,
        )

    def _plan(self) -> Planned:
        if self._planned is None:
            raise ModelError("nothing is planned yet; run a step, or call prepare with a batch")
        return self._planned

    def _prepared(self, batch: Batch) -> tuple[Session, Handover]:
        if self._session is None or self._handover is None:
            self._planned = planned = self._planning.plan(self.model, self.loss_fn, self.optimizer, batch)
            layers = decompose(self.model, self.loss_fn, batch.inputs)
            self._session = open_session(
                planned.schedule,
                layers,
                self.optimizer,
                planned.machine,
                self._planning.target.kind,
                seed=self.seed,
                first_step=self.steps,
            )
            self._handover = Handover(self._session, self.model, self.loss_fn, self.optimizer)
        return self._session, self._handover
