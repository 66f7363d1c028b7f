"""Transformers and a diffusion model in the manner of those that people train."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn


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
