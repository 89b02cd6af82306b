"""Traces from what others measured. ``import_trace`` in ``sources`` finds out what a source is and has it read.

sources            which kind of source is this?
cells, tables      tables whose every cell is checked: CSV
profile            LayerProfile: what the public Harmony artifact measures of a model
profile_tables     … from CSV tables
derivation         … as a Trace: what is taken over, derived and modelled
"""

from .sources import Imported, import_trace

__all__ = ["Imported", "import_trace"]
