"""Batch norm in training as two operations: one that normalizes, and changes nothing, and one that updates the running
statistics from those of the batch, and runs once.
"""

from __future__ import annotations

from operator import getitem

import torch
import torch.nn.functional as F
from torch import fx

from rockmate.pieces.functional import arguments_of


def without_statistics(program: fx.GraphModule) -> None:
    """Take the update of running statistics out of the batch norms of ``program``."""
    for node in list(program.graph.find_nodes(op="call_function", target=F.batch_norm)):
        given = arguments_of(node)
        if given["training"] is not True or not isinstance(given["running_mean"], fx.Node):
            continue
        if not isinstance(given["momentum"], float):  # a cumulative average, whose factor is a number of each call
            continue
        with program.graph.inserting_before(node):
            called = program.graph.call_function(
                normalized, (given["input"], given["weight"], given["bias"], given["eps"])
            )
            result, mean, variance = (program.graph.call_function(getitem, (called, k)) for k in range(3))
            running = given["running_mean"], given["running_var"]
            program.graph.call_function(updated, (*running, mean, variance, given["momentum"]))
        called.meta = {k: v for k, v in node.meta.items() if k != "example_value"}
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        program.graph.erase_node(node)


def with_statistics(program: fx.GraphModule) -> None:
    """Make those batch norms of ``program`` what they were that are in no piece: they update their statistics."""
    for called in list(program.graph.find_nodes(op="call_function", target=normalized)):
        x, weight, bias, eps = called.args
        taken = {n.args[1]: n for n in called.users}
        (update,) = taken[1].users
        running_mean, running_var, *_, momentum = update.args
        with program.graph.inserting_before(called):
            norm = program.graph.call_function(
                F.batch_norm, (x, running_mean, running_var, weight, bias, True, momentum, eps)
            )
        norm.meta = dict(taken[0].meta)
        taken[0].replace_all_uses_with(norm)
        for node in (update, *taken.values(), called):
            program.graph.erase_node(node)
    program.recompile()


def normalized(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x`` normalized over its batch; mean and unbiased variance of each channel, (channels,), without gradients."""
    exact = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    mean, variance = (x.new_zeros(x.shape[1], dtype=exact) for _ in range(2))
    return F.batch_norm(x, mean, variance, weight, bias, True, 1.0, eps), mean, variance


def updated(
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    momentum: float,
) -> torch.Tensor:
    """The running statistics take up those of a batch, as ``F.batch_norm`` does it; returns ``running_mean``."""
    with torch.no_grad():
        running_var.mul_(1 - momentum).add_(variance, alpha=momentum)
        return running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
