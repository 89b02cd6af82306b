"""Traces: what models cost, layer by layer. Types in ``schema``, files in ``files``, questions in ``costs``.

==================  ==================================================================================
``schema.py``       a Trace and its rows; ``checks``, ``decode``: what is wrong with one
``files.py``        Trace files, and the shipped ones
``costs.py``        what planning and simulating ask: ``columns`` (one figure at any microbatch size),
                    ``runs`` (sums and maxima over layers), ``parts`` (backwards in two parts, modelled)
``formula.py``      traces from formulas: of GPT-2s (``transformer``), and made up ones (``synthetic``)
``summary.py``      a trace for people; ``diff``: two of them
``importing/``      traces from others' files
==================  ==================================================================================
"""

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
