"""How long work tells how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[float, str], None]
"""(share done, from 0 to 1; what is being done now)."""


def silent(share: float, what: str) -> None:
    """Tell nobody."""
