"""Trace files: what is written is read back, anything else is refused with its place, and nothing is half written."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from tests.strategies import traces
from traces.checks import check_trace
from traces.errors import FileError, TraceError
from traces.files import (
    check_writable,
    encode_trace,
    load_trace,
    make_folder,
    save_trace,
    shipped_traces,
    write_atomically,
)
from traces.schema import Phase, Provenance, Trace
from traces.synthetic import skewed_trace, uniform_trace, with_frozen, with_tied

Raw = dict[str, Any]


def _raw() -> Raw:
    """A good file, taken apart: 4 layers, the last a loss, a parameter tied between 0 and 2, layer 1 frozen."""
    trace = with_frozen(with_tied(uniform_trace(4, microbatches=(1, 2), weight_bytes=1000), (0, 2), 50), [1])
    raw: Raw = json.loads(encode_trace(trace))
    return raw


def _refusal(path: Path, data: str | bytes) -> str:
    """Load these bytes; the message of the TraceError, without the file's name that it must begin with."""
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


@settings(max_examples=50)
@given(trace=traces())
def test_what_is_saved_is_loaded(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    save_trace(trace, path)
    assert load_trace(path) == trace
    assert path.read_bytes() == encode_trace(load_trace(path))


def test_each_row_has_its_own_line_after_the_header(tmp_path: Path) -> None:
    trace = skewed_trace(1, 3, microbatches=(1, 2))
    save_trace(trace, tmp_path / "t.json")
    lines = (tmp_path / "t.json").read_text().splitlines()
    assert lines[1:3] == ['"format": "harmony-trace",', '"version": 1,']
    assert sum('"layer":' in line for line in lines) == len(trace.times) + len(trace.sizes)
    assert sum('"kind":' in line for line in lines) == len(trace.layers)
    assert json.loads("\n".join(lines))["model"] == "skewed-3-1"


def test_the_good_file_under_the_mutants_is_good(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps(_raw(), indent=3))
    assert load_trace(str(tmp_path / "t.json")).layers[1].trainable is False


def _set(*path: str | int, value: object) -> Callable[[Raw], None]:
    def mutate(raw: Raw) -> None:
        at: Any = raw
        for step in path[:-1]:
            at = at[step]
        at[path[-1]] = value

    return mutate


def _rename(*path: str | int, to: str) -> Callable[[Raw], None]:
    def mutate(raw: Raw) -> None:
        at: Any = raw
        for step in path[:-1]:
            at = at[step]
        at[to] = at.pop(path[-1])

    return mutate


def _drop(table: str, **having: object) -> Callable[[Raw], None]:
    def mutate(raw: Raw) -> None:
        raw[table] = [row for row in raw[table] if not having.items() <= row.items()]

    return mutate


def _repeat(table: str, row: int) -> Callable[[Raw], None]:
    return lambda raw: raw[table].append(dict(raw[table][row]))


def _row(table: str, column: str, value: object, **having: object) -> Callable[[Raw], None]:
    """Set a column in the rows that have these values."""

    def mutate(raw: Raw) -> None:
        for row in raw[table]:
            if having.items() <= row.items():
                row[column] = value

    return mutate


MUTANTS: dict[str, tuple[Callable[[Raw], None], str]] = {
    "negative time": (
        _set("times", 3, "duration_ns", value=-5),
        "times, row 3 (layer 0), duration_ns: found -5; expected int >= 0",
    ),
    "text for a number": (
        _set("times", 5, "duration_ns", value="12"),
        "times, row 5 (layer 1), duration_ns: found '12'; expected int, got str (a whole number, ",
    ),
    "fraction": (
        _set("sizes", 2, "saved_bytes", value=1.5),
        "sizes, row 2 (layer 1), saved_bytes: found 1.5; expected int, got float (a whole number",
    ),
    "truth for a number": (
        _set("layers", 2, "weight_bytes", value=True),
        "layers, layer 2 (layer2), weight_bytes: found True; expected int, got bool",
    ),
    "null": (_set("times", 0, "phase", value=None), "times, row 0 (layer 0), phase: found None; choose one of forward"),
    "huge": (
        _set("sizes", 0, "input_bytes", value=2**63),
        "sizes, row 0 (layer 0), input_bytes: found 9223372036854775808; expected int <= 4611686018427387904",
    ),
    "microbatch 0 in sizes": (
        _set("sizes", 0, "microbatch", value=0),
        "sizes, row 0 (layer 0), microbatch: found 0; expected int >= 1",
    ),
    "unknown phase": (
        _set("times", 0, "phase", value="foward"),
        "times, row 0 (layer 0), phase: found 'foward'; choose one of forward, backward, backward_input, ",
    ),
    "unknown provenance": (
        _set("sizes", 1, "provenance", value="guessed"),
        "sizes, row 1 (layer 0), provenance: found 'guessed'; choose one of measured, interpolated",
    ),
    "unknown key in a row": (
        _rename("times", 4, "duration_ns", to="duration"),
        "times, row 4 (layer 1): has an unknown key 'duration'; did you mean duration_ns?",
    ),
    "unknown key in the header": (
        _set("modle", value="x"),
        "header: has an unknown key 'modle'; did you mean model?",
    ),
    "unknown key like no other": (
        _set("layers", 0, "tied", 0, "zzz", value=1),
        "layers, layer 0 (layer0), tied, 0: has an unknown key 'zzz'; known keys: group, weight_bytes",
    ),
    "column missing": (
        lambda raw: raw["times"][6].pop("layer"),
        "times, row 6 (layer ?): has no layer; every row of times needs one",
    ),
    "header without model": (lambda raw: raw.pop("model"), "header: has no model; every trace needs one"),
    "table missing": (lambda raw: raw.pop("sizes"), "header: has no sizes; every trace needs one"),
    "table is no list": (_set("times", value={}), "times: found {}; expected array, got object"),
    "row is no object": (_set("times", 1, value=[1, 2]), "times, row 1 (layer ?): found [1, 2]; expected object"),
    "header of a wrong type": (_set("model", value=3), "header, model: found 3; expected str, got int"),
    "unknown version": (_set("version", value=2), "version: is 2; this Harmony reads version 1"),
    "version as text": (_set("version", value="1"), "version: is '1'; this Harmony reads version 1"),
    "version as truth": (_set("version", value=True), "version: is True; this Harmony reads version 1"),
    "no version": (lambda raw: raw.pop("version"), "version: is None; this Harmony reads version 1"),
    "another format": (
        _set("format", value="harmony-schedule"),
        "is not a trace: \"format\" should be 'harmony-trace', found 'harmony-schedule'",
    ),
    "no layers": (_set("layers", value=[]), "layers: is empty"),
    "layer that is not there": (
        _set("times", 2, "layer", value=4),
        "times, row 2 (layer 4, phase backward, microbatch 1): there is no layer 4; layers are 0-3",
    ),
    "duplicate time": (
        _repeat("times", 2),
        "(layer 0, phase backward, microbatch 1): is there already, as row 2; keep one of them",
    ),
    "duplicate size": (_repeat("sizes", 3), "(layer 1, microbatch 2): is there already, as row 3; keep one of them"),
    "forward without samples": (
        _set("times", 0, "microbatch", value=0),
        "times, row 0 (layer 0, phase forward, microbatch 0): microbatch is 0, but forward needs at least 1 sample",
    ),
    "update with samples": (
        _row("times", "microbatch", 2, layer=2, phase="update_gpu"),
        "phase update_gpu, microbatch 2): microbatch is 2, but update_gpu does not depend on the microbatch; write 0",
    ),
    "no forward": (_drop("times", layer=3, phase="forward"), "times, phase forward: layer 3 (layer3) has no row;"),
    "no backward": (_drop("times", layer=0, phase="backward"), "times, phase backward: layer 0 (layer0) has no row;"),
    "no forward at all": (_drop("times", phase="forward"), "times, phase forward: layer 0 (layer0) has no row;"),
    "no sizes": (_drop("sizes", layer=1), "sizes: layer 1 (layer1) has no row;"),
    "microbatch sizes differ": (
        _drop("times", layer=2, phase="backward", microbatch=2),
        "times, phase backward: layer 2 (layer2) has no row for microbatch 2, which other layers have",
    ),
    "gradient of a frozen layer": (
        _set("layers", 1, "gradient_bytes", value=7),
        "layers, layer 1 (layer1): gradient_bytes is 7, but a frozen layer has none; write 0",
    ),
    "state of a frozen layer": (
        _set("layers", 1, "optimizer_state_bytes", value=7),
        "layers, layer 1 (layer1): optimizer_state_bytes is 7, but a frozen layer has none; write 0",
    ),
    "update of a frozen layer": (
        _row("times", "layer", 1, layer=0, phase="update_cpu"),
        "(layer 1, phase update_cpu): duration_ns is 1050, but layer 1 (layer1) owns no trained weights",
    ),
    "update of a loss": (
        _row("times", "layer", 3, layer=0, phase="update_cpu"),
        "(layer 3, phase update_cpu): duration_ns is 1050, but layer 3 (layer3) owns no trained weights",
    ),
    "tied sizes differ": (
        _set("layers", 2, "tied", 0, "weight_bytes", value=49),
        "layers, layer 2 (layer2): tied group 'tied-0-2' has 49 bytes here and 50 in layer 0;",
    ),
    "tied more than there is": (
        _set("layers", 0, "weight_bytes", value=49),
        "layers, layer 0 (layer0): its tied groups hold 50 bytes, more than its weight_bytes 49;",
    ),
    "tied twice": (
        lambda raw: raw["layers"][0]["tied"].append(raw["layers"][0]["tied"][0]),
        "layers, layer 0 (layer0): tied names a group twice (tied-0-2, tied-0-2)",
    ),
    "boundary does not fit": (
        _row("sizes", "output_bytes", 5, layer=1, microbatch=2),
        "sizes, layer 1 (layer1), microbatch 2: output_bytes is 5, but the input_bytes of layer 2 (layer2) is 2000000;",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_refused_with_its_place_and_value(name: str, tmp_path: Path) -> None:
    mutate, expected = MUTANTS[name]
    raw = _raw()
    mutate(raw)
    assert expected in _refusal(tmp_path / "t.json", json.dumps(raw))


@pytest.mark.parametrize("word", ["NaN", "nan", "Infinity", "-Infinity", "-inf"])
def test_a_number_that_is_none_is_shown_with_its_row(word: str, tmp_path: Path) -> None:
    text = encode_trace(uniform_trace(3, microbatches=(1,))).decode()
    text = text.replace(
        '"backward","microbatch":1,"duration_ns":2200000', f'"backward","microbatch":1,"duration_ns":{word}', 1
    )
    line = next(number for number, each in enumerate(text.splitlines(), 1) if f":{word}," in each)
    message = _refusal(tmp_path / "t.json", text)
    assert message.startswith(f"near line {line}, column {text.splitlines()[line - 1].index(word) + 1}: ")
    assert f"{word} is not a value a trace may hold" in message
    assert '{"layer":0,"phase":"backward","microbatch":1,"duration_ns":' in message


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("", "is not JSON: input data was truncated (file of 0 bytes)"),
        (
            '{"format": "harmony-trace",\n "version": 1,}',
            "near line 2, column 15: is not JSON: trailing comma in object",
        ),
        ('{"format": "harmony-trace"} x', "near line 1, column 30: is not JSON: trailing characters"),
        ('{"format": nothing}', "near line 1, column 16: is not JSON: invalid character"),
        (b"\x80\x04\x95", "near line 1, column 1: is not JSON: invalid character"),
        (b'{"format": "\xff"}', "is not JSON: invalid UTF-8"),
        ("[" * 100_000, "is not JSON: maximum recursion depth exceeded"),
        ('{"format": "harmony-trace", "version": 1e999}', "is not JSON: number out of range"),
        ("[1, 2]", "is not a trace: \"format\" should be 'harmony-trace', found no JSON object"),
        ("{}", "is not a trace: \"format\" should be 'harmony-trace', found None"),
    ],
)
def test_what_is_no_trace_file_is_refused_with_its_place(data: str | bytes, expected: str, tmp_path: Path) -> None:
    assert _refusal(tmp_path / "t.json", data).startswith(expected)


def test_a_missing_file_lists_what_is_shipped(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no such file, nor a shipped trace of that name; shipped traces: .*gpt2-xl@"):
        load_trace(tmp_path / "absent.json")
    with pytest.raises(TraceError, match=r"did you mean the shipped trace gpt2-xl@gtx-1080-ti\?"):
        load_trace("gpt2-xl@gtx-1080")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        load_trace(tmp_path)


@pytest.mark.parametrize("name", shipped_traces())
def test_shipped_traces_load_by_name(name: str) -> None:
    trace = load_trace(name)
    assert name == f"{trace.model}@{trace.device}".lower().replace(" ", "-")
    assert {row.provenance for row in (*trace.times, *trace.sizes)} == {Provenance.MODELLED}
    assert trace.sample
    assert trace.modelled_by


def test_a_packed_trace_is_the_same_in_fewer_bytes(tmp_path: Path) -> None:
    trace = uniform_trace(40)
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    save_trace(trace, plain)
    save_trace(trace, packed)
    assert load_trace(packed) == load_trace(plain) == trace
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.stat().st_size < plain.stat().st_size / 5
    first = packed.read_bytes()
    save_trace(trace, packed)
    assert packed.read_bytes() == first


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: data[:40] + b"!!" + data[42:], lambda data: data[:2]]
)
def test_a_damaged_packed_trace_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = tmp_path / "t.json.gz"
    save_trace(uniform_trace(9), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(TraceError, match=r"cannot be unpacked: .* copy it anew"):
        load_trace(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1, 1.5, "7"])
