"""ResNets (He et al., "Deep residual learning for image recognition", CVPR 2016) as ``nn.Sequential``.

Names of parameters and buffers are torchvision's, so its state dicts load.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import nn

from rockmate.rotor.models.utils import AtomicSequential, BatchNorm2dReLU, Branches, initialize


def residual(inputs: int, body: tuple[tuple[int, int, int], ...]) -> Branches:
    """``relu(body(x) + shortcut(x))``; ``body``: outputs, kernel and stride of each of its convolutions."""
    layers: dict[str, nn.Module] = {}
    width, halves = inputs, any(stride > 1 for *_, stride in body)
    for k, (outputs, kernel, stride) in enumerate(body, 1):
        layers[f"conv{k}"] = nn.Conv2d(width, outputs, kernel, stride, kernel // 2, bias=False)
        layers[f"bn{k}"] = (nn.BatchNorm2d if k == len(body) else BatchNorm2dReLU)(outputs)
        width = outputs
    steps, shortcut = [[name] for name in layers], list[list[str]]()
    if halves or inputs != width:
        projection = nn.Conv2d(inputs, width, 1, 1 + halves, bias=False)
        layers["downsample"], shortcut = AtomicSequential(projection, nn.BatchNorm2d(width)), [["downsample"]]
    return Branches((steps, shortcut), layers, adds=True)


class ResNet(nn.Sequential):
    """Images (batch, 3, height, width) to scores (batch, ``num_classes``).

    ``bottleneck``: whether a block has 1x1, 3x3 and 1x1 convolutions, four times as wide at its end, or two of 3x3.
    """

    def __init__(self, bottleneck: bool, layers: tuple[int, int, int, int], num_classes: int = 1000) -> None:
        stem = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), BatchNorm2dReLU(64), nn.MaxPool2d(3, 2, padding=1)
        parts: dict[str, nn.Module] = dict(zip(("conv1", "bn1", "maxpool"), stem, strict=True))
        inputs = 64
        for k, count in enumerate(layers):
            part, width = nn.Sequential(), 64 * 2**k
            for n in range(count):
                middle = (width, 3, 2 if k and not n else 1)
                body = ((width, 1, 1), middle, (4 * width, 1, 1)) if bottleneck else (middle, (width, 3, 1))
                part.append(residual(inputs, body))
                inputs = body[-1][0]
            parts[f"layer{k + 1}"] = part
        fc = nn.Linear(inputs, num_classes)
        super().__init__(OrderedDict(**parts, avgpool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten(), fc=fc))
        initialize(self, "fan_out")


resnet18 = partial(ResNet, False, (2, 2, 2, 2))
resnet34 = partial(ResNet, False, (3, 4, 6, 3))
resnet50 = partial(ResNet, True, (3, 4, 6, 3))
resnet101 = partial(ResNet, True, (3, 4, 23, 3))
resnet152 = partial(ResNet, True, (3, 8, 36, 3))
