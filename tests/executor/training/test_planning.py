from __future__ import annotations

from pathlib import Path

import pytest

from executor.errors import DeviceError, DifferentModel, OptimizerError
from executor.training.batches import Batch
from executor.training.planning import Planning
from executor.training.target import Target, kind_of_device
from sim.errors import PlanError, ScheduleError
from tests.executor import made
from tests.executor.trained import adam, chain
from tests.executor.training.loops import ON_CPU, schedule_of


def test_a_schedule_that_is_given_is_kept() -> None:
    workload, machine = chain(), made.machine(2)
    schedule = schedule_of(workload, ON_CPU)
    planning = Planning.of(schedule, ["harmony-dp"], Target(machine))
    optimizer = adam(workload.model.parameters())
    planned = planning.plan(workload.model, workload.loss_fn, optimizer, Batch.of(*workload.batch(8, 0)))
    assert planned.schedule is schedule
    assert planned.machine is machine
    assert planned.predicted is None
    with pytest.raises(OptimizerError, match="Adam has no parameter of the model"):
        planning.plan(
            workload.model, workload.loss_fn, adam(chain().model.parameters()), Batch.of(*workload.batch(8, 0))
        )
    with pytest.raises(DifferentModel, match="a step has 7 samples"):
        planning.plan(workload.model, workload.loss_fn, optimizer, Batch.of(*workload.batch(7, 0)))


def test_what_is_not_known_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"'harmony' is not a valid Policy; policies are a list of some of harmony-dp, "
    ):
        Planning.of("auto", ["harmony"], Target())
    with pytest.raises(ScheduleError, match="no such file"):
        Planning.of(tmp_path / "best.json", [], Target())
    with pytest.raises(DeviceError, match="no devices 'gpu'; known are emulated, cuda"):
        kind_of_device("gpu")
