"""Parts of ``benchmarks/peers.py``: the models, the methods, what is measured, and the pages."""
