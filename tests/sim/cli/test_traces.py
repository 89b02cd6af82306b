"""Commands about traces: import, show, diff, export."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import harmony, json_of, succeed
from tests.traces.importing.profile_folders import LAYERS, WEIGHTS, forward_ns, tables, write
from traces.files import load_trace, shipped_traces
from traces.importing import import_trace

REFERENCE = Path(__file__).parents[4] / "shared" / "reference" / "gtx1080ti"
SIMULATE = ("simulate", "t.json", "--machine", "4x1080ti", "--policy", "harmony-pp", "--minibatch", "8")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")


def test_import_writes_the_trace_and_shows_what_is_in_it(tmp_path: Path) -> None:
    found = json_of("import", str(write(tmp_path / "made-up")), "-o", "t.json")
    assert load_trace("t.json") == import_trace(tmp_path / "made-up").trace
    assert (found["model"], found["device"], found["layers"]) == ("made-up", "gtx-1080-ti", LAYERS)
    assert found["weight_bytes"] == sum(WEIGHTS)
    assert found["update_cpu_s"] == sum(WEIGHTS) / 1e9
    assert found["provenance"] == {"update_cpu_s": "imported", "update_gpu_s": "modelled"}
    assert found["times"][1]["forward_s"] == sum(forward_ns(layer, 2) for layer in range(LAYERS)) / 1e9
    assert found["times"][1]["provenance"] == {
        "forward_s": "imported", "backward_s": "imported", "input_bytes": "imported", "memory": "modelled"
    }  # fmt: skip
    assert any("updates on the GPU were not measured" in note for note in found["notes"])
    assert {key: value for key, value in found.items() if key != "notes"} == json_of("trace", "show", "t.json")


def test_what_the_source_lacks_can_be_said(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "made-up"))
    succeed("import", folder, "-o", "t.json", "--model", "m", "--device", "d", "--label-bytes", "16")
    trace = load_trace("t.json")
    assert (trace.model, trace.device, trace.label_bytes_per_sample) == ("m", "d", 16)


def test_nothing_is_written_when_the_source_is_wrong(tmp_path: Path) -> None:
    lines = tables()
    lines["activation.csv"][5] = "2,1,many"
    folder = write(tmp_path / "made-up", lines)
    before = sorted(tmp_path.rglob("*"))
    failed = harmony("import", str(folder), "-o", "t.json")
    assert failed.exit_code == 1
    assert "activation.csv: row 6 (microbatch 2, layer 1), input_bytes: found 'many'" in failed.stderr
    assert failed.stdout == ""
    assert sorted(tmp_path.rglob("*")) == before


def test_what_was_there_stays_when_the_source_is_wrong(tmp_path: Path) -> None:
    Path("t.json").write_text("mine")
    folder = write(tmp_path / "made-up", {**tables(), "update_time.csv": ["layer,time", "0,1"]})
    assert harmony("import", str(folder), "-o", "t.json").exit_code == 1
    assert Path("t.json").read_text() == "mine"


def test_modelled_updates_beside_measured_passes_are_pointed_out(tmp_path: Path) -> None:
    succeed("import", str(write(tmp_path / "made-up")), "-o", "t.json")
    caveats = ["updates on the GPU: the times of 2 layers are modelled, not measured"]
    small = (*SIMULATE, "--gpus", "2", "--u-fwd", "1")
    assert json_of(*small, "--update", "gpu")["notes"] == {"caveats": caveats}
    assert caveats[0] in succeed(*small, "--update", "gpu").stdout
    assert json_of(*small, "--update", "cpu")["notes"] == {}
    searched = ("search", "t.json", "--machine", "4x1080ti", "--gpus", "2", "--minibatch", "4", "--processes", "1")
    found = json_of(*searched, "--policy", "dp-swap", "--max-simulated", "2")
    assert caveats[0] in found["notes"]


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_an_exported_trace_is_imported_as_it_was(kind: str) -> None:
    found = json_of("trace", "export", "gpt2-xl@gtx-1080-ti", "-o", "tables", "--format", kind)
    assert found["files"] == [f"layers.{kind}", f"sizes.{kind}", f"times.{kind}", "trace.json"]
    assert json_of("import", "tables", "-o", "t.json")["notes"] == []
    assert load_trace("t.json") == load_trace("gpt2-xl@gtx-1080-ti")
    failed = harmony("trace", "export", "gpt2-xl@gtx-1080-ti", "-o", "tables")
    assert failed.exit_code == 1
    assert "tables: is there already" in failed.stderr


def test_shipped_traces_are_listed() -> None:
    listed = {each["name"]: each for each in json_of("trace", "show")}
    assert tuple(listed) == shipped_traces()
    found = listed["resnet1026@gtx-1080-ti"]
    assert (found["layers"], found["dtype"], found["sample"]) == (515, "float32", "float32 3 x 224 x 224")
    assert found["microbatches"][-1] == 64
    assert listed["llama3.1-8b@h100"]["sample"] == "1024 tokens"
    assert "qwen3-32b@rtx-3090" in succeed("trace", "show").stdout


def test_diff(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "made-up"))
    succeed("import", folder, "-o", "a.json")
    succeed("import", folder, "-o", "b.json", "--label-bytes", "4")
    assert json_of("trace", "diff", "a.json", "a.json") == []
    assert "no difference" in succeed("trace", "diff", "a.json", "a.json").stdout
    (found,) = json_of("trace", "diff", "a.json", "b.json")
    assert (found["column"], found["ours"], found["theirs"]) == ("label_bytes_per_sample", 0, 4)
    assert "label_bytes_per_sample" in succeed("trace", "diff", "a.json", "b.json").stdout


@pytest.mark.skipif(not REFERENCE.exists(), reason="the measured profiles are not beside this checkout")
@pytest.mark.parametrize("model", ["gpt2_b_1layer", "bert_96", "gpt2_10b", "resnet1026"])
def test_measured_models_are_simulated_and_searched(model: str) -> None:
    succeed("import", str(REFERENCE / model), "-o", "t.json")
    simulated = json_of(*SIMULATE, "--host-memory", "unlimited")
    assert simulated["provenance"].keys() <= {"imported", "interpolated"}
    packs = [str(len(simulated["plan"][name])) for name in ("packs_fwd", "packs_bwd")]
    found = json_of(
        "search", "t.json", "--machine", "4x1080ti", "--host-memory", "unlimited", "--minibatch", "8", "--policy",
        "harmony-pp", "--processes", "1", "--max-simulated", "2", "--top", "1", "--u-bwd", "1", "--update", "cpu",
        "--packs-fwd", packs[0], "--packs-bwd", packs[1],
    )  # fmt: skip
    assert 0 < found["best"]["step_time_s"] < 2 * simulated["step_time_s"]
