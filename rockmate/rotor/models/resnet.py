"""ResNets (He et al., "Deep residual learning for image recognition", CVPR 2016) as ``nn.Sequential``.

Names of parameters and buffers are torchvision's, so its state dicts load.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from rockmate.rotor.models.utils import AtomicSequential, BatchNorm2dReLU


class Residual(nn.Module):
    """``relu(body(x) + shortcut(x))``; a subclass makes the body of named layers."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.make_body(inputs, width, stride)
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = AtomicSequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU(inplace=True)

    def make_body(self, inputs: int, width: int, stride: int) -> None:
        raise NotImplementedError

    def body(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.body(x)
        out += x if self.downsample is None else self.downsample(x)
        y: torch.Tensor = self.relu(out)
        return y


class BasicBlock(Residual):
    """Two 3x3 convolutions."""

    def make_body(self, inputs: int, width: int, stride: int) -> None:
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = BatchNorm2dReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.bn2(self.conv2(self.bn1(self.conv1(x))))
        return y


class Bottleneck(Residual):
    """1x1, 3x3 and 1x1 convolutions; the stride is that of the middle one."""

    expansion = 4

    def make_body(self, inputs: int, width: int, stride: int) -> None:
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = BatchNorm2dReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = BatchNorm2dReLU(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.bn3(self.conv3(self.bn2(self.conv2(self.bn1(self.conv1(x))))))
        return y


class ResNet(nn.Sequential):
    """Images (batch, 3, height, width) to scores (batch, ``num_classes``)."""

    def __init__(self, block: type[Residual], layers: tuple[int, int, int, int], num_classes: int = 1000) -> None:
        super().__init__()
        self.add_module("conv1", nn.Conv2d(3, 64, 7, 2, padding=3, bias=False))
        self.add_module("bn1", BatchNorm2dReLU(64))
        self.add_module("maxpool", nn.MaxPool2d(3, 2, padding=1))
        inputs = 64
        for k, count in enumerate(layers):
            width = 64 * 2**k
            outputs = width * block.expansion
            first = block(inputs, width, 1 if k == 0 else 2)
            rest = [block(outputs, width, 1) for _ in range(count - 1)]
            self.add_module(f"layer{k + 1}", nn.Sequential(first, *rest))
            inputs = outputs
        self.add_module("avgpool", nn.AdaptiveAvgPool2d(1))
        self.add_module("flatten", nn.Flatten())
        self.add_module("fc", nn.Linear(inputs, num_classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


resnet18 = partial(ResNet, BasicBlock, (2, 2, 2, 2))
resnet34 = partial(ResNet, BasicBlock, (3, 4, 6, 3))
resnet50 = partial(ResNet, Bottleneck, (3, 4, 6, 3))
resnet101 = partial(ResNet, Bottleneck, (3, 4, 23, 3))
resnet152 = partial(ResNet, Bottleneck, (3, 8, 36, 3))
