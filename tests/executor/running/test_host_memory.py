"""What a run takes of the host is told before it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from executor.devices.facade import DeviceKind
from executor.errors import NotEnoughHostMemory
from executor.running import host_memory
from executor.running.host_memory import HostMemory
from sim.builders import build
from sim.plan import Plan, Policy
from sim.schedule import Schedule, TensorKind
from tests.executor import made
from tests.executor.trained import chain, harmony, paged, trace_of, train

PACKS = (((0, 3),), ((0, 3), (4, 7)))


def schedule_of(plan: Plan) -> Schedule:
    return build(plan, trace_of(chain()), made.machine(plan.gpus))


PLAN = harmony(Policy.HARMONY_PP, 2, (2, 2), PACKS)


def test_rows_are_what_the_schedule_plans() -> None:
    schedule = schedule_of(PLAN)
    real, emulated = (HostMemory.of(schedule, kind) for kind in (DeviceKind.CUDA, DeviceKind.EMULATED))
    assert sum(real.rows.values()) == schedule.memory.host_peak_bytes
    assert sum(emulated.rows.values()) == schedule.memory.host_peak_bytes + sum(schedule.memory.gpu_peak_bytes)
    assert real.rows["gradient"] == schedule.memory.host_store[TensorKind.GRADIENT]


def test_the_models_own_weights_are_there_already() -> None:
    one = HostMemory.of(schedule_of(PLAN), DeviceKind.CUDA)
    weights = sum(tensor.nbytes for tensor in chain().model.state_dict().values())
    assert one.there_bytes == weights
    # Baselines have a home for each GPU, of which the first one's is the model.
    several = HostMemory.of(schedule_of(paged(Policy.DP_SWAP, 3, 2)), DeviceKind.CUDA)
    assert several.there_bytes == weights
    assert several.rows["weight"] + several.rows["buffer"] == 3 * weights


def test_too_little_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = HostMemory.of(schedule_of(PLAN), DeviceKind.EMULATED).needed_bytes
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed - 1))
    with pytest.raises(NotEnoughHostMemory, match=rf"needs .* \({needed} B\) more .* \({needed - 1} B\) are left"):
        train(chain(), PLAN)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=needed))
    train(chain(), PLAN)


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("max", "5", 1000), ("300", "100", 200), ("300", "400", 0), ("5000", "1", 1000)]
)
def test_a_control_group_may_leave_less(
    limit: str, used: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    monkeypatch.setattr(host_memory, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(used)
    assert host_memory.available_bytes() == expected
