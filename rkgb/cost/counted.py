"""Times by counted operations and bytes: the same on every run and on every machine of a kind.

Counted are the operations that PyTorch's flop counter knows: matrix products, convolutions, attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from rkgb.cost.piece import Piece, gradients, run_backward
from rkgb.cost.saved import each_saved

Model = Callable[[int, int], int]
"""(operations, bytes touched) -> nanoseconds."""


def counted(function: Callable[[], Any]) -> tuple[Any, int]:
    """The result of ``function`` and the number of its operations."""
    with FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops()


def counted_tail(function: Callable[[], Any]) -> int:
    """The number of operations of ``function`` after autograd has saved the last tensor."""
    at_last = 0

    def note(_: torch.Tensor) -> None:
        nonlocal at_last
        at_last = counter.get_total_flops()

    with FlopCounterMode(display=False) as counter, each_saved(note):
        function()
    return int(counter.get_total_flops()) - at_last


def modelled_times(piece: Piece, touched: int, time: Model) -> tuple[int, int]:
    """Times of forward and backward by ``time``; the latter is 0 where no result gets a gradient.

    ``touched``: bytes that the forward reads and writes. The backward is taken to touch twice as many.
    """
    results, operations = counted(piece.forward)
    forward = time(operations, touched)
    ends = piece.ends(results)
    if not ends:
        return forward, 0
    _, operations = counted(lambda: run_backward(ends, gradients(piece, results)))
    return forward, time(operations, 2 * touched)
