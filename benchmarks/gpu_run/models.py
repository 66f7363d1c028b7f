"""The models that are timed and measured, each in three sizes: ``toy`` for a dry run, ``middle``, ``full``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpu_run.context import ROOT, load
from rockmate.gpt import GPT


class Attention(nn.Module):
    """Fused attention; ``causal`` with rotary positions, or over everything without."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if turn is not None:
            q, k = turned(q, *turn), turned(k, *turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaBlock(nn.Module):
    """Attention and a gated perceptron, each behind a root-mean-square norm."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, causal=True)
        self.gate, self.up, self.down = (nn.Linear(*n, bias=False) for n in ((width, inner),) * 2 + ((inner, width),))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), (cos, sin))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """Tokens (batch, length) to logits."""

    def __init__(self, layers: int, width: int, heads: int, inner: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        half = torch.arange(0, width // heads, 2) / (width // heads)
        angles = torch.arange(length)[:, None] * torch.exp(-math.log(10_000.0) * half)
        angles = torch.cat((angles, angles), dim=-1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


class VitBlock(nn.Module):
    """Attention and a perceptron, each behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Vit(nn.Module):
    """Images to 1,000 classes."""

    def __init__(self, layers: int, width: int, heads: int, size: int, patch: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(VitBlock(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class ResBlock(nn.Module):
    """Two convolutions behind group norms, the time between them."""

    def __init__(self, inside: int, outside: int, time: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(4, inside), nn.GroupNorm(4, outside)
        self.conv1, self.conv2 = nn.Conv2d(inside, outside, 3, 1, 1), nn.Conv2d(outside, outside, 3, 1, 1)
        self.time, self.skip = nn.Linear(time, outside), nn.Conv2d(inside, outside, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(y)))


class Unet(nn.Module):
    """A diffusion model's: images and times to images. Three resolutions, attention at the lowest."""

    def __init__(self, width: int) -> None:
        super().__init__()
        a, b, c, time = width, 2 * width, 4 * width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.frequencies = width // 2
        self.stem, self.norm, self.head = nn.Conv2d(3, a, 3, 1, 1), nn.GroupNorm(4, a), nn.Conv2d(a, 3, 3, 1, 1)
        self.down = nn.ModuleList(ResBlock(i, o, time) for i, o in ((a, a), (a, b), (b, c)))
        self.middle, self.attention = ResBlock(c, c, time), Attention(c, 4, causal=False)
        self.up = nn.ModuleList(ResBlock(i, o, time) for i, o in ((c + c, b), (b + b, a), (a + a, a)))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        k = torch.arange(self.frequencies, device=x.device) / self.frequencies
        angles = time[:, None] * torch.exp(-math.log(10_000.0) * k)
        t = self.time(torch.cat((angles.sin(), angles.cos()), dim=1).to(x.dtype))
        x, kept = self.stem(x), []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else F.avg_pool2d(x, 2), t)
            kept.append(x)
        batch, channels, height, width = x.shape
        x = self.middle(x, t)
        flat = x.flatten(2).transpose(1, 2)
        x = (flat + self.attention(flat)).transpose(1, 2).reshape(batch, channels, height, width)
        for level, block in enumerate(self.up):
            x = block(torch.cat((x if level == 0 else F.interpolate(x, scale_factor=2.0), kept.pop()), dim=1), t)
        return self.head(F.silu(self.norm(x)))


def torchvision_models() -> Any:
    """``torchvision.models``, or ``ImportError``. Where its compiled operators do not load, their schemas are defined."""
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
    sizes = {"toy": (2, 16, 2, 16, 32), "middle": (4, 256, 4, 256, 2048), "full": (12, 768, 12, 1024, 50_304)}
    return GPT(*sizes[scale])


def _llama(scale: str) -> nn.Module:
    sizes = {"toy": (2, 16, 2, 24, 8, 32), "middle": (4, 256, 4, 704, 256, 2048)}
    return Llama(*sizes.get(scale, (16, 2048, 16, 5632, 2048, 32_000)))


def _vit(scale: str) -> nn.Module:
    return Vit(*{"toy": (2, 16, 2, 8, 4), "middle": (4, 256, 4, 64, 8), "full": (24, 1024, 16, 224, 16)}[scale])


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
