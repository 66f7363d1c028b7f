"""The models that people train, each with a step of it: at a tiny size, at one for a CPU, and at one for a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from gpu_run.architectures import Unet
from gpu_run.context import ROOT, load
from torch import nn

from rockmate.demo.gpt import GPT, Layer

Size = tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """A model, its arguments, and the loss of what it returns."""

    model: nn.Module
    args: tuple[Any, ...]
    loss: Callable[[Any], torch.Tensor]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def step(self, call: Callable[..., Any]) -> tuple[Any, torch.Tensor]:
        """Gradients begin as None; the output is held to the end, as in a training loop."""
        self.model.zero_grad(set_to_none=True)
        output = call(*self.args, **self.kwargs)
        loss = self.loss(output)
        loss.backward()
        return output, loss.detach()


@dataclass(frozen=True)
class Entry:
    """``sizes``: by scale, the arguments of ``make``. ``blocks``: names of the classes that people checkpoint.

    ``chained``: between consecutive blocks of one container nothing happens, so that several can be one segment.
    """

    make: Callable[..., Task]
    blocks: tuple[str, ...]
    sizes: Mapping[str, Size]
    chained: bool = True

    def task(self, scale: str, device: torch.device) -> Task:
        """On ``device``, the same at every call."""
        torch.manual_seed(0)
        made = self.make(*self.sizes[scale])

        def moved(x: Any) -> Any:
            return x.to(device) if isinstance(x, torch.Tensor) else x

        args = tuple(moved(x) for x in made.args)
        kwargs = {name: moved(x) for name, x in made.kwargs.items()}
        return Task(made.model.to(device).train(), args, made.loss, kwargs)


def vision() -> None:
    """torchvision can be imported from here on; its operators do not load on a CPU build: as the tests do it."""
    load(ROOT / "tests" / "training" / "vision.py").import_can_go_on()


def own_loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def classes(batch: int, count: int = 1000) -> Callable[[torch.Tensor], torch.Tensor]:
    """Cross entropy with random classes, made where the output lies."""
    target = torch.randint(count, (batch,))
    return lambda output: F.cross_entropy(output, target.to(output.device))


def next_token(tokens: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda output: F.cross_entropy(output.flatten(0, 1), tokens.roll(-1, 1).flatten().to(output.device))


def gpt(layers: int, width: int, length: int, vocabulary: int, batch: int) -> Task:
    tokens = torch.randint(vocabulary, (batch, length))
    return Task(GPT(layers, width, 4, length, vocabulary), (tokens,), next_token(tokens))


def gpt2(layers: int, width: int, length: int, vocabulary: int, batch: int) -> Task:
    """Attention as transformers writes it out: its fused one gets another mask under TorchDynamo (docs/limits.md)."""
    vision()
    hub = importlib.import_module("transformers")
    config = hub.GPT2Config(
        n_layer=layers,
        n_embd=width,
        n_head=4,
        vocab_size=vocabulary,
        n_positions=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    config._attn_implementation = "eager"
    tokens = torch.randint(vocabulary, (batch, length))
    return Task(hub.GPT2LMHeadModel(config), (), own_loss, {"input_ids": tokens, "labels": tokens})


def llama(layers: int, width: int, length: int, vocabulary: int, batch: int) -> Task:
    """Fused attention, and a batch whose last text is shorter than the others."""
    vision()
    hub = importlib.import_module("transformers")
    config = hub.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=vocabulary,
        use_cache=False,
    )
    tokens = torch.randint(vocabulary, (batch, length))
    mask = torch.ones_like(tokens)
    mask[-1, length - 8 :] = 0
    labels = torch.where(mask > 0, tokens, -100)
    return Task(
        hub.LlamaForCausalLM(config), (), own_loss, {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    )


def from_torchvision(name: str) -> Callable[..., Task]:
    def make(batch: int, size: int) -> Task:
        vision()
        model = getattr(importlib.import_module("torchvision.models"), name)(weights=None)
        return Task(model, (torch.randn(batch, 3, size, size),), classes(batch))

    return make


def from_timm(name: str, *options: str) -> Callable[..., Task]:
    """``options``: what the sizes beside batch and image are of; where they are not given, they are the model's own."""

    def make(batch: int, size: int, *values: int) -> Task:
        vision()
        own = dict(zip(options, values, strict=False))
        model = importlib.import_module("timm").create_model(name, img_size=size, **own)
        return Task(model, (torch.randn(batch, 3, size, size),), classes(batch))

    return make


def mixer(batch: int, size: int, blocks: int, width: int) -> Task:
    vision()
    timm = importlib.import_module("timm.models.mlp_mixer")
    model = timm.MlpMixer(img_size=size, patch_size=16, num_blocks=blocks, embed_dim=width)
    return Task(model, (torch.randn(batch, 3, size, size),), classes(batch))


