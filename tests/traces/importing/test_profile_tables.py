"""Profile tables: every cell is checked, and an error names file, row or layer, column and value."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.traces.importing.profile_folders import tables, write
from traces.errors import TraceError
from traces.importing import import_trace
from traces.importing.profile import Pass
from traces.importing.profile_tables import read_profile


def edited(folder: Path, name: str, old: str, new: str) -> Path:
    """The good folder with one passage of one table replaced (with ``old`` empty, the whole table)."""
    lines = tables()
    text = "\n".join(lines[name]) + "\n"
    assert text.count(old) == 1 or not old
    write(folder, lines)
    (folder / name).write_text(text.replace(old, new) if old else new)
    return folder


def test_a_good_folder_says_what_its_tables_say(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path))
    assert (profile.model, profile.device, profile.optimizer) == ("made-up", "gtx-1080-ti", "AdamW")
    assert profile.sizes[1] == (8_000_000, 1_000, 16_000_000)
    assert profile.times_ns[Pass.FORWARD][2] == (2_000_000, 2_000_001, 2_000_002)
    assert profile.times_ns[Pass.BACKWARD].microbatches == (1, 2)
    assert profile.peak_bytes[Pass.BACKWARD][1][0] == 8_010_080
    assert profile.input_bytes[4] == (320, 4_000, 1_600)
    assert profile.update_cpu_ns == (4_000_000, 8_000_000, 0)
    assert profile.update_gpu_ns is None


def test_rows_in_any_order_say_the_same(tmp_path: Path) -> None:
    good = import_trace(write(tmp_path / "good"))
    shuffled = {
        name: [lines[0], *random.Random(7).sample(lines[1:], len(lines) - 1)] for name, lines in tables().items()
    }
    assert shuffled != tables()
    assert import_trace(write(tmp_path / "shuffled", shuffled)) == good


def test_columns_in_any_order_and_times_in_other_units(tmp_path: Path) -> None:
    good = import_trace(write(tmp_path / "good")).trace
    lines = tables()
    lines["update_time.csv"] = ["cpu_us,layer", "4000,0", "8000.0,1", "0,2"]
    assert import_trace(write(tmp_path / "other", lines)).trace == good


def test_updates_on_the_gpu_that_were_measured_are_taken_over(tmp_path: Path) -> None:
    folder = edited(tmp_path, "update_time.csv", "0,0,0.004", "0,0.0005,0.004")
    assert read_profile(folder).update_gpu_ns == (500_000, 0, 0)


MUTANTS = {
    "a missing layer": (
        ("layer_time.csv", "FWD,2,1,0.002000001,0\n", ""),
        ("layer_time.csv: phase FWD, microbatch 2: has no row for layer 1",),
    ),
    "a layer too many": (
        ("activation.csv", "4,2,1600\n", "4,2,1600\n4,3,5\n"),
        ("activation.csv: row 11 (microbatch 4, layer 3): there is no layer 3; layers are 0-2",),
    ),
    "a duplicate": (
        ("activation.csv", "2,1,2000\n", "2,1,2000\n2,1,2000\n"),
        ("activation.csv: row 7 (microbatch 2, layer 1): is there already, as row 6",),
    ),
    "not a number": (
        ("layer_time.csv", "BWD,1,2,0.003500006", "BWD,1,2,nan"),
        ("layer_time.csv: row 13 (phase BWD, microbatch 1, layer 2), gpu_seconds: found 'nan'; write a time",),
    ),
    "infinite": (
        ("layer_time.csv", "FWD,1,0,0.001,", "FWD,1,0,inf,"),
        ("layer_time.csv: row 2 (phase FWD, microbatch 1, layer 0), gpu_seconds: found 'inf'",),
    ),
    "infinite by its exponent": (
        ("layer_time.csv", "FWD,1,0,0.001,", "FWD,1,0,1e999,"),
        ("row 2 (phase FWD, microbatch 1, layer 0), gpu_seconds: found '1e999'",),
    ),
    "negative time": (
        ("update_time.csv", "1,0,0.008", "1,0,-0.008"),
        ("update_time.csv: row 3 (layer 1), cpu_seconds: found '-0.008'",),
    ),
    "negative size": (
        ("layer_size.csv", "1,8000000,", "1,-8000000,"),
        ("layer_size.csv: row 3 (layer 1), weight_bytes: found '-8000000'; write a whole number",),
    ),
    "words": (
        ("layer_memory.csv", "FWD,1,0,4003080", "FWD,1,0,large"),
        ("layer_memory.csv: row 2 (phase FWD, microbatch 1, layer 0), bytes: found 'large'",),
    ),
    "words for a key": (
        ("layer_memory.csv", "FWD,1,0,4003080", "FWD,one,0,4003080"),
        ("layer_memory.csv: row 2 (phase FWD), microbatch: found 'one'; write a whole number from 1",),
    ),
    "an unknown phase": (
        ("layer_memory.csv", "FWD,1,0,4003080", "FORWARD,1,0,4003080"),
        ("layer_memory.csv: row 2, phase: found 'FORWARD'; write one of FWD, BWD",),
    ),
    "an empty cell": (
        ("activation.csv", "2,1,2000\n", "2,1,\n"),
        ("activation.csv: row 6 (microbatch 2, layer 1), input_bytes: found ''",),
    ),
    "too few cells": (
        ("activation.csv", "2,1,2000\n", "2,1\n"),
        ("activation.csv: row 6: has 2 cells, but there are 3 columns",),
    ),
    "an absent column": (
        ("layer_size.csv", "weight_bytes,buffer_bytes,", "weight_bytes,"),
        ("layer_size.csv: header: column buffer_bytes is missing",),
    ),
    "a column without a unit": (
        ("layer_time.csv", "gpu_seconds", "time"),
        ("layer_time.csv: header: column 'time' has no unit; name it gpu_seconds or gpu_ms or gpu_us or gpu_ns",),
    ),
    "a column misspelt": (
        ("layer_size.csv", "weight_bytes", "weights_bytes"),
        ("layer_size.csv: header: column 'weights_bytes' is unknown; did you mean weight_bytes?",),
    ),
    "a column twice": (
        ("layer_time.csv", "cpu_seconds", "gpu_ms"),
        ("layer_time.csv: header: column gpu is there twice",),
    ),
    "a huge number": (
        ("layer_size.csv", "1,8000000,", f"1,1{5000 * '0'},"),
        ("layer_size.csv: row 3 (layer 1), weight_bytes: found '1000000", "(5001 characters)"),
    ),
    "a fraction of a byte": (
        ("activation.csv", "2,1,2000\n", "2,1,2000.5\n"),
        ("activation.csv: row 6 (microbatch 2, layer 1), input_bytes: found '2000.5'",),
    ),
    "no rows": (
        ("update_time.csv", "", "layer,cpu_seconds\n"),
        ("update_time.csv: has no rows",),
    ),
    "nothing at all": (
        ("update_time.csv", "", ""),
        ("update_time.csv: header: column layer is missing; there are none",),
    ),
    "a quotation that does not end": (
        ("activation.csv", "2,1,2000\n", '2,1,"2000\n'),
        ("activation.csv: row", "is not CSV"),
    ),
    "time of the host": (
        ("layer_time.csv", "FWD,1,0,0.001,0", "FWD,1,0,0.001,0.5"),
        ("layer_time.csv: row 2 (phase FWD, microbatch 1, layer 0), cpu time: is not 0",),
    ),
    "a backward shorter than the forward in it": (
        ("layer_time.csv", "BWD,1,2,0.003500006", "BWD,1,2,0.0003500006"),
        ("layer_time.csv: layer 2, microbatch 1: BWD takes 350000.6", "less than the 1000002 ns of the FWD"),
    ),
    "less memory than the weights": (
        ("layer_memory.csv", "BWD,1,0,8010080", "BWD,1,0,10080"),
        ("layer_memory.csv: layer 0, phase BWD, microbatch 1: the peak is 10080 bytes", "4000080"),
    ),
    "an update of nothing": (
        ("update_time.csv", "2,0,0\n", "2,0,0.5\n"),
        ("update_time.csv: layer 2, update_cpu: takes 500000000", "no weights"),
    ),
    "a size without memory": (
        ("layer_memory.csv", "FWD,4,0,4012320\nFWD,4,1,8017000\nFWD,4,2,13600\n", ""),
        ("layer_memory.csv: phase FWD, microbatch 4: has no rows, but", "layer_time.csv has"),
    ),
    "a size without inputs": (
        ("activation.csv", "4,0,320\n4,1,4000\n4,2,1600\n", ""),
        ("activation.csv: microbatch 4: has no rows, but", "layer_time.csv has"),
    ),
    "a backward without its forward": (
        ("layer_time.csv", "FWD,2,0,0.002,0\nFWD,2,1,0.002000001,0\nFWD,2,2,0.002000002,0\n", ""),
        ("layer_time.csv: phase FWD, microbatch 2: has no rows",),
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    edit, expected = MUTANTS[name]
    with pytest.raises(TraceError) as caught:
        import_trace(edited(tmp_path, *edit))
    assert str(tmp_path) in str(caught.value)
    for words in expected:
        assert words in str(caught.value)


def test_a_table_that_is_missing_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "activation.csv").unlink()
    with pytest.raises(TraceError, match=r"activation\.csv: no such file"):
        import_trace(tmp_path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    table = write(tmp_path) / "activation.csv"
    table.write_bytes(table.read_bytes().replace(b"2,1,2000", b"2,1,\xff\xfe"))
    with pytest.raises(TraceError, match=r"activation\.csv: row 6: is not UTF-8"):
        import_trace(tmp_path)


def test_info_of_the_wrong_type_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "info.json").write_text('{"model": 3}')
    with pytest.raises(TraceError, match=r"info\.json.*model"):
        import_trace(tmp_path)


def test_without_info_the_folder_names_the_model(tmp_path: Path) -> None:
    (write(tmp_path) / "info.json").unlink()
    trace = import_trace(tmp_path, device="gpu").trace
    assert (trace.model, trace.device) == (tmp_path.name, "gpu")


def test_what_is_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        import_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="nothing that can be imported"):
        import_trace(tmp_path)
