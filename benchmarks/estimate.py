"""Peaks and smallest budgets that ``rockmate.estimate`` predicts from small samples, beside those of the large ones.

    python benchmarks/estimate.py [NAME …] [--times 8] [--short] [--out FILE]

Each model computes its loss. ``rockmate.estimate`` sees the sample; then eager mode runs a step at ``--times`` its
size and is measured, and ``rockmate.frontier`` plans that. Prints a line a model; ``--out`` adds to what FILE, which is
JSON, has of other models. Exit status 1 if a predicted peak is off by more than 1 %. Needs torchvision, timm and
transformers, but for ``--short``, which is for tests.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rockmate
from rockmate import measure_peak
from rockmate.budget import show_bytes
from rockmate.demo.gpt import GPT

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "training")]  # models, and torchvision as libraries import it

TOLERANCE = 0.01
VOCABULARY = 2000

Call = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """``call(size)``: keyword arguments where dimension ``dim`` has that size; ``size``: the sample's."""

    model: nn.Module
    call: Callable[[int], Call]
    size: int
    dim: int | tuple[int, ...] = 0


class Classifier(nn.Module):
    """A model with its cross entropy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())


class Alone(nn.Module):
    """A model of transformers that returns its loss and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.model(**batch).loss


def tokens(*shape: int, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, below, shape)


def perceptron() -> Case:
    layers = [m for _ in range(6) for m in (nn.Linear(256, 256), nn.GELU())]
    model = Classifier(nn.Sequential(*layers, nn.Linear(256, 10)))
    return Case(model, lambda n: {"x": torch.randn(n, 256), "y": tokens(n, below=10)}, 64)


def gpt(dim: int, layers: int = 4, width: int = 128, length: int = 128, size: int = 2) -> Case:
    model = Classifier(GPT(layers, width, 4, 8 * size if dim else length, VOCABULARY))

    def call(n: int) -> Call:
        shape = (2, n) if dim else (n, length)
        return {"x": tokens(*shape), "y": tokens(*shape)}

    return Case(model, call, size, dim)


def encoder() -> Case:
    layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 4, 512, batch_first=True), 4)
    model = Classifier(nn.Sequential(layers, nn.Linear(128, 10)))
    return Case(model, lambda n: {"x": torch.randn(n, 64, 128), "y": tokens(n, 64, below=10)}, 2)


def residual() -> Case:
    from models import BasicBlock, ResNet

    model = Classifier(ResNet(BasicBlock, (8, 16), 2))
    return Case(model, lambda n: {"x": torch.randn(n, 3, 16, 16), "y": tokens(n, below=10)}, 8)


def vision(name: str, size: int, pixels: int, grows: bool = False, **options: Any) -> Case:
    """A classifier of images, in batches or (``grows``) images of another size."""
    from vision import import_can_go_on

    import_can_go_on()
    if name.startswith("mixer"):
        import timm

        inner = timm.create_model(name, pretrained=False, num_classes=10)
    else:
        from torchvision import models

        inner = getattr(models, name)(num_classes=10, **options)

    def call(n: int) -> Call:
        shape = (2, 3, n, n) if grows else (n, 3, pixels, pixels)
        return {"x": torch.randn(shape), "y": tokens(shape[0], below=10)}

    return Case(Classifier(inner), call, size, (2, 3) if grows else 0)


def hugging(kind: str, dim: int, size: int) -> Case:
    """A small model of transformers, with random weights."""
    from vision import import_can_go_on

    import_can_go_on()
    import transformers as t

    longest = 8 * size if dim else 64
    wide = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    if kind == "GPT-2":
        few = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": longest}
        model = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCABULARY, use_cache=False, **few))
    elif kind == "Llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**wide, intermediate_size=344, use_cache=False))
    elif kind == "BERT":
        model = t.BertForMaskedLM(t.BertConfig(**wide, intermediate_size=512, max_position_embeddings=longest))
    else:
        few = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4}
        model = t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=VOCABULARY, use_cache=False, decoder_start_token_id=0, **few)
        )

    def call(n: int) -> Call:
        ids = tokens(2, n) if dim else tokens(n, longest)
        return {"input_ids": ids, "labels": ids.clone()}

    return Case(Alone(model), call, size, dim)


