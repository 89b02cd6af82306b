"""Where schedules run. A device is one more implementation of the façade in ``facade.py``; there are emulated GPUs
(``emulated.py``, with ``links.py`` and ``processor.py``) and CUDA (``cuda.py``)."""
