"""Errors of running models, all of them :class:`~traces.errors.HarmonyError`.

HarmonyError
├── ModelError       a model cannot be split into layers, or a layer does what a layer may not
└── WorkloadError    a model, its loss or its batches cannot be loaded
"""

from __future__ import annotations

from traces.errors import HarmonyError


class ModelError(HarmonyError):
    """A model cannot be split into layers, or a layer does what a layer may not: says which and what to change."""


class WorkloadError(HarmonyError):
    """A model, its loss or its batches cannot be loaded: says from where, and what was expected."""
