"""What tells whether a reentrant checkpoint gives the same without."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.probe.contexts import functions_of
from rkgb.program import same
from rockmate.follow.tape import Tape


class PlainGraph:
    """The graph that a reentrant part has without its checkpoint. Within one, autograd runs a backward of its own from
    the ``results`` to the tensors among the arguments, and adds to the gradients of leaves at once.

    ``beyond``: it uses what was computed before, and is no argument. ``readers``: the operations that read each tensor
    to which it adds more than one gradient, or whose gradient stays.
    """

    def __init__(self, args: tuple[Any, ...], results: list[torch.Tensor], first: int, tape: Tape) -> None:
        """``first``: the sequence number of the first node that it may have."""
        arguments = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
        at = {(t.grad_fn, t.output_nr): t for t in arguments if t.grad_fn is not None}
        uses: Counter[tuple[Any, int]] = Counter()
        # Without arguments its results have no gradients; of one that comes twice, gradients are added apart.
        self.beyond = not arguments or len({id(t) for t in arguments}) < len(arguments)
        self.readers: list[list[int]] = []
        for function in functions_of([t for t in results if t.requires_grad], first):
            if (leaf := getattr(function, "variable", None)) is not None:
                self.readers.append(tape.readers_of(leaf))
                continue
            uses.update((f, k) for f, k in function.next_functions if f is not None and f._sequence_nr() < first)
        self.beyond |= not uses.keys() <= at.keys()
        self.readers += [tape.readers_of(at[edge]) for edge, count in uses.items() if count > 1 and edge in at]

    def differs(self, within: range) -> str:
        """Why gradients are others with the checkpoint; empty if they are not. ``within``: the part's operations."""
        if self.beyond:
            return "needs the gradients of no tensor that it is given, or of others"
        if any(not readers or not all(k in within for k in readers) for readers in self.readers):
            return "shares tensors with others, so that gradients are added in another order"
        return ""


def alike(ours: Any, theirs: Any) -> bool:
    """Whether two results are equal, bit for bit, and have gradients alike."""
    (mine, form), (others, other) = pytree.tree_flatten(ours), pytree.tree_flatten(theirs)
    return form == other and all(map(_alike, mine, others))


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.requires_grad == b.requires_grad and same(a, b)
    return type(a) is type(b) and bool(a is b or a == b)
