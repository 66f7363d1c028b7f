"""DenseNets (Huang et al., "Densely connected convolutional networks", CVPR 2017) as ``nn.Sequential``.

Each dense layer passes its input on, with what it computed appended, so a dense block is a chain as well. Names of
parameters and buffers are torchvision's, so its state dicts load.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from rockmate.rotor.models.utils import BatchNorm2dReLU, initialize


class DenseLayer(nn.Module):
    """(batch, n, h, w) to (batch, n + growth, h, w)."""

    def __init__(self, inputs: int, growth: int, bn_size: int, drop_rate: float) -> None:
        super().__init__()
        self.norm1 = BatchNorm2dReLU(inputs)
        self.conv1 = nn.Conv2d(inputs, bn_size * growth, 1, bias=False)
        self.norm2 = BatchNorm2dReLU(bn_size * growth)
        self.conv2 = nn.Conv2d(bn_size * growth, growth, 3, padding=1, bias=False)
        self.drop_rate = drop_rate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.conv2(self.norm2(self.conv1(self.norm1(x))))
        if self.drop_rate > 0:
            new = F.dropout(new, self.drop_rate, self.training)
        return torch.cat([x, new], 1)


class DenseNet(nn.Sequential):
    """Images (batch, 3, height, width) to scores (batch, ``num_classes``)."""

    def __init__(
        self,
        growth_rate: int = 32,
        block_config: tuple[int, ...] = (6, 12, 24, 16),
        num_init_features: int = 64,
        bn_size: int = 4,
        drop_rate: float = 0.0,
        num_classes: int = 1000,
    ) -> None:
        width, features = num_init_features, nn.Sequential()
        features.add_module("conv0", nn.Conv2d(3, width, 7, 2, padding=3, bias=False))
        features.add_module("norm0", BatchNorm2dReLU(width))
        features.add_module("pool0", nn.MaxPool2d(3, 2, padding=1))
        for k, count in enumerate(block_config, start=1):
            if k > 1:
                half = BatchNorm2dReLU(width), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2, 2)
                transition = OrderedDict(zip(("norm", "conv", "pool"), half, strict=True))
                features.add_module(f"transition{k - 1}", nn.Sequential(transition))
                width //= 2
            block = nn.Sequential()
            for n in range(1, count + 1):
                block.add_module(f"denselayer{n}", DenseLayer(width, growth_rate, bn_size, drop_rate))
                width += growth_rate
            features.add_module(f"denseblock{k}", block)
        features.add_module("norm5", BatchNorm2dReLU(width))
        ends = features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)
        super().__init__(OrderedDict(zip(("features", "avgpool", "flatten", "classifier"), ends, strict=True)))
        initialize(self, "fan_in")


densenet121 = partial(DenseNet, 32, (6, 12, 24, 16), 64)
densenet161 = partial(DenseNet, 48, (6, 12, 36, 24), 96)
densenet169 = partial(DenseNet, 32, (6, 12, 32, 32), 64)
densenet201 = partial(DenseNet, 32, (6, 12, 48, 32), 64)
