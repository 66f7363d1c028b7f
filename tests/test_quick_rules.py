"""Sizes without data are those that a device makes, also where torch's rules are not asked again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from rkgb.storages import storage_key
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
    given = tree_unflatten(bare, form)
    with QuickRules():
        found = op(*given), op(*given)
    for theirs in found:
        for real, meta in zip(*((x if isinstance(x, tuple) else (x,)) for x in (made, theirs)), strict=True):
            assert (meta.shape, meta.stride(), meta.dtype) == (real.shape, real.stride(), real.dtype)
            assert meta.untyped_storage().nbytes() == real.untyped_storage().nbytes()
            assert (meta is given[0]) == (real is args[0])


def test_what_would_draw_is_seen_also_where_torch_is_not_asked_again() -> None:
    x, rules = torch.empty(3, 4, device="meta"), QuickRules()
    drawn = []
    for draw in (torch.rand_like, torch.relu, torch.rand_like, torch.Tensor.t, lambda t: torch.dropout(t, 0.5, True)):
        with rules:
            draw(x)  # type: ignore[operator]
        drawn.append(rules.drawn)
    assert drawn == [True, False, True, False, True]


def test_equal_calls_ask_torch_once_and_others_again() -> None:
    asked = []

    class Asked(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.empty(3, 4, device="meta")
    with Asked(), QuickRules():
        a, b = torch.relu(x), torch.relu(x)
        assert storage_key(a) != storage_key(b)
        assert asked == [ATEN.relu.default, ATEN.empty_strided.default]
        for view in (x.t(), x[:2], x.double()):
            torch.relu(view)
        assert asked.count(ATEN.relu.default) == 4
        for power in (1, 1.0, True):
            torch.full((2,), power, device="meta")
        kinds = [torch.full((2,), power, device="meta").dtype for power in (1, 1.0, True)]
        assert kinds == [torch.int64, torch.float32, torch.bool]
        assert storage_key(x.view(4, 3)) == storage_key(x.view(4, 3)) == storage_key(x)
        for _ in range(2):
            turned = torch.empty(3, 4, device="meta").t_()
            assert turned.shape == (4, 3)
        assert torch.zeros(2).tolist() == torch.zeros(2).tolist() == [0, 0]
