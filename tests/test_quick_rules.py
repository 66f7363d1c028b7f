"""Sizes without data are those that a device makes: the rules that stand for torch's own, and these."""

from __future__ import annotations

from itertools import permutations, product
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from rkgb.trace.meta import without_data
from rkgb.trace.quick import _RULES, QuickRules

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
    *((op, (x, -1, False)) for op in (ATEN._softmax.default, ATEN._log_softmax.default) for x in (X, TURNED, LONE)),
    *((ATEN._safe_softmax.default, (x, -1, *dtype)) for x in (X, LONE) for dtype in ((), (torch.float64,))),
    *((op, (LONE, y)) for op in BY_TWO for y in (LONE, TURNED[:, :1], V, X)),
    *((op, (x, 2)) for op in (ATEN.mul.Scalar, ATEN.div.Scalar, ATEN.add.Scalar) for x in (X, TURNED, LONE, X.int())),
    *((ATEN.mean.dim, (x, *args)) for x in (X, TURNED, LONE) for args in (([-1], True), ([0, -1],), ([1],), ([],))),
    *((ATEN.cat.default, ([X, y], dim)) for y in (X, TURNED) for dim in (0, 1, -1)),
    *((ATEN.cat.default, ([LONE, LONE, LONE], dim)) for dim in (1, -3)),
    (ATEN.cat.default, ([X, torch.empty(0), X], 1)),
    (ATEN.cat.default, ([X, X.double()], 1)),
    *((op, (torch.ones(3, 1, 5), 0.5)) for op in (ATEN.bernoulli_.float, ATEN.div_.Scalar)),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_rules_are_those_of_the_device(number: int) -> None:
    op, args = CASES[number]
    made = op(*args)
    flat, form = tree_flatten(args)
    bare = without_data(flat)
    assert bare is not None
    with QuickRules():
        found = op(*tree_unflatten(bare, form))
    for real, meta in zip(*((x if isinstance(x, tuple) else (x,)) for x in (made, found)), strict=True):
        assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_where_a_rule_answers_it_is_the_device_s(order: tuple[int, ...]) -> None:
    """Whatever lies in which order, and dimensions of size 1, whose strides torch chooses in many ways."""
    answered = 0
    for shape in product((1, 2, 3), repeat=3):
        x = torch.randn([shape[p] for p in order]).permute(*(order.index(k) for k in range(3)))
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            *((op, (x,)) for op in OF_ONE),
            *((op, (x, y)) for op in BY_TWO for y in (x, x.contiguous(), 2.0, torch.tensor(2.0), x[0], x[:, :1])),
            *((op, (x, 2)) for op in (ATEN.mul.Scalar, ATEN.pow.Tensor_Scalar, ATEN.div_.Scalar)),
            *((ATEN._safe_softmax.default, (x, dim)) for dim in (0, -1)),
            *((ATEN.mean.dim, (x, dims, keeps)) for dims in ([-1], [0, 1], [1]) for keeps in (True, False)),
            *((ATEN.cat.default, ([x, y], dim)) for y in (x, x.contiguous()) for dim in (0, 1)),
            (ATEN.native_layer_norm.default, (x, [shape[2]], None, None, 1e-5)),
            (ATEN.bmm.default, (x, x.transpose(1, 2))),
        ]
        for op, args in calls:
            flat, form = tree_flatten(args)
            found = _RULES[op](*tree_unflatten(without_data(flat), form))  # type: ignore[arg-type]
            if found is not None:
                answered += 1
                made = op(*args)
                for real, meta in zip(*((t if isinstance(t, tuple) else (t,)) for t in (made, found)), strict=True):
                    assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype), op
    assert answered > 400