CASES: dict[str, Callable[[], Case]] = {
    "perceptron, batch": perceptron,
    "GPT, batch": partial(gpt, 0),
    "GPT, length": partial(gpt, 1, size=32),
    "encoder, batch": encoder,
    "ResNet-18, batch": partial(vision, "resnet18", 2, 64),
    "ResNet-18, image size": partial(vision, "resnet18", 32, 0, grows=True),
    "ResNet-50, batch": partial(vision, "resnet50", 2, 64),
    "RegNet, batch": partial(vision, "regnet_x_400mf", 2, 64),
    "ViT, batch": partial(
        vision,
        "VisionTransformer",
        2,
        64,
        image_size=64,
        patch_size=8,
        num_layers=4,
        num_heads=4,
        hidden_dim=128,
        mlp_dim=512,
        dropout=0.1,
    ),
    "Mixer, batch": partial(vision, "mixer_s32_224", 1, 224),
    "GPT-2, batch": partial(hugging, "GPT-2", 0, 2),
    "Llama, batch": partial(hugging, "Llama", 0, 2),
    "Llama, length": partial(hugging, "Llama", 1, 32),
    "BERT, batch": partial(hugging, "BERT", 0, 2),
    "T5, batch": partial(hugging, "T5", 0, 2),
}
SHORT: dict[str, Callable[[], Case]] = {"tiny GPT": partial(gpt, 0, 2, 32, 16), "tiny ResNet": residual}


def measured(model: nn.Module, call: Call) -> int:
    """The peak of an eager step after another one, no gradient being there before."""
    for _ in range(2):
        model.zero_grad()
        gc.collect()
        peak = measure_peak(lambda: model(**call).backward(), model)
    model.zero_grad()
    return peak


def figures(make: Callable[[], Case], times: int) -> dict[str, Any]:
    """Everything about one model; bytes and seconds."""
    torch.manual_seed(0)
    case = make()
    case.model.train()
    large = case.size * times
    start = time.perf_counter()
    found = rockmate.estimate(case.model, (), large, sample_kwargs=case.call(case.size), dim=case.dim)
    seconds = time.perf_counter() - start
    (ours,) = found.sizes
    call = case.call(large)
    peak = measured(case.model, call)
    start = time.perf_counter()
    planned = rockmate.frontier(case.model, (), sample_kwargs=call, costs="flops")
    return {
        "sample": case.size,
        "size": large,
        "measured at": found.measured,
        "predicted": ours.peak,
        "measured": peak,
        "difference": ours.peak / peak - 1,
        "smallest budget predicted": ours.min_budget,
        "smallest budget planned": planned.min_budget,
        "rough": found.rough,
        "seconds": round(seconds, 2),
        "seconds of planning the large one": round(time.perf_counter() - start, 2),
    }


def line(name: str, row: dict[str, Any]) -> str:
    least = row["smallest budget predicted"] / row["smallest budget planned"] - 1
    return (
        f"{name:22} {row['sample']:4} to {row['size']:4}  peak {show_bytes(row['predicted']):>9} predicted, "
        f"{show_bytes(row['measured']):>9} measured, {100 * row['difference']:+6.2f} %; smallest budget "
        f"{show_bytes(row['smallest budget predicted']):>9}, {100 * least:+6.2f} %; {row['seconds']:.1f} s, "
        f"{row['seconds of planning the large one']:.1f} s"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--times", type=int, default=8)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    cases = SHORT if options.short else CASES
    if unknown := [name for name in options.names if name not in cases]:
        parser.error(f"no such model: {unknown[0]}; there are {', '.join(cases)}")
    found: dict[str, Any] = {}
    if options.out and options.out.exists():
        found = json.loads(options.out.read_text())
    missed = 0
    for name in options.names or cases:
        row = found[name] = figures(cases[name], options.times)
        missed += abs(row["difference"]) > TOLERANCE
        print(line(name, row), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
