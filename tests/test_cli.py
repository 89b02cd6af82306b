"""The command line: what is printed where, exit codes, and that words become the right values."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sim.hardware.files import load_machine
from sim.plan import HarmonyPlan
from sim.schedule_files import load_schedule, save_schedule
from sim.timelines.timeline import load_timeline, save_timeline
from sim.views.grid import grid
from tests.command_line import harmony, json_of, succeed
from tests.sim.made_timelines import data_parallel, pipeline, timeline
from traces.files import save_trace
from traces.synthetic import uniform_trace

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    save_trace(uniform_trace(6), "t.json")


SIMULATE = ("simulate", "t.json", "-m", "4x1080ti", "--gpus", "2", "--minibatch", "8")


# Every command


COMMANDS = [
    ("demo",),
    ("profile",),
    ("import",),
    ("calibrate",),
    ("machines",),
    ("trace", "show"),
    ("trace", "diff"),
    ("trace", "export"),
    ("search",),
    ("simulate",),
    ("run",),
    ("why",),
    ("compare",),
    ("plot", "lanes"),
    ("plot", "swap"),
    ("plot", "memory"),
    ("export",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_and_json(command: tuple[str, ...]) -> None:
    text = succeed(*command, "--help").stdout
    assert f"Example: harmony {' '.join(command)}" in text or f"Examples: harmony {' '.join(command)}" in text
    assert "--json" in text


def test_help_lists_every_command() -> None:
    text = succeed("--help").stdout
    assert all(f" {command[0]} " in text for command in COMMANDS)


def test_version() -> None:
    assert succeed("--version").stdout == "harmony 0.1.0\n"


def test_usage_errors_are_2_and_failures_1() -> None:
    assert harmony("simulate").exit_code == 2
    assert harmony("no-such-command").exit_code == 2
    assert harmony(*SIMULATE, "--policy", "harmony-xx").exit_code == 2
    failed = harmony("trace", "show", "nothing.json")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: nothing.json: no such file")
    assert "Traceback" not in failed.output


def test_a_failure_is_one_message_without_a_traceback_in_a_real_process() -> None:
    program = [sys.executable, "-c", "from sim.cli.app import main; main()", "machines", "4x1080tj"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "did you mean '4x1080ti'" in done.stderr
    assert "Traceback" not in done.stderr


# What there is


def test_machines() -> None:
    names = [machine["name"] for machine in json_of("machines")]
    assert {"4x1080ti", "8x1080ti-2switch", "4x4090", "1x-h200", "emulated"} <= set(names)
    assert json_of("machines", "4x1080ti")["gpus"][3]["usable_bytes"] == load_machine("4x1080ti").gpus[3].usable_bytes
    shown = succeed("machines").stdout
    assert all(name in shown for name in names)


def test_trace_show() -> None:
    found = json_of("trace", "show", "t.json")
    assert (found["model"], found["layers"], found["weight_bytes"]) == ("uniform-6", 6, 5 * 4_000_000)
    assert {"microbatch", "forward_s", "backward_s", "input_bytes", "provenance"} == set(found["times"][0])
    assert "19.07 MiB" in succeed("trace", "show", "t.json").stdout


# Simulate


def test_simulate_json_keeps_the_contract() -> None:
    found = json_of(*SIMULATE, "--policy", "harmony-pp", "--u-fwd", "4", "--u-bwd", "2")
    assert found["policy"] == "harmony-pp"
    assert found["plan"]["u_fwd"] == 4
    assert found["plan"]["u_bwd"] == 2
    assert {
        "step_time_s", "throughput_samples_per_s", "peak_memory_bytes", "host_peak_bytes", "swap_in_bytes",
        "swap_out_bytes", "p2p_bytes", "allreduce_bytes", "busy_s", "lower_bound_s", "critical_path",
    } <= set(found)  # fmt: skip
    assert found["throughput_samples_per_s"] == pytest.approx(8 / found["step_time_s"])
    assert sum(found["critical_path"].values()) == pytest.approx(1)
    assert found["lower_bound_s"] <= found["step_time_s"]


def test_steps_that_overlap_have_a_period() -> None:
    plan = ("--policy", "harmony-pp", "--packs-bwd", "3")
    alone = json_of(*SIMULATE, *plan)
    found = json_of(*SIMULATE, *plan, "--overlap-steps", "--steps", "4")
    assert alone["period_s"] == alone["step_time_s"] == found["step_time_s"]
    assert (found["steps"], found["overlapping_steps"]) == (5, 4)
    assert found["period_s"] < found["step_time_s"]
    assert found["throughput_samples_per_s"] == pytest.approx(8 / found["period_s"])
    assert "steady period" in succeed(*SIMULATE, *plan, "--overlap-steps").stdout


def test_json_alone_is_on_stdout_and_tables_are_on_stderr() -> None:
    result = succeed(*SIMULATE, "--policy", "dp-swap", "--json")
    json.loads(result.stdout)
    assert "Busy time by lane" in result.stderr
    result = succeed(*SIMULATE, "--policy", "dp-swap")
    assert "Busy time by lane" in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--u-fwd", "2"), {"u_fwd": 2, "u_bwd": 2}),
        (("--u-bwd", "4"), {"u_fwd": 4, "u_bwd": 4}),
        ((), {"u_fwd": 1, "u_bwd": 1, "update": "cpu", "reduce": "ring", "prefetch": True, "slots": None}),
        (("--packs-bwd", "3"), {"packs_bwd": [[0, 1], [2, 3], [4, 5]]}),
        (
            ("--packs-bwd", "0-2,3,4-5", "--packs-fwd", "0-1,2-3"),
            {"packs_bwd": [[0, 2], [3, 3], [4, 5]], "packs_fwd": [[0, 1], [2, 3]]},
        ),
        (("--update", "gpu", "--reduce", "host", "--no-prefetch"),
         {"update": "gpu", "reduce": "host", "prefetch": False}),
        (("--packs-bwd", "1", "--packs-fwd", "0"), {"packs_bwd": [[0, 5]], "packs_fwd": []}),
        (("--policy", "harmony-pp", "--slots", "2"), {"policy": "harmony-pp", "slots": 2}),
        (("--packs-bwd", "3", "--stash", "keep"), {"stash": "keep"}),
        (("--packs-bwd", "4", "--resident-weights", "0,2-3"), {"resident_weights": [0, 2, 3], "resident_state": []}),
        (("--packs-bwd", "2", "--update", "gpu", "--resident-state", "1"), {"resident_state": [1]}),
        (("--packs-bwd", "4", "--stash", "swap,keep"), {"stash": ["swap", "keep"]}),
        (("--overlap-steps",), {"overlap_steps": True}),
        (("--policy", "harmony-pp", "--gpu-order", "1,0"), {"policy": "harmony-pp", "gpu_order": [1, 0]}),
    ],
)  # fmt: skip
def test_plan_options_become_the_plan(options: tuple[str, ...], expected: dict[str, Any]) -> None:
    plan = json_of(*SIMULATE, "--policy", "harmony-dp", *options)["plan"]
    assert {key: plan[key] for key in expected} == expected


@pytest.mark.parametrize("policy", ["dp-swap", "gpipe-swap", "1f1b-swap"])
def test_pager_options_become_the_plan(policy: str) -> None:
    plan = json_of(*SIMULATE, "--policy", policy)["plan"]
    assert (plan["residency"], plan["writeback"], plan["recompute"], plan["prefetch_depth"]) == (
        "lru",
        "always",
        True,
        0,
    )
    options = ("--residency", "next", "--writeback", "drop", "--u-fwd", "2", "--no-recompute", "--prefetch-depth", "3")
    plan = json_of(*SIMULATE, "--policy", policy, *options)["plan"]
    assert (plan["residency"], plan["writeback"], plan["u_fwd"], plan["u_bwd"]) == ("next", "drop", 2, 2)
    assert (plan["recompute"], plan["prefetch_depth"]) == (False, 3)


def test_what_if_options_change_the_machine() -> None:
    found = json_of(*SIMULATE, "--policy", "harmony-dp", "--gpu-memory", "60 MB")
    assert found["memory_cap_bytes"] == [60_000_000, 60_000_000]
    assert found["plan"]["gpus"] == 2
    tight = (*SIMULATE, "--policy", "dp-swap", "--gpu-memory", "60 MB", "--host-memory", "50 MB")
    refused = harmony(*tight)
    assert refused.exit_code == 1
    assert "does not fit on the host" in refused.stderr
    assert json_of(*tight[:-1], "unlimited")["host_peak_bytes"] > 50_000_000


def test_packs_grow_in_number_until_they_fit() -> None:
    roomy = json_of(*SIMULATE, "--policy", "harmony-dp", "--gpu-memory", "1 GB")["plan"]
    tight = json_of(*SIMULATE, "--policy", "harmony-dp", "--gpu-memory", "40 MB")["plan"]
    assert len(roomy["packs_bwd"]) == 1
    assert len(tight["packs_bwd"]) > 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "dp-swap", "--packs-bwd", "3"), "--packs-bwd is not an option of dp-swap plans"),
        (("--policy", "harmony-dp", "--residency", "lru"), "--residency is not an option of harmony-dp plans"),
        (("--policy", "harmony-dp", "--slots", "1"), "--slots is not an option of harmony-dp plans"),
        (("--policy", "harmony-pp", "--reduce", "host"), "--reduce is not an option of harmony-pp plans"),
        (("--policy", "harmony-dp", "--packs-bwd", "0"), "cannot be cut into 0 packs"),
        (("--policy", "1f1b-swap", "--slots", "1"), "--slots is not an option of 1f1b-swap plans"),
        (("--policy", "harmony-pp", "--no-recompute"), "--recompute is not an option of harmony-pp plans"),
        (("--policy", "harmony-dp", "--packs-bwd", "9"), "cannot be cut into 9 packs"),
        (("--policy", "harmony-dp", "--packs-bwd", "2", "--resident-weights", "2"), "there are packs 0-1"),
        (("--policy", "harmony-dp", "--packs-bwd", "2", "--resident-state", "1"), "use update gpu"),
        (("--policy", "dp-swap", "--minibatch", str(10**23)), "in microbatches of 1 forward and 1 backward makes"),
        (("--policy", "harmony-dp", "--steps", str(10**8)), "simulate at most"),
        (("--policy", "harmony-dp", "--packs-bwd", "4", "--stash", "keep,keep,keep"), "3 places for 2 stashes"),
        (("--policy", "harmony-dp", "--gpu-memory", "5 MB"), "does not fit on GPU 0"),
        (("--policy", "harmony-dp", "--u-fwd", "16"), "--extrapolate"),
        (("--policy", "harmony-pp", "--gpu-order", "0"), "gpu_order 0 must name each of GPUs 0-1 once"),
    ],
)
def test_plans_that_cannot_be_are_refused(options: tuple[str, ...], said: str) -> None:
    minibatch = ("--minibatch", "32") if "16" in options else ()
    refused = harmony(*SIMULATE, *minibatch, *options)
    assert refused.exit_code == 1
    assert said in refused.stderr


@pytest.mark.parametrize("packs", ["0-99999999999", "3-1"])
def test_runs_of_packs_that_name_none_or_too_many_are_refused(packs: str) -> None:
    refused = harmony(*SIMULATE, "--policy", "harmony-dp", "--packs-bwd", "4", "--resident-weights", packs)
    assert refused.exit_code == 2
    assert f"{packs} in" in refused.stderr


def test_a_plan_without_forward_packs_says_so() -> None:
    shown = succeed(*SIMULATE, "--policy", "harmony-dp", "--packs-bwd", "1").stdout
    assert re.search(r"--packs-fwd +none\n", re.sub(" +\n", "\n", shown))


FILES_THAT_CANNOT_BE_WRITTEN = [
    (("search", "t.json", "-m", "absent.toml", "--minibatch", "8", "-o", "no/b.json"), "no/b.json: cannot be written"),
    (("simulate", "t.json", "-m", "absent.toml", "-o", "no/p.csv"), "no/p.csv: cannot be written"),
    (("simulate", "t.json", "-m", "absent.toml", "-o", "p.txt"), "p.txt: a timeline's name ends in .parquet or .csv"),
    (("run", "absent.json", "--model", "mlp", "-m", "emulated", "-o", "no/m.csv"), "no/m.csv: cannot be written"),
    (("run", "absent.json", "--model", "mlp", "-m", "emulated", "-o", "m.txt"), "m.txt: a timeline's name ends in"),
    (("profile", "absent:model", "-o", "no/t.json"), "no/t.json: cannot be written"),
    (("calibrate", "-m", "absent.toml", "-o", "no/m.toml"), "no/m.toml: cannot be written"),
    (("plot", "lanes", "absent.csv", "-o", "no/l.png"), "no/l.png: cannot be written"),
    (("plot", "swap", "absent.csv", "-o", "l.gif"), "l.gif: a picture's name ends in .png, .svg, .pdf"),
    (("export", "absent.csv", "-o", "no/b.json"), "no/b.json: cannot be written"),
    (("export", "absent.csv", "-o", "b.gz"), "b.gz: a Chrome trace's name ends in .json or .json.gz"),
    (("demo", "-o", "t.json"), "t.json: cannot be written: File exists"),
]


@pytest.mark.parametrize(("words", "said"), FILES_THAT_CANNOT_BE_WRITTEN, ids=lambda value: "-".join(value)[:40])
def test_a_file_that_cannot_be_written_is_refused_before_anything_else(words: tuple[str, ...], said: str) -> None:
    refused = harmony(*words)
    assert refused.exit_code == 1
    assert said in refused.stderr
    assert [path.name for path in Path().iterdir()] == ["t.json"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "harmony-dp", "--save-schedule", "a.csv", "-o", "a.csv"), "two different files would be written"),
        (("--policy", "harmony-dp", "--gpu-memory", "9"), "write a number and a unit"),
        (("--policy", "harmony-dp", "--packs-bwd", "a-b"), "are not packs"),
        (("--policy", "harmony-dp", "--u-fwd", "0"), "--u-fwd"),
        ((), "--schedule S.json, or --policy P"),
        (("--schedule", "s.json", "--u-fwd", "2"), "--minibatch, --u-fwd cannot be combined with --schedule"),
        (("--policy", "harmony-dp", "-o", "-", "--json"), "only one of --json and files named -"),
    ],
)
def test_words_that_make_no_sense_are_usage_errors(options: tuple[str, ...], said: str) -> None:
    refused = harmony(*SIMULATE, *options)
    assert refused.exit_code == 2
    assert said in " ".join(refused.stderr.replace("│", " ").split())


def test_a_saved_schedule_simulates_the_same() -> None:
    plan = ("--policy", "harmony-pp", "--packs-bwd", "3")
    first = json_of(*SIMULATE, *plan, "--save-schedule", "s.json", "-o", "a.parquet")
    again = json_of("simulate", "t.json", "-m", "4x1080ti", "--gpus", "2", "--schedule", "s.json", "-o", "b.csv")
    assert again == first
    assert load_timeline("a.parquet") == load_timeline("b.csv")


def test_a_broken_schedule_is_refused_with_its_faults() -> None:
    succeed(*SIMULATE, "--policy", "harmony-pp", "--save-schedule", "s.json")
    schedule = load_schedule("s.json")
    assert isinstance(schedule.plan, HarmonyPlan)
    save_schedule(msgspec.structs.replace(schedule, tasks=schedule.tasks[:-1]), "s.json")
    refused = harmony("simulate", "t.json", "-m", "4x1080ti", "--gpus", "2", "--schedule", "s.json")
    assert refused.exit_code == 1
    assert "fault(s)" in refused.stderr


def test_a_dash_writes_the_file_to_stdout_and_tables_to_stderr() -> None:
    result = succeed(*SIMULATE, "--policy", "harmony-dp", "-o", "-")
    assert result.stdout.startswith("# harmony-timeline ")
    assert "step time" in result.stderr
    Path("piped.csv").write_text(result.stdout)
    succeed(*SIMULATE, "--policy", "harmony-dp", "-o", "file.csv")
    assert load_timeline("piped.csv") == load_timeline("file.csv")


def test_the_grid_is_printed_with_its_lines_whole() -> None:
    result = succeed(*SIMULATE, "--policy", "harmony-pp", "--grid", "--save-schedule", "s.json")
    drawn = grid(load_schedule("s.json"))
    assert max(map(len, drawn.splitlines())) > 120
    assert drawn in result.stdout


def test_steps_are_recorded() -> None:
    found = json_of(*SIMULATE, "--policy", "harmony-dp", "--steps", "3", "-o", "t.csv")
    assert found["steps"] == 3
    assert len(set(found["step_times_s"])) == 1


# Look at what happened


@pytest.fixture
def timelines() -> tuple[str, str]:
    save_timeline(timeline(pipeline()), "a.parquet")
    save_timeline(timeline(data_parallel()), "b.parquet")
    return "a.parquet", "b.parquet"


def test_why(timelines: tuple[str, str]) -> None:
    assert "What decided the step" in succeed(*SIMULATE, "--policy", "dp-swap", "--why", "-o", "why.parquet").stdout
    found = json_of("why", "why.parquet")
    assert sum(found["critical_path"].values()) == pytest.approx(1)
    pieces = found["pieces"]
    assert [piece["start_ns"] for piece in pieces] == [0, *(piece["end_ns"] for piece in pieces[:-1])]
    assert "What decided the step" in succeed("why", "why.parquet").stdout
    assert "does not say what decided its step" in harmony("why", timelines[0]).stderr


def test_compare(timelines: tuple[str, str]) -> None:
    found = json_of("compare", timelines[0], timelines[0])
    assert found["step_time_error"] == 0
    assert set(found["lanes"]) == {"0", "1", "host"}
    assert found["tensor_kinds"]["weight"]["swap_in"]["error"] == 0
    assert "step time" in succeed("compare", timelines[0], timelines[0]).stdout
    refused = harmony("compare", *timelines)
    assert refused.exit_code == 1
    assert "of different schedules" in refused.stderr


@pytest.mark.parametrize("what", ["lanes", "swap", "memory"])
def test_plots(timelines: tuple[str, str], what: str) -> None:
    result = succeed("plot", what, *timelines, "-o", "x.png")
    assert result.stderr == "wrote x.png\n"
    assert Path("x.png").read_bytes().startswith(b"\x89PNG")
    refused = harmony("plot", what, *timelines, "-o", "x.txt")
    assert refused.exit_code == 1
    assert "ends in .png, .svg, .pdf" in refused.stderr


def test_export(timelines: tuple[str, str]) -> None:
    assert json_of("export", *timelines, "-o", "x.json")["timelines"] == ["a", "b"]
    read = json.loads(Path("x.json").read_text())
    assert {"traceEvents", "displayTimeUnit"} <= set(read)
    piped = succeed("export", timelines[0], "-o", "-")
    assert len(json.loads(piped.stdout)["traceEvents"]) > 0


# Progress


def test_no_progress_bar_off_a_terminal() -> None:
    result = succeed(*SIMULATE, "--policy", "harmony-dp")
    assert "\x1b" not in result.output
    assert result.stderr == ""
