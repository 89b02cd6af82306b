"""The command ``harmony`` as tests call it, in this process."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from sim.cli.app import app


def harmony(*words: str) -> Result:
    """Whatever becomes of it."""
    return CliRunner().invoke(app, words, prog_name="harmony")


def succeed(*words: str) -> Result:
    """It ends well."""
    result = harmony(*words)
    assert result.exit_code == 0, result.output
    return result


def json_of(*words: str) -> Any:
    """What it prints with ``--json``."""
    return json.loads(succeed(*words, "--json").stdout)
