"""The demo as a whole, on a smaller model and for fewer seconds."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from executor import demo
from executor.demo import run_demo
from executor.models.data import vector_batches
from sim.hardware.files import load_machine, save_machine
from sim.schedule_files import load_schedule
from sim.timelines.timeline import load_timeline
from sim.validation.validate import validate
from traces.files import load_trace

PLAIN_FIGURES = {"policy", "plan", "step_time_s", "throughput_samples_per_s", "peak_memory_bytes", "host_peak_bytes"}
COPIES = {"swap_in_bytes", "swap_out_bytes", "p2p_bytes", "allreduce_bytes"}


def many_layers() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(12)))
    return model, nn.functional.cross_entropy, vector_batches(64, 10)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path / "small.toml"
    save_machine(load_machine("emulated").with_usable_memory(128 * 1024), machine)
    settings = {
        "MODEL": f"{__name__}:many_layers",
        "MACHINE": str(machine),
        "MAX_SIMULATED": 4,
        "STEPS": 1,
        "PROFILE_S": 1.0,
    }
    for name, value in settings.items():
        monkeypatch.setattr(demo, name, value)


@pytest.mark.usefixtures("small")
def test_the_whole_path_leaves_files_that_can_be_read_and_figures_that_agree(tmp_path: Path) -> None:
    output, told = tmp_path / "out", []
    report = run_demo(output, progress=lambda share, what: told.append(share))
    assert told == sorted(told)
    assert told[-1] == 1.0

    summary = json.loads((output / "summary.json").read_text())
    assert summary == json.loads(json.dumps(report.to_dict()))
    assert 3 * summary["gpu_memory_bytes_total"] <= summary["state_bytes"]
    trace = load_trace(output / "trace.json")
    for name, key in (("harmony", "harmony"), ("dp-swap", "dp_swap")):
        predicted, measured = summary[key]["predicted"], summary[key]["measured"]
        assert predicted.keys() & measured.keys() >= PLAIN_FIGURES | COPIES
        assert {figure: predicted[figure] for figure in COPIES} == {figure: measured[figure] for figure in COPIES}
        assert summary[key]["loss_max_abs_diff"] < 1e-4
        assert summary[key]["step_time_error"] == pytest.approx(predicted["step_time_s"] / measured["step_time_s"] - 1)
        validate(load_schedule(output / f"{name}.schedule.json"), trace)
        for source in ("predicted", "measured"):
            assert load_timeline(output / f"{name}.{source}.parquet").summary() == summary[key][source]
        for picture in ("lanes", "memory"):
            assert (output / f"{name}.{picture}.png").stat().st_size > 0
    ratio = summary["dp_swap"]["measured"]["step_time_s"] / summary["harmony"]["measured"]["step_time_s"]
    assert summary["speedup_measured"] == pytest.approx(ratio)

    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report)
    said = console.export_text()
    assert "harmony-" in said
    assert "dp-swap" in said
    assert f"{summary['speedup_measured']:.2f}x measured" in said
