"""One schedule at work, from the top down::

run.py           a Schedule, a workload and a machine → a measured Timeline
opening.py       a machine's memory and devices for it; measured.py its times as a Timeline
session.py       trains step by step: each task goes to whoever carries it out
lanes.py         a thread for every busy lane; waiting, failing, stopping
calculations.py  forward and backward tasks           ← roles.py, context.py, compute.py, recording.py, parts.py
updates.py       update tasks, and the gradient's norm ← optimizer.py, gradients.py, rules.py
transfers.py     copies, all-reduces and reductions
places.py        where tensors are                    ← arena.py, store.py; layout.py, passing.py, shards.py
storage.py       how much memory a piece of work takes
"""
