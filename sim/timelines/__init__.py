"""When everything happened, predicted or measured.

=====================  ===================================================================================
``timeline.py``        the Timeline: its tables (``table``), its files (``files``), its figures (``metrics``)
``compare.py``         two of one schedule, joined; ``comparison``: what that found
``critical_path.py``   what decided a step's end, with ``reasons`` and ``fullest_links``
``replay.py``          what follows from when tasks start and end; ``held``: what is held at the peak
``spans.py``           a timeline lane by lane, for pictures
=====================  ===================================================================================
"""
