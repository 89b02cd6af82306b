"""Errors a user can act on.

    HarmonyError                 anything Harmony refuses, with what to change
    ├── TraceError               a trace file or table is wrong (traces)
    ├── FileError                a file cannot be written
    └── …                        see sim/errors.py and executor/errors.py

Every error keeps its facts as arguments (so that it survives being raised anew by another process) and builds
its sentence when printed.
"""

from __future__ import annotations


class HarmonyError(Exception):
    """Base of every error that is the input's fault, or the machine's, and not a defect of Harmony."""


class TraceError(HarmonyError):
    """A trace does not hold: says in which file, where in it, and what was found."""

    def __init__(self, source: str, where: str, problem: str) -> None:
        super().__init__(source, where, problem)
        self.source, self.where, self.problem = source, where, problem

    def __str__(self) -> str:
        place = f"{self.source}: {self.where}" if self.where else self.source
        return f"{place}: {self.problem}"


class FileError(HarmonyError):
    """A file cannot be written: says which, why, and what to do."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(path, problem)
        self.path, self.problem = path, problem

    def __str__(self) -> str:
        return f"{self.path}: {self.problem}"
