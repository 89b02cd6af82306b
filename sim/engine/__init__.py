"""The simulator: from a Schedule, a Trace and a Machine to a predicted Timeline. See ``simulate.py``."""
