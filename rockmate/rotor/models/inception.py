"""Inception v3 (Szegedy et al., "Rethinking the inception architecture for computer vision", CVPR 2016), sequential.

Names of parameters and buffers are those of torchvision's ``inception_v3(aux_logits=False)``, so its state dicts load.
The auxiliary classifier hangs at the side of the chain and is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class BasicConv2d(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int], stride: int, same: bool) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if same else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


@dataclass(frozen=True)
class Conv:
    """A ``BasicConv2d`` by name; ``same``: padded so that the size stays."""

    name: str
    outputs: int
    kernel: tuple[int, int] = (1, 1)
    stride: int = 1
    same: bool = True


Step = Conv | str | tuple[Conv, Conv]
Branch = tuple[Step, ...]
_POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg": lambda x: F.avg_pool2d(x, 3, stride=1, padding=1),
    "max": lambda x: F.max_pool2d(x, 3, stride=2),
}


class Mixed(nn.Module):
    """Branches side by side, their results concatenated. A pair of convolutions is a fork, concatenated too."""

    def __init__(self, inputs: int, branches: tuple[Branch, ...]) -> None:
        super().__init__()
        self.branches = branches
        self.outputs = 0
        for branch in branches:
            width = inputs
            for step in branch:
                forks = () if isinstance(step, str) else step if isinstance(step, tuple) else (step,)
                for c in forks:
                    self.add_module(c.name, BasicConv2d(width, c.outputs, c.kernel, c.stride, c.same))
                width = sum(c.outputs for c in forks) or width
            self.outputs += width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = []
        for branch in self.branches:
            y = x
            for step in branch:
                if isinstance(step, str):
                    y = _POOLS[step](y)
                elif isinstance(step, tuple):
                    y = torch.cat([self.get_submodule(c.name)(y) for c in step], 1)
                else:
                    y = self.get_submodule(step.name)(y)
            results.append(y)
        return torch.cat(results, 1)


def _mixed_35(pool: int) -> tuple[Branch, ...]:
    return (
        (Conv("branch1x1", 64),),
        (Conv("branch5x5_1", 48), Conv("branch5x5_2", 64, (5, 5))),
        (
            Conv("branch3x3dbl_1", 64),
            Conv("branch3x3dbl_2", 96, (3, 3)),
            Conv("branch3x3dbl_3", 96, (3, 3)),
        ),
        ("avg", Conv("branch_pool", pool)),
    )


_MIXED_35_TO_17: tuple[Branch, ...] = (
    (Conv("branch3x3", 384, (3, 3), 2, False),),
    (
        Conv("branch3x3dbl_1", 64),
        Conv("branch3x3dbl_2", 96, (3, 3)),
        Conv("branch3x3dbl_3", 96, (3, 3), 2, False),
    ),
    ("max",),
)


def _mixed_17(inner: int) -> tuple[Branch, ...]:
    return (
        (Conv("branch1x1", 192),),
        (Conv("branch7x7_1", inner), Conv("branch7x7_2", inner, (1, 7)), Conv("branch7x7_3", 192, (7, 1))),
        (
            Conv("branch7x7dbl_1", inner),
            Conv("branch7x7dbl_2", inner, (7, 1)),
            Conv("branch7x7dbl_3", inner, (1, 7)),
            Conv("branch7x7dbl_4", inner, (7, 1)),
            Conv("branch7x7dbl_5", 192, (1, 7)),
        ),
        ("avg", Conv("branch_pool", 192)),
    )


_MIXED_17_TO_8: tuple[Branch, ...] = (
    (Conv("branch3x3_1", 192), Conv("branch3x3_2", 320, (3, 3), 2, False)),
    (
        Conv("branch7x7x3_1", 192),
        Conv("branch7x7x3_2", 192, (1, 7)),
        Conv("branch7x7x3_3", 192, (7, 1)),
        Conv("branch7x7x3_4", 192, (3, 3), 2, False),
    ),
    ("max",),
)

_MIXED_8: tuple[Branch, ...] = (
    (Conv("branch1x1", 320),),
    (Conv("branch3x3_1", 384), (Conv("branch3x3_2a", 384, (1, 3)), Conv("branch3x3_2b", 384, (3, 1)))),
    (
        Conv("branch3x3dbl_1", 448),
        Conv("branch3x3dbl_2", 384, (3, 3)),
        (Conv("branch3x3dbl_3a", 384, (1, 3)), Conv("branch3x3dbl_3b", 384, (3, 1))),
    ),
    ("avg", Conv("branch_pool", 192)),
)

_MIXED: dict[str, tuple[Branch, ...]] = {
    "Mixed_5b": _mixed_35(32),
    "Mixed_5c": _mixed_35(64),
    "Mixed_5d": _mixed_35(64),
    "Mixed_6a": _MIXED_35_TO_17,
    "Mixed_6b": _mixed_17(128),
    "Mixed_6c": _mixed_17(160),
    "Mixed_6d": _mixed_17(160),
    "Mixed_6e": _mixed_17(192),
    "Mixed_7a": _MIXED_17_TO_8,
    "Mixed_7b": _MIXED_8,
    "Mixed_7c": _MIXED_8,
}


class Inception3(nn.Sequential):
    """Images (batch, 3, height, width), at least 75 wide and high, to scores (batch, ``num_classes``)."""

    def __init__(self, num_classes: int = 1000, init_weights: bool = True, dropout: float = 0.5) -> None:
        super().__init__()
        self.add_module("Conv2d_1a_3x3", BasicConv2d(3, 32, (3, 3), 2, False))
        self.add_module("Conv2d_2a_3x3", BasicConv2d(32, 32, (3, 3), 1, False))
        self.add_module("Conv2d_2b_3x3", BasicConv2d(32, 64, (3, 3), 1, True))
        self.add_module("maxpool1", nn.MaxPool2d(3, 2))
        self.add_module("Conv2d_3b_1x1", BasicConv2d(64, 80, (1, 1), 1, False))
        self.add_module("Conv2d_4a_3x3", BasicConv2d(80, 192, (3, 3), 1, False))
        self.add_module("maxpool2", nn.MaxPool2d(3, 2))
        width = 192
        for name, branches in _MIXED.items():
            mixed = Mixed(width, branches)
            self.add_module(name, mixed)
            width = mixed.outputs
        self.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
        self.add_module("dropout", nn.Dropout(dropout))
        self.add_module("flatten", nn.Flatten())
        self.add_module("fc", nn.Linear(width, num_classes))
        if init_weights:
            for module in self.modules():
                if isinstance(module, (nn.Conv2d, nn.Linear)):
                    nn.init.trunc_normal_(module.weight, std=0.1)


inception_v3 = Inception3
