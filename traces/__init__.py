"""Traces: what models cost, layer by layer. Types in ``schema``, files in ``files``, questions in ``costs``."""

from .costs import Costs
from .errors import FileError, HarmonyError, TraceError
from .files import load_trace, save_trace, shipped_traces
from .schema import Layer, Phase, Provenance, SizeRow, TiedWeight, TimeRow, Trace

__all__ = [
    "Costs",
    "FileError",
    "HarmonyError",
    "Layer",
    "Phase",
    "Provenance",
    "SizeRow",
    "TiedWeight",
    "TimeRow",
    "Trace",
    "TraceError",
    "load_trace",
    "save_trace",
    "shipped_traces",
]
