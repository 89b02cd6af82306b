"""The artifact's own profiles: plain data comes over, and nothing in a pickle is ever run."""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.traces.importing import pickled_profiles, profile_folders
from traces.errors import TraceError
from traces.importing import import_trace

REFERENCE = Path(__file__).parents[4] / "shared" / "reference"

Files = dict[str, Any]


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Files:
    return pickled_profiles.objects(monkeypatch)


def test_pickles_say_what_tables_say(tmp_path: Path, files: Files) -> None:
    found = import_trace(pickled_profiles.write(tmp_path / "made-up", files)).trace
    tables = import_trace(
        profile_folders.write(tmp_path / "tables"), label_bytes_per_sample=pickled_profiles.LABEL_BYTES
    ).trace
    assert found == replace(tables, optimizer="unknown")


def test_the_folder_of_the_pickles_may_be_named_itself(tmp_path: Path, files: Files) -> None:
    folder = pickled_profiles.write(tmp_path / "made-up", files)
    assert import_trace(folder / "prof") == import_trace(folder)


@pytest.mark.skipif(not REFERENCE.exists(), reason="the artifact's profiles are not beside this checkout")
@pytest.mark.parametrize("model", ["gpt2_b_1layer", "gpt2_medium"])
def test_published_profiles_are_the_tables_made_of_them(model: str) -> None:
    """Times in the tables have ten digits."""
    found = import_trace(REFERENCE / "artifact_profiles" / model).trace
    tables = import_trace(REFERENCE / "gtx1080ti" / model).trace
    assert (found.model, found.device, found.label_bytes_per_sample) == (model, tables.device, 8 * 1024)
    assert (found.layers, found.sizes) == (tables.layers, tables.sizes)
    assert [replace(row, duration_ns=0) for row in found.times] == [replace(row, duration_ns=0) for row in tables.times]
    for mine, theirs in zip(found.times, tables.times, strict=True):
        assert mine.duration_ns == pytest.approx(theirs.duration_ns, abs=1)


class Evil:
    """Its pickle calls something when it is loaded."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._call = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call


EVIL = {
    "posix.system": (os.system, "touch owned"),
    "builtins.eval": (eval, "open('owned', 'w')"),
    "builtins.getattr": (getattr, (), "__class__"),
    "builtins.exec": (exec, "open('owned', 'w')"),
}


@pytest.mark.parametrize("name", EVIL)
def test_a_pickle_that_names_anything_else_is_refused_by_that_name(
    tmp_path: Path, files: Files, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = pickled_profiles.write(tmp_path / "made-up", files)
    for file in ("TIME_FWDBWD", "KMETA"):
        harmless = (folder / "prof" / f"prof_{file}.pickle").read_bytes()
        (folder / "prof" / f"prof_{file}.pickle").write_bytes(pickle.dumps(Evil(*EVIL[name]), protocol=3))
        with pytest.raises(TraceError, match=rf"prof_{file}\.pickle: names {name}, so it was not loaded"):
            import_trace(folder)
        (folder / "prof" / f"prof_{file}.pickle").write_bytes(harmless)
    assert not (tmp_path / "owned").exists()


def test_a_known_class_cannot_be_called_into_doing_something(tmp_path: Path, files: Files) -> None:
    """Dictionaries and tuples may be made, dtypes not called; and no object gets at modules through attributes."""
    folder = pickled_profiles.write(tmp_path / "made-up", files)
    for program in (b"ctorch\nfloat32\n)R.", b"ctorch\nSize.__class__\n.", b"cprof_data_struct\nTime.__init__\n."):
        (folder / "prof" / "prof_TIME_UPD.pickle").write_bytes(program)
        with pytest.raises(TraceError, match=r"prof_TIME_UPD\.pickle: "):
            import_trace(folder)


def _set(files: Files, file: str, path: list[Any], value: Any) -> None:
    at = vars(files[file])
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value


WRONG: dict[str, tuple[str, list[Any], Any, str]] = {
    "not a number": (
        "TIME_FWDBWD", ["stats", "FWD", 2, 1, "GPU"], math.nan,
        "prof_TIME_FWDBWD.pickle: phase FWD, microbatch 2, layer 1, gpu_seconds: found 'nan'",
    ),
    "infinite": (
        "TIME_FWDBWD", ["stats", "BWD", 2, 1, "GPU"], math.inf,
        "phase BWD, microbatch 2, layer 1, gpu_seconds: found 'inf'",
    ),
    "negative": ("TIME_UPD", ["stats", "UPD", 0, "CPU"], -1.0, "TIME_UPD.pickle: layer 0, cpu_seconds: found '-1.0'"),
    "words": ("MEMORY_FWDBWD", ["stats", "FWD", 1, 0], "big", "phase FWD, microbatch 1, layer 0, bytes: found 'big'"),
    "huge": ("MEMORY_FWDBWD", ["stats", "FWD", 1, 0], 10**6000, "phase FWD, microbatch 1, layer 0, bytes: found '0x"),
    "another phase": ("MEMORY_FWDBWD", ["stats", "MID"], {1: {0: 1}}, "phase: found 'MID'; write one of FWD, BWD"),
    "no field": ("XMETA", ["stats"], 3, "prof_XMETA.pickle: has another form than the artifact's"),
    "no device": ("TIME_UPD", ["stats", "UPD", 0], {}, "TIME_UPD.pickle: has another form than the artifact's"),
    "no tensor": ("WMETA", ["param_size", 0], 3.5, "prof_WMETA.pickle: has another form than the artifact's"),
    "too many layers": (
        "XMETA", ["stats", 1, 9], None, "prof_XMETA.pickle: microbatch 1, layer 9: there is no layer 9; layers are 0-2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, files: Files, name: str) -> None:
    file, path, value, expected = WRONG[name]
    _set(files, file, path, value)
    with pytest.raises(TraceError) as caught:
        import_trace(pickled_profiles.write(tmp_path / "made-up", files))
    assert expected in str(caught.value)


def test_missing_layers_fields_and_files_are_named(tmp_path: Path, files: Files) -> None:
    del files["TIME_FWDBWD"].stats["FWD"][2][1]
    with pytest.raises(TraceError, match=r"TIME_FWDBWD\.pickle: phase FWD, microbatch 2: has no row for layer 1"):
        import_trace(pickled_profiles.write(tmp_path / "layer", files))
    del files["TIME_FWDBWD"].stats
    with pytest.raises(TraceError, match=r"TIME_FWDBWD\.pickle: has no stats; it holds nothing"):
        import_trace(pickled_profiles.write(tmp_path / "field", files))
    del files["KMETA"]
    with pytest.raises(TraceError, match="has no stats"):
        import_trace(pickled_profiles.write(tmp_path / "file", files))


@pytest.mark.parametrize("share", [0, 0.1, 0.9])
def test_a_truncated_pickle_is_named(tmp_path: Path, files: Files, share: float) -> None:
    file = pickled_profiles.write(tmp_path / "made-up", files) / "prof" / "prof_XMETA.pickle"
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(TraceError, match=r"prof_XMETA\.pickle: is no profile, or a damaged one"):
        import_trace(tmp_path / "made-up")
