"""Rockmate as one argument of other libraries: of transformers' Trainer, and of Lightning's. ``Meter`` serves both."""

from rockmate.integrations.meter import Meter

__all__ = ["Meter"]
