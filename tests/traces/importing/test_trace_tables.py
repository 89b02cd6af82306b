"""A trace as tables: what is written is read back, by hand less will do, and what is wrong is named."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from msgspec.structs import replace

from tests.strategies import traces
from traces.errors import FileError, TraceError
from traces.files import encode_trace, load_trace
from traces.importing import import_trace
from traces.importing.trace_tables import KINDS, Kind, write_trace
from traces.schema import Phase, Provenance, SizeRow, TimeRow, Trace
from traces.synthetic import skewed_trace, uniform_trace, with_frozen, with_tied

HAND = {
    "trace.json": json.dumps(
        {
            "format": "harmony-trace-tables", "version": 1, "model": "mine", "device": "a gpu", "dtype": "float32",
            "optimizer": "sgd", "label_bytes_per_sample": 8,
        }
    ),
    "layers.csv": "layer,name,kind,weight_bytes,gradient_bytes,optimizer_state_bytes\n"
    "0,first,linear,100,100,0\n1,loss,loss,0,0,0\n",
    "times.csv": "layer,phase,microbatch,duration_us\n"
    "0,forward,1,1.5\n1,forward,1,0.25\n0,backward,1,3\n1,backward,1,1e1\n0,update_cpu,0,7\n",
    "sizes.csv": "layer,microbatch,input_bytes,output_bytes,input_gradient_bytes,saved_bytes,workspace_bytes,"
    "forward_workspace_bytes\n0,1,16,8,0,8,20,8\n1,1,8,4,8,4,8,4\n",
}  # fmt: skip


def by_hand(folder: Path, **changed: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in HAND.items():
        (folder / name).write_text(changed.get(name.partition(".")[0], text))
    return folder


def in_order(trace: Trace) -> Trace:
    """The trace with its rows as an import orders them."""

    def place(row: TimeRow | SizeRow) -> tuple[int, int, int]:
        return row.layer, list(Phase).index(row.phase) if isinstance(row, TimeRow) else 0, row.microbatch

    return replace(trace, times=tuple(sorted(trace.times, key=place)), sizes=tuple(sorted(trace.sizes, key=place)))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=20)
@given(trace=traces())
def test_what_is_written_is_read_back(kind: Kind, trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("any") / "tables"
    write_trace(trace, folder, kind)
    assert import_trace(folder).trace == in_order(trace)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shipped_trace_survives_to_the_byte(kind: Kind, tmp_path: Path) -> None:
    shipped = load_trace("gpt2-xl@gtx-1080-ti")
    write_trace(shipped, tmp_path / "tables", kind)
    assert encode_trace(import_trace(tmp_path / "tables").trace) == encode_trace(shipped)


def test_names_with_commas_quotes_and_lines_survive(tmp_path: Path) -> None:
    trace = with_frozen(with_tied(skewed_trace(1, 4), (0, 2), 50), [1])
    odd = replace(trace.layers[0], name=' a, "b"\nc\r')
    trace = replace(trace, layers=(odd, *trace.layers[1:]), model="\r")
    write_trace(trace, tmp_path / "tables")
    assert import_trace(tmp_path / "tables").trace == in_order(trace)


def test_by_hand_only_what_has_no_default_is_needed(tmp_path: Path) -> None:
    trace = import_trace(by_hand(tmp_path)).trace
    assert (trace.model, trace.device, trace.label_bytes_per_sample) == ("mine", "a gpu", 8)
    assert [row.duration_ns for row in trace.times] == [1500, 3000, 7000, 250, 10_000]
    assert {row.provenance for row in (*trace.times, *trace.sizes)} == {Provenance.IMPORTED}


def test_rows_in_any_order_say_the_same(tmp_path: Path) -> None:
    rows = HAND["times.csv"].splitlines()
    shuffled = "\n".join([rows[0], *random.Random(3).sample(rows[1:], len(rows) - 1)])
    assert import_trace(by_hand(tmp_path / "b", times=shuffled)) == import_trace(by_hand(tmp_path / "a"))


WRONG = {
    "another version": ("trace", ("version\": 1", "version\": 2"), "trace.json: version: should begin"),
    "another format": ("trace", ("harmony-trace-tables", "harmony-trace"), "trace.json: version: should begin"),
    "no json": ("trace", ("{", "["), "trace.json: is not JSON"),
    "an unknown key": ("trace", ("dtype", "dtypes"), "has an unknown key 'dtypes'; did you mean dtype?"),
    "a missing key": ("trace", ("\"device\": \"a gpu\", ", ""), "has no device"),
    "a missing layer": ("times", ("1,forward,1,0.25\n", ""), "times, phase forward: layer 1 (loss) has no row"),
    "a layer number left out": ("layers", ("1,loss", "2,loss"), "layers.csv: row 3 (layer 2): there is no layer 2"),
    "a duplicate": (
        "sizes", ("1,1,8,4", "0,1,8,4"), "sizes.csv: row 3 (microbatch 1, layer 0): is there already, as row 2"
    ),
    "not a number": (
        "times", ("3\n", "nan\n"), "times.csv: row 4 (phase backward, microbatch 1, layer 0), duration_us: found 'nan'"
    ),
    "infinite": ("times", ("1.5", "inf"), "row 2 (phase forward, microbatch 1, layer 0), duration_us: found 'inf'"),
    "negative": ("layers", ("100,100", "-100,100"), "layers.csv: row 2 (layer 0), weight_bytes: found '-100'"),
    "words": ("sizes", ("16,8", "many,8"), "sizes.csv: row 2 (microbatch 1, layer 0), input_bytes: found 'many'"),
    "an absent column": ("layers", (",gradient_bytes", ",buffer_bytes"), "header: column gradient_bytes is missing"),
    "no unit": ("times", ("duration_us", "duration"), "column 'duration' has no unit; name it duration_seconds or"),
    "a bare time": ("times", ("duration_us", "time"), "column 'time' has no unit; name it duration_seconds or"),
    "a huge number": ("layers", ("100,100", f"{'9' * 30},100"), "row 2 (layer 0), weight_bytes: found '999"),
    "an unknown phase": ("times", ("0,update_cpu", "0,update_tpu"), "phase: found 'update_tpu'; write one of forward"),
    "boundaries that differ": ("sizes", ("16,8,", "16,9,"), "output_bytes is 9, but the input_bytes of layer 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    table, (old, new), expected = WRONG[name]
    text = next(text for file, text in HAND.items() if file.startswith(table))
    assert text.count(old) == 1
    with pytest.raises(TraceError) as caught:
        import_trace(by_hand(tmp_path, **{table: text.replace(old, new)}))
    assert expected in str(caught.value)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("cell", "shown"), [("[]]", "JSON"), ('"[{""group"": 3}]"', "JSON"), ("maybe", "found 'maybe'")]
)
def test_tied_parameters_are_json(tmp_path: Path, cell: str, shown: str) -> None:
    head, first, rest = HAND["layers.csv"].split("\n", 2)
    layers = f"{head},tied\n{first},{cell}\n{rest.strip()},\n"
    with pytest.raises(TraceError, match=r"layers\.csv: row 2 \(layer 0\), tied: found") as caught:
        import_trace(by_hand(tmp_path, layers=layers))
    assert shown in str(caught.value)


def test_a_table_must_be_there_once(tmp_path: Path) -> None:
    (by_hand(tmp_path) / "sizes.csv").unlink()
    with pytest.raises(TraceError, match=r"sizes\.csv or sizes\.parquet: neither is there"):
        import_trace(tmp_path)
    write_trace(uniform_trace(), tmp_path / "other", "parquet")
    (tmp_path / "other" / "times.parquet").rename(tmp_path / "times.parquet")
    (by_hand(tmp_path) / "sizes.csv").touch()
    with pytest.raises(TraceError, match="both are there"):
        import_trace(tmp_path)


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    write_trace(uniform_trace(), tmp_path / "tables", "parquet")
    table = tmp_path / "tables" / "times.parquet"
    table.write_bytes(table.read_bytes()[:-20])
    with pytest.raises(TraceError, match=r"times\.parquet: is not a Parquet file"):
        import_trace(tmp_path / "tables")


def test_a_folder_that_holds_something_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("x")
    with pytest.raises(FileError, match="not an empty folder"):
        write_trace(uniform_trace(), tmp_path)
    (tmp_path / "empty").mkdir()
    write_trace(uniform_trace(), tmp_path / "empty")
    assert {path.name for path in tmp_path.iterdir()} == {"mine", "empty"}
