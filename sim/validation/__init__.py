"""Does a Schedule hold together? See ``validate.py``."""
