"""Inception v3 (Szegedy et al., "Rethinking the inception architecture for computer vision", CVPR 2016), sequential.

Names of parameters and buffers are those of torchvision's ``inception_v3(aux_logits=False)``, so its state dicts load.
The auxiliary classifier hangs at the side of the chain and is left out.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from rockmate.rotor.models.utils import AtomicSequential, BatchNorm2dReLU, Branches

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
