"""JSON read piece by piece: what the whole file says, in the memory of a piece."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.errors import TraceError
from traces.importing import json_stream

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60)
@given(
    before=st.dictionaries(st.sampled_from("abc"), values),
    events=st.lists(values, max_size=6),
    after=st.dictionaries(st.sampled_from("xyz"), values),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    zipped=st.booleans(),
)
def test_pieces_add_up_to_the_whole(
    before: dict[str, Any],
    events: list[Any],
    after: dict[str, Any],
    chunk: int,
    indent: int | None,
    zipped: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    text = json.dumps({**before, "events": events, **after}, indent=indent, ensure_ascii=False).encode(
        errors="surrogatepass"
    )
    path.write_bytes(gzip.compress(text) if zipped else text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_stream, "_CHUNK", chunk)
        found = list(json_stream.entries(path, "events"))
    assert found == [*before.items(), *(("events", event) for event in events), *after.items()]


@pytest.mark.parametrize("number", ["1.5e16", "-1E+10", "0.25", "12", "-3e-2"])
def test_numbers_may_be_cut_anywhere(tmp_path: Path, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_CHUNK", 1)
    (tmp_path / "t.json").write_text(f'{{"events":[{number},{number} ]}}')
    assert list(json_stream.entries(tmp_path / "t.json", "events")) == [("events", float(number))] * 2


def test_a_long_file_takes_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.json.gz"
    event = json.dumps({"ph": "X", "name": "kernel", "args": "x" * 400})
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write('{"traceEvents": [' + ",".join([event] * 20_000) + "]}")
    tracemalloc.start()
    assert sum(1 for _ in json_stream.entries(path, "traceEvents")) == 20_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20 < 20_000 * len(event) // 8


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "is empty, or ends before an object"),
        ("[]", "an object is missing"),
        ('{"a" 1}', "a colon is missing"),
        ('{"a": 1', "a comma or the end of the object"),
        ('{"events": [1 2]}', "a comma or the end of the array is missing"),
        ('{"events": [{"dur": NaN}]}', "NaN is not a value that JSON has"),
        ('{"events": [{"dur": -Infinity}]}', "-Infinity is not a value that JSON has"),
        ('{"events": [{"dur": 1.}]}', "after 12 letters: is not JSON"),
        ("{1: 2}", "found 1 where a name should be"),
        ('{"a": "\\ud800', "is not JSON"),
    ],
)
def test_what_is_no_json_says_where(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        list(json_stream.entries(path, "events"))
    assert str(path) in str(caught.value)
    assert expected in str(caught.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(b'{"a": "\xff\xfe    "}')
    with pytest.raises(TraceError, match="is not UTF-8 text"):
        list(json_stream.entries(tmp_path / "t.json", "events"))


@pytest.mark.parametrize("left", [5, 40, -1])
def test_truncated_gzip_is_refused(tmp_path: Path, left: int) -> None:
    whole = gzip.compress(json.dumps({"events": list(range(1000))}).encode())
    (tmp_path / "t.json.gz").write_bytes(whole[:left])
    with pytest.raises(TraceError, match=r"t\.json\.gz: its compressed data is cut short or damaged"):
        list(json_stream.entries(tmp_path / "t.json.gz", "events"))
