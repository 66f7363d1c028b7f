"""The backward of a step that is timed: how long it takes, and how much of that what runs again does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rkgb.device import kind_of
from rockmate.run.backward import Backward
from rockmate.run.store import Store


class TimedBackward(Backward):
    """``told`` is called when the first backward is over: with the nanoseconds since the forward began, and those of
    them in which operations ran again, with what was done for these.
    """

    def __init__(self, store: Store, device: torch.device, told: Callable[[int, int], None]) -> None:
        super().__init__(store)
        self._kind, self._device, self._told = kind_of(device), device, told
        self._began = self._kind.mark(device)
        self._stages: list[tuple[Any, Any]] = []

    def reach(self, i: int, k: int, _gradients: Any = None) -> None:
        """As in ``Backward``."""
        start = self._kind.mark(self._device)
        super().reach(i, k)
        self._stages.append((start, self._kind.mark(self._device)))

    def over(self) -> None:
        """As in ``Backward``."""
        super().over()
        if self._stages:
            total = self._kind.between(self._began, self._kind.mark(self._device))
            again = sum(self._kind.between(start, end) for start, end in self._stages)
            self._stages = []
            self._told(total, again)
