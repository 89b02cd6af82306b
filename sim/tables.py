"""A table for people: the same rows on a terminal (rich), in a notebook (HTML) and in plain text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

MISSING = "-"


@dataclass(frozen=True)
class Table:
    """Cells already written as text, units included. The first ``words`` columns are left-aligned, as words are, the
    others right-aligned."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1

    def __rich__(self) -> RenderableType:
        """The table as rich draws it."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index < self.words else "right", no_wrap=not index)
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def _repr_html_(self) -> str:
        """The table as a notebook shows it."""

        def line(cells: Iterable[str], tag: str) -> str:
            sides = ["left"] * self.words + ["right"] * (len(self.columns) - self.words)
            return "".join(
                f'<{tag} style="text-align: {side}">{escape(cell)}</{tag}>'
                for cell, side in zip(cells, sides, strict=True)
            )

        head = f"<thead><tr>{line(self.columns, 'th')}</tr></thead>"
        body = "".join(f"<tr>{line(row, 'td')}</tr>" for row in self.rows)
        return f"<table><caption>{escape(self.title)}</caption>{head}<tbody>{body}</tbody></table>"


def signed_percent(error: float | None) -> str:
    """A relative error as ``+3.1 %``; ``exact`` if there is none, a dash where there is nothing to relate it to."""
    if error is None:
        return MISSING
    if not error:
        return "exact"
    return f"{error:+.1%}".replace("%", " %") if abs(error) >= 0.0005 else "< 0.1 %"


def device_name(gpu: int | None) -> str:
    """``GPU 0``, or ``host``."""
    return "host" if gpu is None else f"GPU {gpu}"
