"""Inception v3 (Szegedy et al., "Rethinking the inception architecture for computer vision", CVPR 2016), sequential.

Names of parameters and buffers are those of torchvision's ``inception_v3(aux_logits=False)``, so its state dicts load.
The auxiliary classifier hangs at the side of the chain and is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

_POOLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "avg": lambda x: F.avg_pool2d(x, 3, stride=1, padding=1),
    "max": lambda x: F.max_pool2d(x, 3, stride=2),
}
# Branches are parted by ";". A step is a pool, or a convolution: name, outputs, kernel (11 if none), and "/" if it
# halves the image, where it is not padded. Convolutions joined by "+" read the same, and are concatenated.
_DOUBLE = "3x3dbl_1 64, 3x3dbl_2 96 33, 3x3dbl_3 96 33"
_AT_35 = "1x1 64; 5x5_1 48, 5x5_2 64 55; " + _DOUBLE + "; avg, _pool {}"
_AT_17 = (
    "1x1 192; 7x7_1 {0}, 7x7_2 {0} 17, 7x7_3 192 71; "
    "7x7dbl_1 {0}, 7x7dbl_2 {0} 71, 7x7dbl_3 {0} 17, 7x7dbl_4 {0} 71, 7x7dbl_5 192 17; avg, _pool 192"
)
_AT_8 = (
    "1x1 320; 3x3_1 384, 3x3_2a 384 13 + 3x3_2b 384 31; "
    "3x3dbl_1 448, 3x3dbl_2 384 33, 3x3dbl_3a 384 13 + 3x3dbl_3b 384 31; avg, _pool 192"
)
_MIXED = {
    **{f"Mixed_5{k}": _AT_35.format(pool) for k, pool in zip("bcd", (32, 64, 64), strict=True)},
    "Mixed_6a": f"3x3 384 33/; {_DOUBLE}/; max",
    **{f"Mixed_6{k}": _AT_17.format(inner) for k, inner in zip("bcde", (128, 160, 160, 192), strict=True)},
    "Mixed_7a": "3x3_1 192, 3x3_2 320 33/; 7x7x3_1 192, 7x7x3_2 192 17, 7x7x3_3 192 71, 7x7x3_4 192 33/; max",
    **{f"Mixed_7{k}": _AT_8 for k in "bc"},
}


class BasicConv2d(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple[int, int], stride: int, same: bool) -> None:
        super().__init__()
        padding = (kernel[0] // 2, kernel[1] // 2) if same else (0, 0)
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class Mixed(nn.Module):
    """Branches side by side, their results concatenated; ``text`` as above."""

    def __init__(self, inputs: int, text: str) -> None:
        super().__init__()
        self.branches: list[list[list[str]]] = []
        self.outputs = 0
        for branch in text.split("; "):
            width, steps = inputs, []
            for step in branch.split(", "):
                forks = [fork.split() for fork in step.split(" + ")]
                steps.append([forks[0][0] if step in _POOLS else f"branch{name}" for name, *_ in forks])
                if step not in _POOLS:
                    for name, outputs, *kernel in forks:
                        k = kernel[0] if kernel else "11"
                        shape, halves = (int(k[0]), int(k[1])), k.endswith("/")
                        self.add_module(
                            f"branch{name}", BasicConv2d(width, int(outputs), shape, 1 + halves, not halves)
                        )
                    width = sum(int(outputs) for _, outputs, *_ in forks)
            self.branches.append(steps)
            self.outputs += width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        results = []
        for steps in self.branches:
            y = x
            for names in steps:
                made = [_POOLS[name](y) if name in _POOLS else self.get_submodule(name)(y) for name in names]
                y = made[0] if len(made) == 1 else torch.cat(made, 1)
            results.append(y)
        return torch.cat(results, 1)


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
        for name, text in _MIXED.items():
            mixed = Mixed(width, text)
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
