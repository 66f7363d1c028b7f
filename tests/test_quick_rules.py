"""Sizes without data are those that a device makes: the rules that stand for torch's own, and these."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rkgb.trace.meta import without_data
from rkgb.trace.quick import QuickRules

ATEN = torch.ops.aten
X, W, V, C = torch.randn(3, 4, 5), torch.randn(4, 6), torch.randn(5), torch.ones(4)
ROWS, TURNED, LONE = torch.randn(3, 4, 1), torch.randn(5, 4, 3).permute(2, 1, 0), torch.randn(3, 1, 5)
BY_TWO = ATEN.add.Tensor, ATEN.mul.Tensor, ATEN.div.Tensor
OF_ONE = ATEN.relu.default, ATEN.gelu.default, ATEN.rsqrt.default
CASES: list[tuple[Any, tuple[Any, ...]]] = [
    *((op, (X, y)) for op in BY_TWO for y in (X, V, ROWS, TURNED, LONE, 2.0)),
    *((ATEN.mul.Tensor, (x, X)) for x in (TURNED, LONE, V, X.double(), X.bfloat16(), X.int())),
    (ATEN.sub.Tensor, (X, torch.tensor(2, dtype=torch.int64))),
    (ATEN.sub.Tensor, (X, torch.tensor(2.0, dtype=torch.float64))),
    *((op, (x,)) for op in OF_ONE for x in (X, TURNED, LONE, V, X.double())),
    *((ATEN.pow.Tensor_Scalar, (x, 2)) for x in (X, TURNED)),
    *((ATEN.native_layer_norm.default, (x, [5], V, V, 1e-5)) for x in (X, TURNED, LONE)),
    (ATEN.native_layer_norm.default, (X, [4, 5], None, None, 1e-5)),
    (ATEN.native_batch_norm.default, (X, *4 * (C,), True, 0.1, 1e-5)),
    (ATEN.native_batch_norm.default, (X, *4 * (None,), True, 0.1, 1e-5)),
    (ATEN.mm.default, (W.T, W)),
    (ATEN.addmm.default, (torch.randn(6), torch.randn(3, 4), W)),
    (ATEN.addmm.default, (torch.randn(3, 6), torch.randn(3, 4), W)),
    (ATEN.bmm.default, (X, TURNED.transpose(1, 2))),
    *((ATEN._softmax.default, (x, -1, False)) for x in (X, LONE)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_rules_are_those_of_the_device(number: int) -> None:
    op, args = CASES[number]
    made = op(*args)
    bare = without_data(args)
    assert bare is not None
    with QuickRules():
        found = op(*bare)
    for real, meta in zip(*((x if isinstance(x, tuple) else (x,)) for x in (made, found)), strict=True):
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)
