"""From what is left open to a Plan: the search for the best (``search.py``), and plain choices (``completion.py``)."""
