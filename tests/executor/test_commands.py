"""Commands that run models, as someone would type them one after the other."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from sim.hardware.files import load_machine
from sim.timelines.timeline import load_timeline
from tests.command_line import harmony, json_of
from traces.files import load_trace


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_profile_simulate_run_compare() -> None:
    profiled = json_of("profile", "mlp", "--microbatch", "1,2,4", "--repeats", "3", "--budget", "1", "-o", "t.json")
    assert [entry["microbatch"] for entry in profiled["times"]] == [1, 2, 4]
    assert load_trace("t.json").model == "mlp"

    plan = ("--policy", "harmony-pp", "--minibatch", "8", "--u-fwd", "4", "--u-bwd", "2")
    predicted = json_of("simulate", "t.json", "-m", "emulated", *plan, "--save-schedule", "s.json", "-o", "p.parquet")
    run = ("run", "s.json", "--model", "mlp", "-m", "emulated", "--steps", "2", "-o", "m.csv")
    measured = json_of(*run)
    assert set(predicted) - {"lower_bound_s", "provenance"} <= set(measured)
    assert (measured["source"], measured["steps"], measured["warmup_steps"]) == ("measured", 3, 1)
    assert sum(measured["critical_path"].values()) == pytest.approx(1)
    for key in ("plan", "swap_in_bytes", "swap_out_bytes", "p2p_bytes", "peak_memory_bytes"):
        assert measured[key] == predicted[key]
    assert len(measured["losses"]) == 3
    assert all(map(math.isfinite, measured["losses"]))
    starts, ends = (load_timeline("m.csv").frame.groupby("step")[name] for name in ("start_ns", "end_ns"))
    assert list(starts.min())[1:] == list(ends.max())[:-1]

    found = json_of("compare", "p.parquet", "m.csv")
    difference = predicted["step_time_s"] - measured["step_time_s"]
    assert found["step_time_error"] == pytest.approx(difference / measured["step_time_s"])
    assert {pair["error"] for kind in found["tensor_kinds"].values() for pair in kind.values()} == {0.0}
    again = json_of(*run[:-2])
    assert again["losses"] == measured["losses"]


def test_an_estimate_is_a_trace_to_plan_with() -> None:
    words = ("estimate", "mlp", "--gpu", "rtx-4090", "--microbatch", "1,2", "-o", "t.json")
    estimated = json_of(*words)
    assert estimated["device"] == "RTX 4090"
    assert {source for entry in estimated["times"] for source in entry["provenance"].values()} == {"modelled"}
    predicted = json_of(
        "simulate", "t.json", "-m", "4x4090", "--policy", "harmony-dp", "--minibatch", "8", "--u-fwd", "2"
    )
    assert predicted["step_time_s"] > 0
    longer = json_of(
        "estimate", "gpt2-demo", "--gpu", "rtx-4090", "--microbatch", "1", "-o", "t.json", "--sequence", "64"
    )
    assert [entry["microbatch"] for entry in longer["times"]] == [1]
    assert load_trace("t.json").label_bytes_per_sample == 64 * 8
    failed = harmony("estimate", "gpt2-demo", "--gpu", "rtx-4090", "--sequence", "129", "-o", "t.json")
    assert failed.exit_code == 1
    assert "it takes 1 to 128" in failed.stderr
    with_masters = json_of(*words, "--dtype", "bfloat16", "--masters")
    assert with_masters["optimizer_state_bytes"] == 6 * with_masters["weight_bytes"]
    assert json_of(*words, "--dtype", "bfloat16")["optimizer_state_bytes"] == 2 * with_masters["weight_bytes"]
    refused = harmony(*words, "--masters")
    assert refused.exit_code == 1
    assert "choose bfloat16 or float16" in refused.stderr
    slower = json_of(*words, "--host-bandwidth", "1 GB/s")
    assert slower["update_cpu_s"] == pytest.approx(20.7 * estimated["update_cpu_s"], rel=0.01)


def test_calibrate_writes_what_it_measured() -> None:
    said = json_of("calibrate", "-o", "m.toml")
    machine, described = load_machine("m.toml"), load_machine("emulated")
    assert [gpu["bandwidth"] for gpu in said["gpus"]] == [gpu.bandwidth for gpu in machine.gpus]
    assert machine.emulation == described.emulation
    assert all(gpu.copy_overhead_ns > 0 for gpu in machine.gpus)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("profile", "gpt3", "-o", "t.json"), "there is no model 'gpt3'"),
        (("estimate", "mlp", "--gpu", "4080", "-o", "t.json"), "there is no GPU '4080'"),
        (("estimate", "mlp", "--gpu", "1080ti", "--dtype", "tf32", "-o", "t.json"), "no known speed in tf32"),
        (("calibrate", "-m", "4x1080ti", "-o", "m.toml"), "emulation"),
        (("run", "none.json", "--model", "mlp", "-m", "emulated"), "none.json: no such file"),
    ],
)
def test_what_cannot_be_measured_is_one_message(words: tuple[str, ...], said: str) -> None:
    refused = harmony(*words)
    assert refused.exit_code == 1, refused.output
    assert said in refused.stderr
    assert refused.stdout == ""
    assert not [path for path in Path().iterdir() if path.suffix != ".json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there_is_refused() -> None:
    for words in (("profile", "mlp", "-o", "t.json"), ("calibrate", "-o", "m.toml")):
        refused = harmony(*words, "--device", "cuda")
        assert refused.exit_code == 1
        assert "there is no CUDA device" in refused.stderr


def test_layers_of_a_model() -> None:
    rows = json_of("layers", "gpt2-demo")
    assert [row["kind"] for row in rows] == ["Embedding", *16 * ["GPT2Block"], "LayerNorm", "Linear", "loss"]
    assert rows[0]["tied_with"] == [18]
    assert rows[18]["passes_on"] == ["float32 [128, 256]"]
    assert rows[18]["parameters"] == 256 * 256
    table = harmony("layers", "gpt2-demo").output
    assert "gpt2-demo: 20 layers" in table
    assert "1-16" in table
