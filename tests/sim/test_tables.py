"""Tables on terminals and in notebooks."""

from __future__ import annotations

import io

from rich.console import Console

from sim.tables import Table, device_name, signed_percent

TABLE = Table("Title", ("name", "what", "size"), (("a", "[bold]<b>", "1"), ("bb", "c", "22")), words=2)


def printed(table: Table) -> str:
    console = Console(width=60, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_cells_are_printed_as_they_are() -> None:
    text = printed(TABLE)
    assert "Title" in text
    assert "[bold]<b>" in text


def test_words_are_left_and_figures_right() -> None:
    header, _, *rows = [line for line in printed(TABLE).splitlines() if line.strip()][1:]
    assert {row.index("[bold]" if "[bold]" in row else "c") for row in rows} == {header.index("what")}
    assert len({row.rstrip().rindex("1" if "1" in row else "22") + ("22" in row) for row in rows}) == 1


def test_html_is_escaped_and_aligned() -> None:
    html = TABLE._repr_html_()
    assert "[bold]&lt;b&gt;" in html
    assert html.count("text-align: left") == 2 * 3
    assert html.count("text-align: right") == 3


def test_percentages_are_signed() -> None:
    written = [signed_percent(error) for error in (0.031, -0.5, 0.0, -0.0001, None)]
    assert written == ["+3.1 %", "-50.0 %", "exact", "< 0.1 %", "-"]


def test_device_names() -> None:
    assert (device_name(1), device_name(None)) == ("GPU 1", "host")
