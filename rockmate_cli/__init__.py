"""The command line ``rockmate``, also ``python -m rockmate``.

A package of its own, since whatever is imported from ``rockmate`` imports torch first, which takes seconds: help, and
errors in what was typed, come without torch.
"""

from rockmate_cli.main import main

__all__ = ["main"]
