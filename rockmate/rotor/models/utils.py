"""Modules for writing models as sequences of layers that can each run again."""

from __future__ import annotations

import torch
from torch import nn


class AtomicSequential(nn.Sequential):
    """An ``nn.Sequential`` that ``Checkpointable`` takes as one layer."""


class Flatten(nn.Module):
    """(batch, ...) to (batch, features)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


class ReLUAtEnd(nn.Module):
    """``module`` and an in-place ReLU on its result, as one layer.

    A layer that starts with an in-place operation destroys its input and cannot run again from it. Joined with the layer
    before, the operation stays in place and nothing is destroyed that anybody needs.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.relu(self.module(x))
        return y
