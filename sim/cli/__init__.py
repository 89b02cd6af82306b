"""The command ``harmony``. See ``app.py``."""
