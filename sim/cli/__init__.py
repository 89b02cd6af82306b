"""The command ``harmony``.

=================  ====================================================================================
``app.py``         the commands that plan and simulate; the others are in ``runs`` (of models, with the
                   executor), ``traces`` and ``timelines``
``options.py``     what several commands share; ``words``: what is written, as values
``output.py``      what commands print, and where; ``tables``: for people
=================  ====================================================================================
"""
