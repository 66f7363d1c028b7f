"""How much memory a node takes, before it runs: a wrong number among its arguments may ask for more than there is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from rkgb.graphs import Node
from rkgb.program import computed
from rkgb.trees import tensors_of


def bytes_of_results(node: Node, value: Callable[[int], Any]) -> int:
    """The bytes of the largest result of ``node`` on the values ``value(v)``, found without data (device ``meta``).

    0 where no number of the node sets a size, and where sizes depend on data.
    """
    if not _takes_sizes(node.op):
        return 0

    def without_data(v: int) -> Any:
        t = value(v)
        return t.detach().to("meta") if isinstance(t, torch.Tensor) else t

    kwargs = {**dict(node.kwargs), "device": "meta"} if _takes_a_device(node.op) else dict(node.kwargs)
    try:
        with _disable_current_modes(), torch.no_grad():
            results = computed(dataclasses.replace(node, kwargs=tuple(kwargs.items())), without_data)
    except (RuntimeError, TypeError, ValueError, LookupError):  # there is no rule for sizes alone
        return 0
    return max((t.numel() * t.element_size() for t in tensors_of(results)), default=0)


_NO_SIZES = frozenset("layer_norm rms_norm embedding cross_entropy_loss nll_loss nll_loss_nd".split())
"""Operators of models whose results are as large as their tensors say: they are given features and indices."""


@cache
def _takes_sizes(op: Any) -> bool:
    """Whether memory depends on numbers: it makes a tensor of sizes, or of numbers only (``arange``)."""
    if not isinstance(op, torch._ops.OpOverload) or op.is_view or op.name().partition("::")[2] in _NO_SIZES:
        return False
    arguments = str(op._schema).partition(") ->")[0]
    return "SymInt" in arguments or "Tensor" not in arguments


@cache
def _takes_a_device(op: Any) -> bool:
    return any(argument.name == "device" for argument in op._schema.arguments)
