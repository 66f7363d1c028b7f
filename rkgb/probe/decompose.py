"""Operations that are split into parts, so that a plan can keep one part and recompute the others.

``dropout`` on the CPU draws a mask, which is slow and as large as its input, and multiplies by it, which is fast. As
one operation, its recomputation would draw the mask again. In three parts, a plan can keep the bits alone, a quarter of
a float mask, and recompute mask and product in a fraction of the time. ATen's own dropout (``_dropout_impl`` in
native/Dropout.cpp) draws the same bits, as numbers of the input's type, and divides them by 1 - p: results, gradients
and random numbers are the same. The first run of a plan does as ATen where there is memory for it
(``rockmate/run/draws.py``).

``broadcast_tensors`` returns views of unrelated tensors, which one operation would put into one group. It becomes an
``expand`` of each, which is what ATen does.

A slice that takes all of an input that has a gradient becomes an ``alias``. Python's indexing makes no slice then, but
while a module is traced it makes one, whose backward would lay the gradient out anew (``applySlice`` in
ATen/TensorIndexing.h).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rkgb.graphs import Node, Ref

_BROADCAST = torch.ops.aten.broadcast_tensors.default
DRAWN, MASK = ("empty", "bernoulli_"), ("cast", "mask")  # names of what draws bits, and what makes a mask of them
_SLICE = torch.ops.aten.slice.Tensor
_DROPOUT = (torch.ops.aten.dropout.default, torch.ops.aten.dropout_.default)


def parts(
    node: Node,
    read: Callable[[int], torch.Tensor],
    new_value: Callable[[str], int],
    device_of: Callable[[torch.Tensor], torch.device],
) -> list[Node]:
    """The parts of ``node`` on the values that ``read`` gives; itself, if it is not split.

    ``new_value(name)`` makes a value for an intermediate result. ``device_of``: where a value is computed.
    """
    aten, where = torch.ops.aten, (node.mode, node.line, node.path)
    first: Any = node.args[0] if node.args else None
    if node.op is _BROADCAST and all(isinstance(a, Ref) for a in first):
        shape = list(torch.broadcast_shapes(*(read(a.index).shape for a in first)))
        each = zip(first, node.outputs, strict=True)
        return [Node(aten.expand.default, "expand", (a, shape), (), (v,), False, *where) for a, v in each]
    if node.op not in (_SLICE, *_DROPOUT) or not isinstance(first, Ref):
        return [node]
    x = read(first.index)
    if node.op is _SLICE:
        alias = Node(aten.alias.default, node.name, node.args[:1], (), node.outputs, False, *where)
        return [alias if _takes_all(x, *node.args[1:]) else node]
    _, p, train = node.args
    if not train or not 0 < p < 1 or device_of(x).type != "cpu" or not x.numel():
        return [node]
    like = torch.empty_like(x)
    form = (("dtype", torch.int8), ("device", like.device))  # the byte that casts of floating numbers are fastest to
    empty, bits, cast, mask = (new_value(name) for name in ("empty", "bits", "cast", "mask"))
    multiply = aten.mul_.Tensor if node.op is _DROPOUT[1] else aten.mul.Tensor
    steps: list[tuple[Any, str, tuple[Any, ...], tuple[tuple[str, Any], ...], int]] = [
        (aten.empty_strided.default, DRAWN[0], (list(like.shape), list(like.stride())), form, empty),
        (aten.bernoulli_.float, DRAWN[1], (Ref(empty), 1 - p), (("generator", None),), bits),
        (aten._to_copy.default, MASK[0], (Ref(bits),), (("dtype", like.dtype),), cast),
        (aten.div_.Scalar, MASK[1], (Ref(cast), 1 - p), (), mask),
        (multiply, "dropout", (first, Ref(mask)), (), node.outputs[0]),
    ]
    return [Node(op, name, args, kwargs, (out,), False, *where) for op, name, args, kwargs, out in steps]


def _takes_all(x: torch.Tensor, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> bool:
    """Whether Python's indexing makes nothing of this slice of ``x``, and it matters to a gradient.

    Numbers that are tensors are not looked at.
    """
    if not x.requires_grad or not all(a is None or isinstance(a, int) for a in (dim, start, end, step)):
        return False
    return start in (None, 0) and (end is None or end >= x.shape[dim]) and step == 1
