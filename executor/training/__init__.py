"""Training in a user's own loop, on top of ``running/``, from the top down::

trainer.py       Trainer: steps, evaluation, state
planning.py      how it comes by a schedule
automatic.py     "auto": a model, an optimizer and a batch → a schedule for the machine at hand
target.py        the machine at hand
batches.py       what a step may be given
handover.py      values go to the user between steps, and come back changed   ← changes.py
inference.py     forwards that leave no trace
checkpoint.py    training that goes on from where it stopped   ← series.py, optimizer_state.py, plain_values.py
folders.py       folders written whole; tensor_files.py what lies in them
"""
