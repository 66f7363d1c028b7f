"""The parts of ``benchmarks/gpu.py``: ``runner`` starts processes, ``page`` shows what they wrote.

Section ``versions`` is in ``ceilings``, ``tests`` in ``suite``, ``zoo`` in ``cases``, ``bytes`` in ``memory``, ``time``
in ``peaks_and_times``, ``launch`` in ``launches``, ``fits`` in ``batches``.
"""
