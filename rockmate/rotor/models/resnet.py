"""ResNets (He et al., "Deep residual learning for image recognition", CVPR 2016) as ``nn.Sequential``.

Names of parameters and buffers are torchvision's, so its state dicts load.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from rockmate.rotor.models.utils import AtomicSequential, BatchNorm2dReLU, initialize


class Residual(nn.Module):
    """``relu(body(x) + shortcut(x))``; the body has convolutions of ``widths``, kernels and strides as given."""

    def __init__(
        self, inputs: int, widths: tuple[int, ...], kernels: tuple[int, ...], strides: tuple[int, ...]
    ) -> None:
        super().__init__()
        pairs = zip((inputs, *widths), widths, kernels, strides, strict=False)
        for k, (before, after, kernel, stride) in enumerate(pairs, 1):
            norm = nn.BatchNorm2d if k == len(widths) else BatchNorm2dReLU
            self.add_module(f"conv{k}", nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False))
            self.add_module(f"bn{k}", norm(after))
        self.body = [*self._modules]
        outputs, stride = widths[-1], max(strides)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            self.downsample = AtomicSequential(*shortcut)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x
        for name in self.body:
            out = self._modules[name](out)  # type: ignore[misc]
        out += x if self.downsample is None else self.downsample(x)
        y: torch.Tensor = self.relu(out)
        return y


class BasicBlock(Residual):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, (width, width), (3, 3), (stride, 1))


class Bottleneck(Residual):
    """1x1, 3x3 and 1x1 convolutions; the stride is that of the middle one."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, (width, width, 4 * width), (1, 3, 1), (1, stride, 1))


class ResNet(nn.Sequential):
    """Images (batch, 3, height, width) to scores (batch, ``num_classes``)."""

    def __init__(
        self, block: type[BasicBlock | Bottleneck], layers: tuple[int, int, int, int], num_classes: int = 1000
    ) -> None:
        super().__init__()
        self.add_module("conv1", nn.Conv2d(3, 64, 7, 2, padding=3, bias=False))
        self.add_module("bn1", BatchNorm2dReLU(64))
        self.add_module("maxpool", nn.MaxPool2d(3, 2, padding=1))
        inputs = 64
        for k, count in enumerate(layers):
            part = nn.Sequential()
            for n in range(count):
                part.append(block(inputs, 64 * 2**k, 2 if k and not n else 1))
                inputs = 64 * 2**k * block.expansion
            self.add_module(f"layer{k + 1}", part)
        self.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
        self.add_module("flatten", nn.Flatten())
        self.add_module("fc", nn.Linear(inputs, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                initialize(module, "fan_out")


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(ResNet, Bottleneck, (3, 8, 36, 3))
