"""Image classifiers as ``nn.Sequential``, with the parameters and results of torchvision's models of the same names."""

from rockmate.rotor.models.densenet import densenet121, densenet161, densenet169, densenet201
from rockmate.rotor.models.inception import inception_v3
from rockmate.rotor.models.resnet import resnet18, resnet34, resnet50, resnet101, resnet152
from rockmate.rotor.models.vgg import vgg11, vgg11_bn, vgg13, vgg13_bn, vgg16, vgg16_bn, vgg19, vgg19_bn

__all__ = [
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "inception_v3",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "vgg11",
    "vgg11_bn",
    "vgg13",
    "vgg13_bn",
    "vgg16",
    "vgg16_bn",
    "vgg19",
    "vgg19_bn",
]
