"""DenseNets (Huang et al., "Densely connected convolutional networks", CVPR 2017) as ``nn.Sequential``.

Each dense layer passes its input on, with what it computed appended, so a dense block is a chain as well. Names of
parameters and buffers are torchvision's, so its state dicts load.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import nn

from rockmate.rotor.models.utils import BatchNorm2dReLU, Branches, initialize


def dense_layer(inputs: int, growth: int, bn_size: int, drop_rate: float) -> Branches:
    """(batch, n, h, w) to (batch, n + growth, h, w)."""
    layers: dict[str, nn.Module] = {
        "norm1": BatchNorm2dReLU(inputs),
        "conv1": nn.Conv2d(inputs, bn_size * growth, 1, bias=False),
        "norm2": BatchNorm2dReLU(bn_size * growth),
        "conv2": nn.Conv2d(bn_size * growth, growth, 3, padding=1, bias=False),
    }
    if drop_rate > 0:
        layers["dropout"] = nn.Dropout(drop_rate)
    return Branches(((), [[name] for name in layers]), layers)


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
        width = num_init_features
        conv0 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        features = nn.Sequential(
            OrderedDict(conv0=conv0, norm0=BatchNorm2dReLU(width), pool0=nn.MaxPool2d(3, 2, padding=1))
        )
        for k, count in enumerate(block_config, start=1):
            if k > 1:
                norm, conv = BatchNorm2dReLU(width), nn.Conv2d(width, width // 2, 1, bias=False)
                transition = nn.Sequential(OrderedDict(norm=norm, conv=conv, pool=nn.AvgPool2d(2, 2)))
                features.add_module(f"transition{k - 1}", transition)
                width //= 2
            block = nn.Sequential()
            for n in range(1, count + 1):
                block.add_module(f"denselayer{n}", dense_layer(width, growth_rate, bn_size, drop_rate))
                width += growth_rate
            features.add_module(f"denseblock{k}", block)
        features.add_module("norm5", BatchNorm2dReLU(width))
        classifier = nn.Linear(width, num_classes)
        head = OrderedDict(avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), classifier=classifier)
        super().__init__(OrderedDict(features=features, **head))
        initialize(self, "fan_in")
        nn.init.zeros_(classifier.bias)


densenet121 = partial(DenseNet, 32, (6, 12, 24, 16), 64)
densenet161 = partial(DenseNet, 48, (6, 12, 36, 24), 96)
densenet169 = partial(DenseNet, 32, (6, 12, 32, 32), 64)
densenet201 = partial(DenseNet, 32, (6, 12, 48, 32), 64)
