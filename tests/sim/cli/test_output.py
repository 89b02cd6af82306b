"""Progress and files of commands, without any command."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import typer

from sim.cli.output import Output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_progress_and_a_file_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, expected in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr("sys.stderr", stream)
        with Output(False).progress() as report:
            report(0.5, "measuring layer 3")
        assert ("measuring layer 3" in stream.getvalue()) is expected


def test_files_are_written_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(False, tmp_path / "a.txt", None)
    out.write(tmp_path / "a.txt", ".txt", lambda path: path.write_text("here") and None)
    out.write(None, ".txt", lambda path: pytest.fail("not asked for"))
    assert (tmp_path / "a.txt").read_text() == "here"
    assert capsys.readouterr() == ("", f"wrote {tmp_path / 'a.txt'}\n")


def test_only_one_thing_goes_to_stdout() -> None:
    Output(True, Path("a"))
    Output(False, Path("-"))
    for as_json, files in ((True, ["-"]), (False, ["-", "-"])):
        with pytest.raises(typer.BadParameter, match="only one"):
            Output(as_json, *map(Path, files))
