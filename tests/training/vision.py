"""torchvision as libraries import it, where its compiled operators do not load on the torch that is installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

SCHEMAS: list[torch.library.Library] = []


def import_can_go_on() -> None:
    """Define the schemas that ``import torchvision`` looks up, if its compiled library cannot do so."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or SCHEMAS:
        return
    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        if hasattr(torch.ops.torchvision, "nms"):  # another copy of this module was here
            return
        SCHEMAS.append(torch.library.Library("torchvision", "DEF"))
        for name in ("nms", "qnms"):
            SCHEMAS[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
