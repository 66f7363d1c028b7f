"""One trace of a program for all sizes: at each it gives the graph of a trace at that size, or none."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import in_turn
from torch import nn

from rkgb.blocks.simplify import D_to_S
from rkgb.graphs import B_graph, S_graph
from rkgb.probe.names import with_display_names
from rkgb.probe.resize import graph_without_data, is_same, program_of_any_size, program_without_data, resized
from rkgb.probe.skeleton import skeleton
from rkgb.sample import Call
from rkgb.trace.meta import without_data

CPU = torch.device("cpu")


class Program(nn.Module):
    """``what`` of values of the shape (4, n, 8) and the number n."""

    pure = True

    def __init__(self, what: Callable[..., Any]) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.randn(8, 8, device="meta"))

    def forward(self, x: torch.Tensor, n: int) -> list[torch.Tensor]:
        return [self.what(F.gelu(F.linear(x, self.weight)), n)]


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(4, -1, 2, 4).transpose(1, 2)


def one_for_the_next(x: torch.Tensor, n: int) -> torch.Tensor:
    y = x.clone()
    y[:, : n // 2] = 1.0
    return y * 2


def one_row(x: torch.Tensor, n: int) -> torch.Tensor:
    y = x.clone()
    y[:, :2] = y[:, 2:3]
    return y * 2


SERVED: dict[str, Callable[..., Any]] = {
    "view": lambda x, n: x.view(-1, n, 8).sin(),
    "torch.Size": lambda x, n: x.view(torch.Size((4, n, 8))).sin(),
    "shape": lambda x, n: x.reshape(x.shape[0] * x.shape[1], x.shape[2]).sin(),
    "half": lambda x, n: x[:, : x.shape[1] // 2 + 1].sin(),
    "of a known size": lambda x, n: x / math.sqrt(x.shape[2]) if x.shape[2] == 8 else x,
    "full": lambda x, n: x + torch.full((n, 1), n, device=x.device),
    "slice": one_for_the_next,
    "arange": lambda x, n: x * torch.arange(0, n, dtype=torch.float32, device=x.device)[None, :, None],
    "whole numbers": lambda x, n: x * torch.arange(n, device=x.device)[None, :, None],
    "einsum": lambda x, n: torch.einsum("bnd,bmd->bnm", x, x),
    "pad": lambda x, n: F.pad(x, (0, 0, 0, n)).sin(),
    "interpolate": lambda x, n: F.interpolate(x, size=n + 3).sin(),
    "split": lambda x, n: torch.cat(x.split(2, -1), 1).sin(),
    "new_zeros": lambda x, n: x + x.new_zeros(x.shape),
    "dropout": lambda x, n: F.dropout(x, 0.1),
    "attention": lambda x, n: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True),
    "convolution": lambda x, n: F.conv1d(x.transpose(1, 2), torch.ones(8, 8, 3, device=x.device), padding=1),
    "expand": lambda x, n: x[:, :1].expand(-1, n, -1).sin(),
    "narrow": lambda x, n: x.narrow(1, 0, n).sin(),
    "a row": one_row,
    "remainder": lambda x, n: x[:, : n % 7 + 1].sin(),
    "place": lambda x, n: x[:, n - 1].sin(),
}
OTHERS: dict[str, Callable[..., Any]] = {
    "a number read": lambda x, n: x[:, : int(x.shape[1] * 0.5)].sin(),
    "a branch": lambda x, n: x.sin() if x.shape[1] > 11 else x.cos(),
    "product": lambda x, n: x * n,
    "power": lambda x, n: x**n,
    "root": lambda x, n: x / math.sqrt(x.shape[1]),
    "negative power": lambda x, n: x * x.shape[1] ** -0.5,
    "of precision": lambda x, n: x * x.shape[2] ** -0.3,
    "strides": lambda x, n: x.as_strided((x.size(1), 8), (x.stride(1), 1)).sin(),
    "offset": lambda x, n: x[:, 1:].sin() * x[1:].storage_offset(),
    "clamp": lambda x, n: x.clamp(max=n),
    "len": lambda x, n: x * len(x[0]),
    "numel": lambda x, n: x / x.numel(),
    "pieces": lambda x, n: torch.cat(x.split(5, 1), 1).sin(),
    "layout": lambda x, n: x.sin() if x.transpose(0, 1).is_contiguous() else x.cos(),
    "mean": lambda x, n: x.sum(1) / n,
    "roll": lambda x, n: x.roll(n // 2, 1),
    "at least": lambda x, n: x[:, : max(n, 13)].sin(),
    "a float": lambda x, n: x * float(n),
    "a truth": lambda x, n: x[:, : n - (n > 11)].sin(),
}


def of_size(n: int) -> Call:
    inputs = without_data([torch.randn(4, n, 8, requires_grad=True)])
    assert inputs is not None
    return Call((*inputs, n), {})


def graph_of(model: nn.Module, n: int) -> S_graph:
    program = program_without_data(model, of_size(n), CPU)
    assert program is not None
    d = graph_without_data(program, model, of_size(n), CPU)
    assert d is not None
    return D_to_S(with_display_names(d))


def graph_at(program: B_graph | None, model: nn.Module, n: int, s: S_graph) -> S_graph | None:
    d = None if program is None else graph_without_data(program, model, of_size(n), CPU)
    return None if d is None else resized(s, skeleton(s), d)


@pytest.mark.parametrize(("name", "traced_at"), in_turn([*SERVED, *OTHERS], [12, 10]))
def test_a_program_of_any_size_gives_the_graph_of_each_size_or_none(name: str, traced_at: int) -> None:
    """Where Python does otherwise with a size than pass it on to operations, each size is traced."""
    model = Program((SERVED | OTHERS)[name])
    s = graph_of(model, 10)
    program = program_of_any_size(model, of_size(traced_at), CPU)
    first = graph_at(program, model, 10, s)
    program = program if first is not None and is_same(first, s) else None
    served = program is not None
    for n in (12, 17, 1, 2, 10):
        found = graph_at(program, model, n, s)
        if found is not None:
            wanted = graph_of(model, n)
            assert skeleton(found) == skeleton(wanted)
            assert is_same(found, wanted)
        served &= found is not None or n < 3  # a size of 1 may be another graph
    assert served == (name in SERVED)