def unet(width: int, batch: int, size: int) -> Task:
    return Task(Unet(width), (torch.randn(batch, 3, size, size), torch.arange(float(batch))), mean_square)


def transformer(layers: int, width: int, length: int, batch: int) -> Task:
    model = nn.Transformer(width, 4, layers, layers, 4 * width, batch_first=True)
    return Task(model, tuple(torch.randn(batch, length, width) for _ in range(2)), mean_square)


def sequential_gpt(layers: int, width: int, length: int, vocabulary: int, batch: int) -> Task:
    """The chain of the comparison with rotor."""
    model = load(ROOT / "benchmarks" / "rotor.py").transformer(layers, width, length, vocabulary)
    assert isinstance(model[1], Layer)
    tokens = torch.randint(vocabulary, (batch, length))
    return Task(model, (tokens,), next_token(tokens))


class MixerLayer(nn.Module):
    """Mixes tokens, then channels; small, so that its tensors stay in a processor's caches."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


def sequential_mixer(layers: int, tokens: int, width: int, batch: int) -> Task:
    model = nn.Sequential(*(MixerLayer(tokens, width) for _ in range(layers)))
    return Task(model, (torch.randn(batch, tokens, width),), mean_square)


MODELS: dict[str, Entry] = {
    "GPT": Entry(
        gpt,
        ("Layer",),
        {"tiny": (4, 32, 32, 64, 2), "cpu": (12, 256, 128, 1024, 4), "gpu": (12, 768, 1024, 50_304, 8)},
    ),
    "GPT-2": Entry(
        gpt2,
        ("GPT2Block",),
        {"tiny": (2, 32, 32, 64, 2), "cpu": (8, 256, 128, 2048, 4), "gpu": (12, 768, 1024, 50_257, 8)},
    ),
    "Llama": Entry(
        llama,
        ("LlamaDecoderLayer",),
        {"tiny": (2, 32, 32, 64, 2), "cpu": (8, 256, 128, 2048, 4), "gpu": (16, 2048, 2048, 32_000, 2)},
    ),
    "ResNet-50": Entry(
        from_torchvision("resnet50"), ("Bottleneck",), {"tiny": (2, 32), "cpu": (6, 112), "gpu": (64, 224)}
    ),
    "ResNet-101": Entry(
        from_torchvision("resnet101"), ("Bottleneck",), {"tiny": (2, 32), "cpu": (4, 96), "gpu": (64, 224)}
    ),
    "RegNetX": Entry(
        from_torchvision("regnet_x_800mf"),
        ("ResBottleneckBlock",),
        {"tiny": (2, 32), "cpu": (12, 112), "gpu": (128, 224)},
    ),
    "ViT": Entry(
        from_timm("vit_tiny_patch16_224", "depth", "embed_dim"),
        ("Block",),
        {"tiny": (2, 32, 2, 48), "cpu": (3, 224), "gpu": (64, 224, 24, 960)},
    ),
    "MLP-Mixer": Entry(
        mixer,
        ("MixerBlock",),
        {"tiny": (2, 32, 2, 32), "cpu": (4, 224, 8, 256), "gpu": (64, 224, 12, 768)},
    ),
    "Swin": Entry(
        from_timm("swin_tiny_patch4_window7_224"),
        ("SwinTransformerBlock",),
        {"tiny": (1, 224), "cpu": (1, 224), "gpu": (64, 224)},
    ),
    "U-Net": Entry(unet, ("ResBlock",), {"tiny": (8, 2, 16), "cpu": (32, 6, 64), "gpu": (128, 32, 64)}, chained=False),
    "nn.Transformer": Entry(
        transformer,
        ("TransformerEncoderLayer", "TransformerDecoderLayer"),
        {"tiny": (2, 32, 16, 2), "cpu": (4, 256, 128, 3), "gpu": (12, 1024, 512, 16)},
    ),
    "DenseNet-121": Entry(
        from_torchvision("densenet121"),
        ("_DenseLayer",),
        {"tiny": (2, 32), "cpu": (4, 96), "gpu": (64, 224)},
        chained=False,
    ),
    "chain of GPT layers": Entry(
        sequential_gpt,
        ("Layer",),
        {"tiny": (4, 32, 32, 64, 2), "cpu": (12, 256, 128, 512, 2), "gpu": (24, 1024, 1024, 32_000, 8)},
    ),
    "chain of small mixers": Entry(
        sequential_mixer,
        ("MixerLayer",),
        {"tiny": (6, 16, 16, 2), "cpu": (16, 64, 96, 32), "gpu": (24, 256, 512, 64)},
    ),
}
