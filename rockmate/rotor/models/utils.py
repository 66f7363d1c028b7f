"""Modules for writing models as sequences of layers that can each run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn


class AtomicSequential(nn.Sequential):
    """An ``nn.Sequential`` that ``Checkpointable`` takes as one layer."""


class ReLUAtEnd(nn.Module):
    """``module`` and an in-place ReLU on its result, as one layer.

    A layer that starts with an in-place operation destroys its input and cannot run again from it. Joined with the
    layer before, the operation stays in place and nothing is destroyed that anybody needs.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.relu = module, nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.relu(self.module(x))
        return y


class Branches(nn.Module):
    """Branches side by side, whose results are concatenated, or added before a ReLU.

    A branch has steps. Each step has the names of those of ``layers`` that read the results of the step before.
    """

    def __init__(
        self, branches: Sequence[Sequence[Sequence[str]]], layers: Mapping[str, nn.Module], adds: bool = False
    ) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.branches, self.adds = tuple(tuple(map(tuple, steps)) for steps in branches), adds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results: list[torch.Tensor] = []
        for steps in self.branches:
            made = [x]
            for names in steps:
                made = [self.get_submodule(name)(y) for y in made for name in names]
            results += made
        if not self.adds:
            return torch.cat(results, 1)
        results[0] += results.pop()
        return F.relu(results[0], inplace=True)


class _ReLUAfter(nn.Module):
    """The same with the names of the parameters as without the ReLU, so that state dicts fit."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.relu(super().forward(input), inplace=True)


class Conv2dReLU(_ReLUAfter, nn.Conv2d):
    """A convolution and an in-place ReLU on its result."""


class LinearReLU(_ReLUAfter, nn.Linear):
    """A linear layer and an in-place ReLU on its result."""


class BatchNorm2dReLU(_ReLUAfter, nn.BatchNorm2d):
    """A batch norm and an in-place ReLU on its result."""


def initialize(model: nn.Module, mode: str, linear_std: float | None = None) -> None:
    """He et al. (2015) for convolutions, ``mode`` "fan_in" or "fan_out"; linear layers normal if given a deviation."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode=mode, nonlinearity="relu")  # type: ignore[arg-type]
        elif isinstance(module, nn.Linear) and linear_std is not None:
            nn.init.normal_(module.weight, 0, linear_std)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
