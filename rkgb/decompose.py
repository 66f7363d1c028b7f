"""Operations that are split into the parts that PyTorch itself composes them of, because a plan gains by it.

``dropout`` on the CPU draws a mask (slow) and multiplies by it (fast). As one operation, computing its
result again would draw the mask again; split, the mask can be kept and the product computed again.
The parts are those of ATen's own implementation (``_dropout_impl`` in native/Dropout.cpp), so results,
gradients and random numbers are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rkgb.graphs import Node, Ref

_DROPOUT = (torch.ops.aten.dropout.default, torch.ops.aten.dropout_.default)


def is_split(node: Node, read: Callable[[int], torch.Tensor]) -> bool:
    """Whether ``split`` applies to ``node`` on these values."""
    if node.op not in _DROPOUT or not isinstance(node.args[0], Ref):
        return False
    x, (_, p, train) = read(node.args[0].index), node.args
    return bool(train) and 0 < p < 1 and x.device.type == "cpu" and x.numel() > 0


def split(node: Node, read: Callable[[int], torch.Tensor], new_value: Callable[[str], int]) -> list[Node]:
    """The parts of ``node``; ``new_value(name)`` makes a value for an intermediate result."""
    aten = torch.ops.aten
    ref, p = node.args[0], node.args[1]
    like = torch.empty_like(read(ref.index))
    form = (("dtype", like.dtype), ("device", like.device))
    empty, drawn, mask = (new_value(name) for name in ("empty", "bernoulli", "mask"))

    def part(op: Callable[..., object], name: str, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...], out: int) -> Node:
        return Node(op, name, args, kwargs, (out,), False, node.mode, node.line)

    multiply = aten.mul_.Tensor if node.op is _DROPOUT[1] else aten.mul.Tensor
    return [
        part(aten.empty_strided.default, "empty", (list(like.shape), list(like.stride())), form, empty),
        part(aten.bernoulli_.float, "bernoulli_", (Ref(empty), 1 - p), (("generator", None),), drawn),
        part(aten.div_.Scalar, "div_", (Ref(drawn), 1 - p), (), mask),
        part(multiply, "dropout", (ref, Ref(mask)), (), node.outputs[0]),
    ]
