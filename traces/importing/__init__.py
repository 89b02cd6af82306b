"""Traces from what others measured. ``import_trace`` in ``sources`` finds out what a source is and has it read.

    cells, tables      tables whose every cell is checked: CSV, Parquet
    profile            LayerProfile: what the public Harmony artifact measures of a model
    assembly           … from its five tables
    profile_tables     … in CSV files
    pickles            … in the artifact's own files
    derivation         … as a Trace: what is taken over, derived and modelled
    trace_tables       a Trace as tables, read and written; their columns in ``schema_columns``
    profiler           a Trace from annotations in a file of PyTorch's profiler, read by ``json_stream``

Wherever a source is wrong, the error names the file, the row or layer, the column, and what was found.
"""

from .sources import Imported, import_trace

__all__ = ["Imported", "import_trace"]
