"""The models that are timed and measured, each in three sizes: ``toy`` for a dry run, ``middle``, ``full``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpu_run.architectures import Llama, Unet, Vit
from gpu_run.context import ROOT, load
from rockmate.demo.gpt import GPT


def torchvision_models() -> Any:
    """``torchvision.models``, or ``ImportError``; without its compiled operators where these do not load."""
    try:
        import torchvision
    except (OSError, RuntimeError):
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision.models


def resnet50(scale: str) -> nn.Module:
    """torchvision's, or one of the same blocks where it cannot be imported."""
    small = load(ROOT / "tests" / "models.py")
    if scale == "toy":
        return small.ResNet(small.Bottleneck, (4,), 1)
    if scale == "middle":
        return small.ResNet(small.Bottleneck, (32, 64, 128), 2)
    try:
        return torchvision_models().resnet50(weights=None)
    except ImportError:
        return small.ResNet(small.Bottleneck, (128, 256, 512, 1024), 4)


BLOCKS = ("Layer", "LlamaBlock", "VitBlock", "ResBlock", "Bottleneck")
"""Classes of the blocks that people would checkpoint."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Those of ``model``."""
    return [m for m in model.modules() if type(m).__name__ in BLOCKS]


@dataclass(frozen=True)
class Work:
    """A model and its step. ``sizes``: by scale, what the model is made of; ``shapes``: batch and shape of one example.

    ``tokens``: the number of them, 0 for images. ``half``: in bfloat16; ``mixed``: under autocast, channels last.
    """

    name: str
    make: Callable[[str], nn.Module]
    shapes: dict[str, tuple[int, ...]]
    tokens: dict[str, int] | None = None
    timed: bool = False
    half: bool = False
    mixed: bool = False

    def model(self, scale: str, device: torch.device) -> nn.Module:
        """On ``device``, the same at every call."""
        torch.manual_seed(0)
        model = self.make(scale).to(device, torch.bfloat16 if self.half else torch.float32).train()
        return model.to(memory_format=torch.channels_last) if self.mixed else model

    def sample(self, scale: str, device: torch.device, batch: int | None = None) -> tuple[torch.Tensor, ...]:
        """Its arguments."""
        first, *shape = self.shapes[scale]
        batch = batch or first
        generator = torch.Generator().manual_seed(1)
        if self.tokens:
            return (torch.randint(self.tokens[scale], (batch, *shape), generator=generator).to(device),)
        x = torch.randn(batch, *shape, generator=generator).to(device, torch.bfloat16 if self.half else torch.float32)
        if self.mixed:
            x = x.contiguous(memory_format=torch.channels_last)
        return (x, torch.arange(float(batch), device=device)) if self.timed else (x,)

    def around(self, device: torch.device) -> AbstractContextManager[Any]:
        """What its forward runs in, and is planned in."""
        return torch.autocast(device.type, torch.bfloat16) if self.mixed else contextlib.nullcontext()

    def step(self, call: nn.Module, model: nn.Module, sample: tuple[torch.Tensor, ...]) -> None:
        """Forward, loss and backward of ``call``; the gradients, of the parameters of ``model``, are then forgotten."""
        with self.around(sample[0].device):
            output = call(*sample)
            if self.tokens:
                loss = F.cross_entropy(output.flatten(0, 1), sample[0].roll(-1, 1).flatten())
            else:
                loss = output.float().square().mean()
        del output
        loss.backward()
        model.zero_grad(set_to_none=True)


def _gpt(scale: str) -> nn.Module:
    sizes = {"toy": (1, 16, 2, 16, 32), "middle": (4, 256, 4, 256, 2048), "full": (12, 768, 12, 1024, 50_304)}
    model = GPT(*sizes[scale])
    model.head.weight = model.tokens.weight  # as GPT-2 has it: 124 million parameters
    return model


def _llama(scale: str) -> nn.Module:
    sizes = {"toy": (1, 16, 2, 24, 8, 32), "middle": (4, 256, 4, 704, 256, 2048)}
    return Llama(*sizes.get(scale, (16, 2048, 16, 5632, 2048, 32_000)))


def _vit(scale: str) -> nn.Module:
    return Vit(*{"toy": (1, 16, 2, 8, 4), "middle": (4, 256, 4, 64, 8), "full": (24, 1024, 16, 224, 16)}[scale])


def _unet(scale: str) -> nn.Module:
    return Unet({"toy": 8, "middle": 32, "full": 128}[scale])


def _perceptron(scale: str) -> nn.Module:
    width, depth = {"toy": (16, 2), "middle": (512, 6), "full": (4096, 8)}[scale]
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers)


def _convolutions(scale: str) -> nn.Module:
    c, depth = {"toy": (4, 1), "middle": (24, 4), "full": (64, 8)}[scale]
    return nn.Sequential(
        nn.Conv2d(3, c, 3, 1, 1),
        *(layer for _ in range(depth) for layer in (nn.Conv2d(c, c, 3, 1, 1), nn.BatchNorm2d(c), nn.ReLU())),
    )


def _encoder(scale: str) -> nn.Module:
    width, heads, depth = {"toy": (8, 2, 1), "middle": (256, 4, 3), "full": (768, 12, 12)}[scale]
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


WORKS = {
    work.name: work
    for work in (
        Work(
            "gpt",
            _gpt,
            {"toy": (8, 16), "middle": (8, 256), "full": (8, 1024)},
            {"toy": 32, "middle": 2048, "full": 50_304},
            half=True,
        ),
        Work(
            "llama",
            _llama,
            {"toy": (8, 8), "middle": (8, 256), "full": (4, 2048)},
            {"toy": 32, "middle": 2048, "full": 32_000},
            half=True,
        ),
        Work(
            "resnet50",
            resnet50,
            {"toy": (2, 3, 8, 8), "middle": (16, 3, 64, 64), "full": (64, 3, 224, 224)},
            mixed=True,
        ),
        Work("vit", _vit, {"toy": (16, 3, 8, 8), "middle": (16, 3, 64, 64), "full": (64, 3, 224, 224)}, half=True),
        Work("unet", _unet, {"toy": (2, 3, 8, 8), "middle": (8, 3, 64, 64), "full": (32, 3, 64, 64)}, timed=True),
        Work("perceptron", _perceptron, {"toy": (8, 16), "middle": (2048, 512), "full": (8192, 4096)}),
        Work(
            "convolutions",
            _convolutions,
            {"toy": (2, 3, 8, 8), "middle": (16, 3, 64, 64), "full": (32, 3, 128, 128)},
        ),
        Work("encoder", _encoder, {"toy": (2, 4, 8), "middle": (16, 128, 256), "full": (16, 512, 768)}),
    )
}
