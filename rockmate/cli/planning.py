"""Plans for what a function of the user's returned: on the way that ``rockmate.attach`` takes in training."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rockmate import Rockmate
from rockmate.cli.load import Given
from rockmate.tell import be_silent


@dataclass(frozen=True)
class Options:
    """How plans are made: arguments of ``rockmate.attach``, and the type of autocast ("bfloat16"), or None."""

    costs: str = "measured"
    loss_memory: int | None = None
    solver: str = "auto"
    time_limit: float | None = None
    autocast: str | None = None
    compile: bool = False

    @property
    def arguments(self) -> dict[str, Any]:
        """Those of ``Rockmate`` and ``attach``."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "autocast"}

    @contextlib.contextmanager
    def precision(self, model: torch.nn.Module) -> Iterator[None]:
        """Autocast as asked for, on the device of the model."""
        if self.autocast is None:
            yield
            return
        device = next((p.device.type for p in model.parameters()), "cpu")
        with torch.autocast(device, dtype=getattr(torch, self.autocast)):
            yield


def planned(given: Given, budget: str, options: Options) -> Rockmate:
    """The model under the plan for ``budget``. Raises what ``Rockmate`` raises."""
    be_silent()
    with options.precision(given.model):
        return Rockmate(given.model, given.sample, budget, sample_kwargs=given.sample_kwargs, **options.arguments)
