"""What commands print, and where: results on stdout, everything else on stderr.

With ``--json`` a result is one JSON value, and what people read goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from traces.errors import HarmonyError
from traces.files import check_writable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

STDOUT = "-"


ReportProgress = Callable[[float, str], None]
"""Called with the share done (0 to 1) and what is being done now."""


class Commands(TyperGroup):
    """A group of commands whose failures are one clear message on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            return super().invoke(ctx)
        except HarmonyError as error:
            _fail(str(error))
        except BrokenPipeError:  # whoever read our output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(1) from None
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "transformers", "psutil"):
                raise
            _fail(f"{error.name} is not installed, and this command runs models; pip install 'harmony[executor]'")


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)


class Output:
    """Where one command prints.

    ``files`` are the paths that it was asked to write (None: not asked). One of them, or the JSON value, may go to
    stdout; then what people read goes to stderr. Raises FileError at once, before hours of work, if a file cannot be
    written.
    """

    def __init__(self, as_json: bool, *files: Path | None) -> None:
        on_stdout = sum(str(path) == STDOUT for path in files) + as_json
        if on_stdout > 1:
            raise typer.BadParameter("only one of --json and files named - can be written to stdout")
        written = [path for path in files if path is not None and str(path) != STDOUT]
        for number, path in enumerate(written):
            if path.absolute() in [other.absolute() for other in written[:number]]:
                raise typer.BadParameter(f"two different files would be written to {path}; give each its own name")
            check_writable(path)
        self._as_json, self._people_read_stdout = as_json, not on_stdout

    def result(self, value: Any, *shown: RenderableType) -> None:
        """Print the command's result: ``value`` as JSON if that was asked for, ``shown`` for people."""
        console = self._console(err=not self._people_read_stdout)
        for part in shown:
            if isinstance(part, str):  # a drawing, whose lines must not be broken
                console.print(part, markup=False, highlight=False, soft_wrap=True)
            else:
                console.print(part)
        if self._as_json:
            typer.echo(json.dumps(value, allow_nan=False, indent=2))

    def say(self, message: str) -> None:
        """Tell what happens meanwhile, on stderr."""
        typer.echo(message, err=True)

    @contextmanager
    def progress(self) -> Iterator[ReportProgress]:
        """A progress bar on stderr, if that is a terminal."""
        if not sys.stderr.isatty():
            yield _tell_nobody
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
        with Progress(*columns, console=self._console(err=True), transient=True) as bar:
            task = bar.add_task("", total=1.0)

            def report(share: float, what: str) -> None:
                bar.update(task, completed=share, description=what)

            yield report

    def write(self, path: Path | None, suffix: str, save: Callable[[Path], None]) -> None:
        """Write a file if it was asked for: ``save`` does it. ``-`` is stdout, in the form that ``suffix`` means."""
        if path is None:
            return
        if str(path) != STDOUT:
            save(path)
            self.say(f"wrote {path}")
            return
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / f"out{suffix}"
            save(written)
            sys.stdout.buffer.write(written.read_bytes())
            sys.stdout.buffer.flush()

    def _console(self, *, err: bool) -> Console:
        from rich.console import Console

        console = Console(stderr=err)
        # In a pipe or a file there is no width to keep to; tables are as wide as they must be.
        return console if console.is_terminal else Console(stderr=err, width=200)


def _tell_nobody(share: float, what: str) -> None:
    pass
