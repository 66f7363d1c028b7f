"""Hooks of a model's modules, which may be the reason why a call is no one graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

Hooks = list[tuple[Callable[[], Any], int]]
"""Hooks of modules: what returns the dict that a hook is in, if that still is, and its key there."""


def hooks_of(model: torch.nn.Module) -> Hooks:
    """All hooks of the model's modules, now."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    held = [m.__dict__[kind] for m in model.modules() for kind in kinds]
    return [(weakref.ref(hooks), key) for hooks in held for key in hooks]


def any_is_gone(hooks: Hooks) -> bool:
    """Whether one of ``hooks`` was removed since."""
    return any(key not in (held() or ()) for held, key in hooks)
