"""Image classifiers as ``nn.Sequential``. Names of parameters and buffers are torchvision's, so its state dicts load.

VGG: Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR 2015. Layers
keep the numbers that they have in torchvision, where every ReLU is a layer of its own.
ResNet: He et al., "Deep residual learning for image recognition", CVPR 2016.
DenseNet: Huang et al., "Densely connected convolutional networks", CVPR 2017. Each dense layer passes its input on,
with what it computed appended, so a dense block is a chain as well.
Inception v3: Szegedy et al., "Rethinking the inception architecture for computer vision", CVPR 2016. The auxiliary
classifier hangs at the side of the chain and is left out, as by ``aux_logits=False``.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import nn

from rockmate.rotor.models.utils import AtomicSequential, BatchNorm2dReLU, Branches, Conv2dReLU, LinearReLU, initialize

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
                kind = nn.Conv2d if batch_norm else Conv2dReLU
                features.add_module(str(number), kind(inputs, width, 3, padding=1))
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
        parts, inputs = dict[str, nn.Module](zip(("conv1", "bn1", "maxpool"), stem, strict=True)), 64
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


resnet18, resnet34 = (partial(ResNet, False, layers) for layers in ((2, 2, 2, 2), (3, 4, 6, 3)))
resnet50, resnet101, resnet152 = (partial(ResNet, True, (3, a, b, 3)) for a, b in ((4, 6), (4, 23), (8, 36)))


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
        conv0, pool0 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False), nn.MaxPool2d(3, 2, padding=1)
        features = nn.Sequential(OrderedDict(conv0=conv0, norm0=BatchNorm2dReLU(width), pool0=pool0))
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


densenet161 = partial(DenseNet, 48, (6, 12, 36, 24), 96)
densenet121, densenet169, densenet201 = (partial(DenseNet, 32, (6, 12, *k)) for k in ((24, 16), (32, 32), (48, 32)))

# Branches are parted by ";". A step is a pool, or a convolution: name, outputs, kernel (11 if none), and "/" if it
# halves the image, where it is not padded, or "-" if it is not padded. Convolutions joined by "+" read the same.
_STEM = (
    "Conv2d_1a_3x3 32 33/, Conv2d_2a_3x3 32 33-, Conv2d_2b_3x3 64 33, maxpool1, Conv2d_3b_1x1 80, "
    "Conv2d_4a_3x3 192 33-, maxpool2"
)
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


def _parsed(inputs: int, branch: str, prefix: str = "") -> tuple[OrderedDict[str, nn.Module], list[list[str]], int]:
    """The layers of a branch, those of each step, and the outputs of the last step."""
    layers, steps = OrderedDict[str, nn.Module](), []
    for step in branch.split(", "):
        if step.startswith(("avg", "max")):
            layers[step] = nn.AvgPool2d(3, 1, padding=1) if step == "avg" else nn.MaxPool2d(3, 2)
            steps.append([step])
            continue
        forks = [(*fork.split(), "11")[:3] for fork in step.split(" + ")]
        for name, outputs, kernel in forks:
            size, padded = (int(kernel[0]), int(kernel[1])), len(kernel) == 2
            padding = (size[0] // 2, size[1] // 2) if padded else 0
            conv = nn.Conv2d(inputs, int(outputs), size, 1 + kernel.endswith("/"), padding, bias=False)
            bn = BatchNorm2dReLU(int(outputs), eps=0.001)
            layers[prefix + name] = AtomicSequential(OrderedDict(conv=conv, bn=bn))
        inputs = sum(int(outputs) for _, outputs, _ in forks)
        steps.append([prefix + name for name, *_ in forks])
    return layers, steps, inputs


class Inception3(nn.Sequential):
    """Images (batch, 3, height, width), at least 75 wide and high, to scores (batch, ``num_classes``)."""

    def __init__(self, num_classes: int = 1000, init_weights: bool = True, dropout: float = 0.5) -> None:
        parts, _, width = _parsed(3, _STEM)
        for name, text in _MIXED.items():
            branches = (_parsed(width, branch, "branch") for branch in text.split("; "))
            layers, steps, outputs = zip(*branches, strict=True)
            parts[name] = Branches(steps, {k: v for of in layers for k, v in of.items()})
            width = sum(outputs)
        head = nn.AdaptiveAvgPool2d(1), nn.Dropout(dropout), nn.Flatten(), nn.Linear(width, num_classes)
        super().__init__(OrderedDict(**parts, **dict(zip(("avgpool", "dropout", "flatten", "fc"), head, strict=True))))
        for module in self.modules() if init_weights else ():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.trunc_normal_(module.weight, std=0.1)


inception_v3 = Inception3
