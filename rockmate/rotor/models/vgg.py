"""VGG (Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015).

As ``nn.Sequential``; names of parameters and buffers are torchvision's, so its state dicts load: layers keep the
numbers that they have there, where every ReLU is a layer of its own.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import nn

from rockmate.rotor.models.utils import BatchNorm2dReLU, Conv2dReLU, LinearReLU, initialize

# Convolutions of each of five parts, with these widths; a pooling ends each part.
_PARTS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_WIDTHS = (64, 128, 256, 512, 512)


class VGG(nn.Sequential):
    """Images (batch, 3, height, width) to scores (batch, ``num_classes``)."""

    def __init__(
        self, depth: int, batch_norm: bool, num_classes: int = 1000, init_weights: bool = True, dropout: float = 0.5
    ) -> None:
        features, number, inputs = nn.Sequential(), 0, 3
        for count, width in zip(_PARTS[depth], _WIDTHS, strict=True):
            for _ in range(count):
                convolution = nn.Conv2d if batch_norm else Conv2dReLU
                features.add_module(str(number), convolution(inputs, width, 3, padding=1))
                if batch_norm:
                    features.add_module(str(number + 1), BatchNorm2dReLU(width))
                number, inputs = number + 2 + batch_norm, width
            features.add_module(str(number), nn.MaxPool2d(2, 2))
            number += 1
        layers = (LinearReLU(512 * 7 * 7, 4096), nn.Dropout(dropout), LinearReLU(4096, 4096), nn.Dropout(dropout))
        classifier = OrderedDict(zip("02356", (*layers, nn.Linear(4096, num_classes)), strict=True))
        ends = OrderedDict(avgpool=nn.AdaptiveAvgPool2d(7), flatten=nn.Flatten(), classifier=nn.Sequential(classifier))
        super().__init__(OrderedDict(features=features, **ends))
        if init_weights:
            initialize(self, "fan_out", linear_std=0.01)


vgg11, vgg13, vgg16, vgg19 = (partial(VGG, depth, False) for depth in _PARTS)
vgg11_bn, vgg13_bn, vgg16_bn, vgg19_bn = (partial(VGG, depth, True) for depth in _PARTS)
