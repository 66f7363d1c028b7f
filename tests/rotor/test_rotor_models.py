"""rotor.models have the parameters of torchvision's models, and give the same outputs, gradients and buffers."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from rockmate import rotor


@pytest.fixture(scope="module")
def torchvision_models() -> Any:
    """Where torchvision's compiled operators do not load, the schemas that it looks up are defined meanwhile."""
    library = None
    try:
        importlib.import_module("torchvision")
    except ImportError:
        pytest.skip("torchvision is not installed")
    except (OSError, RuntimeError):
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    yield importlib.import_module("torchvision.models")
    del library


NAMES = [
    *(f"resnet{n}" for n in (18, 34, 50, 101, 152)),
    *(f"vgg{n}{end}" for n in (11, 13, 16, 19) for end in ("", "_bn")),
    *(f"densenet{n}" for n in (121, 161, 169, 201)),
    "inception_v3",
]


def pair(models: Any, name: str) -> tuple[nn.Module, nn.Module]:
    extra = {"aux_logits": False, "init_weights": False} if name == "inception_v3" else {}
    ours = {"init_weights": False} if name == "inception_v3" else {}
    torch.manual_seed(0)
    return getattr(models, name)(weights=None, num_classes=10, **extra), getattr(rotor.models, name)(
        num_classes=10, **ours
    )


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_fit(torchvision_models: Any, name: str) -> None:
    with torch.device("meta"):
        theirs, ours = pair(torchvision_models, name)
    assert isinstance(ours, nn.Sequential)
    shapes = [{n: (t.shape, t.dtype) for n, t in m.state_dict().items()} for m in (theirs, ours)]
    assert shapes[0] == shapes[1] and list(shapes[0]) == list(shapes[1])


@pytest.mark.parametrize(
    ("name", "size"), [("resnet18", 32), ("resnet50", 32), ("vgg11_bn", 32), ("densenet121", 32), ("inception_v3", 75)]
)
def test_results_are_torchvisions(torchvision_models: Any, name: str, size: int) -> None:
    theirs, ours = pair(torchvision_models, name)
    ours.load_state_dict(theirs.state_dict())
    found = []
    for m in (theirs, ours):
        torch.manual_seed(1)
        y = m(torch.randn(2, 3, size, size))
        y.square().sum().backward()
        found.append([y, *(p.grad for p in m.parameters()), *m.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_initial_weights_have_the_deviations_of_torchvision(torchvision_models: Any) -> None:
    for name in ("resnet18", "densenet121"):
        theirs, ours = pair(torchvision_models, name)
        for a, b in zip(theirs.parameters(), ours.parameters(), strict=True):
            if a.numel() > 20_000:  # the sample deviation of n normal numbers varies by 1/sqrt(2n): five of these
                assert abs(b.std() / a.std() - 1) < 2 * 5 / (2 * a.numel()) ** 0.5
