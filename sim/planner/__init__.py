"""From what is left open to a Plan: the search for the best, and plain choices.

===========================  ================================================================================
``choice.py``                what someone has fixed; ``completion``: the plain plan that goes with it
``search.py``                the best plan of each policy: a ``hunt`` among its candidates, then variations of
                             the best; ``evaluate`` simulates each, ``processes`` help; ``result``, ``refusals``
``space.py``                 which plans are looked at: ``candidates`` (all by number), ``harmony_candidates``
                             (pairs of halves, with ``packing``), ``variations``
``estimates.py``             bounds from below, and ``expectations``, without building a schedule: from
                             ``jobs`` (made in ``group_work``, with ``residence``, ``ways``) and ``halves``; of
                             baselines ``paged_estimates``, ``sharded_estimates``
===========================  ================================================================================
"""