def test_a_trace_made_in_memory_is_checked_before_it_is_written(value: Any, tmp_path: Path) -> None:
    trace = uniform_trace(3)
    rows = (replace(trace.times[0], duration_ns=value), *trace.times[1:])
    bad = replace(trace, times=rows)
    with pytest.raises(TraceError, match=r"times, row 0 \(layer 0\), duration_ns: found "):
        check_trace(bad, "made")
    with pytest.raises(TraceError, match="duration_ns"):
        save_trace(bad, tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_relations_are_checked_before_writing_too(tmp_path: Path) -> None:
    trace = uniform_trace(3)
    rows = tuple(row for row in trace.times if row.layer != 1 or row.phase is not Phase.FORWARD)
    with pytest.raises(TraceError, match=r"layer 1 \(layer1\) has no row"):
        save_trace(replace(trace, times=rows), tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"before")
    whole = Path.write_bytes

    def interrupted(self: Path, data: bytes) -> int:
        whole(self, data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_trace(uniform_trace(), path)
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"]
    assert path.read_bytes() == b"before"


def test_a_full_write_replaces_what_was_there_and_its_mode_follows_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"before")
    write_atomically(path, b"after")
    (tmp_path / "plain").write_bytes(b"")
    assert path.read_bytes() == b"after"
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plain", "t.json"]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileError, match=r"absent/t\.json: cannot be written: No such file or directory; make that folder"
    ):
        write_atomically(tmp_path / "absent" / "t.json", b"x")
    with pytest.raises(FileError, match="cannot be written: Is a directory; choose another place"):
        write_atomically(tmp_path, b"x")


def test_what_cannot_be_written_can_be_known_before(tmp_path: Path) -> None:
    (tmp_path / "there").write_bytes(b"kept")
    for path in (tmp_path / "absent" / "t.json", tmp_path, tmp_path / "there" / "t.json", tmp_path / ("long" * 80)):
        with pytest.raises(FileError) as before:
            check_writable(path)
        with pytest.raises(FileError) as after:
            write_atomically(path, b"x")
        assert str(before.value) == str(after.value)
    check_writable(tmp_path / "new")
    check_writable(tmp_path / "there")
    assert [each.name for each in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").read_bytes() == b"kept"


def test_a_folder_is_made_with_those_above_it_unless_a_file_is_in_the_way(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path / "file", tmp_path / "file" / "b"):
        with pytest.raises(FileError, match=f"{path}: cannot be written: "):
            make_folder(path)


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        check_writable(pipe)
        write_atomically(pipe, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
