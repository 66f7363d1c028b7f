"""VGG (Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015).

As ``nn.Sequential``; names of parameters and buffers are torchvision's, so its state dicts load: layers keep the
numbers that they have there, where every ReLU is a layer of its own.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from rockmate.rotor.models.utils import BatchNorm2dReLU, Conv2dReLU, LinearReLU, initialize

# Convolutions of each of five parts, with widths 64, 128, 256, 512, 512; a pooling ends each part.
_PARTS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
_WIDTHS = (64, 128, 256, 512, 512)


def _features(depth: int, batch_norm: bool) -> nn.Sequential:
    features = nn.Sequential()
    number, inputs = 0, 3
    for count, width in zip(_PARTS[depth], _WIDTHS, strict=True):
        for _ in range(count):
            if batch_norm:
                features.add_module(str(number), nn.Conv2d(inputs, width, 3, padding=1))
                features.add_module(str(number + 1), BatchNorm2dReLU(width))
            else:
                features.add_module(str(number), Conv2dReLU(inputs, width, 3, padding=1))
            number, inputs = number + (3 if batch_norm else 2), width
        features.add_module(str(number), nn.MaxPool2d(2, 2))
        number += 1
    return features


class VGG(nn.Sequential):
    """Images (batch, 3, height, width) to scores (batch, ``num_classes``)."""

    def __init__(
        self, depth: int, batch_norm: bool, num_classes: int = 1000, init_weights: bool = True, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self.add_module("features", _features(depth, batch_norm))
        self.add_module("avgpool", nn.AdaptiveAvgPool2d(7))
        self.add_module("flatten", nn.Flatten())
        classifier = nn.Sequential()
        classifier.add_module("0", LinearReLU(512 * 7 * 7, 4096))
        classifier.add_module("2", nn.Dropout(dropout))
        classifier.add_module("3", LinearReLU(4096, 4096))
        classifier.add_module("5", nn.Dropout(dropout))
        classifier.add_module("6", nn.Linear(4096, num_classes))
        self.add_module("classifier", classifier)
        if init_weights:
            initialize(self, "fan_out", linear_std=0.01)


vgg11, vgg13, vgg16, vgg19 = (partial(VGG, depth, False) for depth in _PARTS)
vgg11_bn, vgg13_bn, vgg16_bn, vgg19_bn = (partial(VGG, depth, True) for depth in _PARTS)
