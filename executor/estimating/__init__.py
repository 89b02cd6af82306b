"""What a model would cost on a GPU that is not at hand: operators are counted on the meta device, and modelled.

===================  ===============================================================================
``estimate.py``      a Trace of a workload: a profile with a clock that counts
``counting.py``      the operators that work runs, with FLOPs and bytes; ``substitutes``: as on CUDA
``roofline.py``      how long they take; ``gpus``: on which GPU, every coefficient with its source
``masters.py``       Adam for half precision, with float32 copies
``shipped.py``       the estimates that come with Harmony
===================  ===============================================================================
"""
