"""The forms in which users give the arguments of a module."""

from __future__ import annotations

from typing import Any

import torch

Sample = torch.Tensor | tuple[Any, ...] | list[Any] | dict[str, Any]
"""A tensor, a tuple or list of positional arguments, or a dict of keyword arguments."""


def call_of(sample: Sample, sample_kwargs: dict[str, Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and keyword arguments of a sample."""
    if isinstance(sample, dict):
        return (), {**sample, **(sample_kwargs or {})}
    return (tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)), dict(sample_kwargs or {})


def check_module(model: object) -> None:
    """Raise ``TypeError`` if ``model`` is no module."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}: give a torch.nn.Module, and after it the sample")
