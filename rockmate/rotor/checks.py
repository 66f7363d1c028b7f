"""Whether a stage can be recomputed and measured."""

from __future__ import annotations

from typing import Any

import torch

from rkgb.device import kind_of
from rkgb.randomness import refuse_unseen_draws
from rkgb.trace.code import watched
from rkgb.trace.other_draws import other_draws
from rkgb.trees import tensor_leaves
from rockmate.errors import InputError
from rockmate.rotor.values import Function, device_of, mapped, versions_of


def warm_up(function: Function, x: Any, where: tuple[int, str], preserve_rng_state: bool) -> None:
    """Run a stage for the first time, on ``x``, and check that it can run again with the same result.

    ``where``: the layer's number and name. ``preserve_rng_state``: whether it must draw the same numbers again. Raises
    ``InputError`` if it changes its input in place, draws from generators that are not torch's, or returns what
    ``check_tensors`` refuses.
    """
    device = device_of(x)
    kind = kind_of(device)
    x = mapped(lambda t: t.detach(), x)
    versions = versions_of(x)
    layer = f"layer {where[0]} ({where[1]})"
    outputs: list[Any] = []

    def run() -> None:
        with torch.no_grad():
            outputs.append(function(x))

    with watched() as watch, other_draws(watch) as drawn:
        run()
    if kind.keeps_workspaces and not drawn:
        kind.first_use(run, device)
    if versions != versions_of(x):
        raise InputError(in_place_message(*where))
    if drawn and preserve_rng_state:
        raise InputError(
            f"{layer} draws from {drawn[0]}, where it would draw other numbers when it runs again: draw with "
            "torch instead (torch.rand(()) < p)"
        )
    if preserve_rng_state and isinstance(function, torch.nn.Module):
        refuse_unseen_draws(function, device, layer)
    check_tensors(outputs[0], f"{layer} returns")


def in_place_message(i: int, name: str) -> str:
    """The error of layer ``i``, called ``name``, that changes its input in place, and what to do."""
    return (
        f"layer {i} ({name}) changes its input in place, so it cannot run again from it. Make it out of place, or "
        "join it with the layer before: rotor.models.utils.ReLUAtEnd(layer) is layer and an in-place ReLU in one"
    )


def check_tensors(value: Any, where: str) -> None:
    """Raise ``InputError`` for tensors in ``value`` whose bytes cannot be counted; ``where`` begins the sentence."""
    for t in tensor_leaves(value):
        if t.is_meta or t.layout != torch.strided:
            kind = "a tensor on the meta device" if t.is_meta else f"a tensor of the layout {t.layout}"
            raise InputError(f"{where} {kind}, whose memory cannot be measured: use dense tensors with values")
