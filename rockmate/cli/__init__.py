"""The command line ``rockmate``, also ``python -m rockmate``."""

from rockmate.cli.main import main

__all__ = ["main"]
