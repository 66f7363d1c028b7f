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

    ``leaves`` that it uses; ``given``: tensors that it was given, and how many operations use each. ``beyond``: it uses
    what was computed before, and is no argument.
    """

    def __init__(self, args: tuple[Any, ...], results: list[torch.Tensor], first: int) -> None:
        """``first``: the sequence number of the first node that it may have."""
        arguments = [t for t in args if isinstance(t, torch.Tensor) and t.requires_grad]
        given = {id(t) for t in arguments}
        at = {(t.grad_fn, t.output_nr): k for k, t in enumerate(arguments) if t.grad_fn is not None}
        self.leaves: dict[int, torch.Tensor] = {}
        uses: Counter[int] = Counter()
        # Without arguments its results have no gradients; of one that comes twice, gradients are added apart.
        self.beyond = not arguments or len(given) < len(arguments)
        leaves: Counter[int] = Counter()
        for function in functions_of([t for t in results if t.requires_grad], first):
            if (leaf := getattr(function, "variable", None)) is not None:
                self.leaves[id(leaf)] = leaf
                continue
            for following, number in function.next_functions:
                leaves[id(getattr(following, "variable", None))] += 1
                if following is None or following._sequence_nr() >= first:
                    continue
                if (following, number) in at:
                    uses[at[following, number]] += 1
                else:
                    self.beyond = True
        self.given = [(arguments[k], count) for k, count in uses.items()]
        self.beyond |= any(leaves[key] > 1 for key in given)  # it may be read as a variable, too

    def differs(self, tape: Tape, within: range) -> str:
        """Why gradients are others with the checkpoint; empty if they are not. ``within``: the part's operations."""
        if self.beyond:
            return "needs the gradients of no tensor that it is given, or of others"
        shared = [*self.leaves.values(), *(t for t, count in self.given if count > 1)]
        if any(not readers or not all(k in within for k in readers) for readers in map(tape.readers_of, shared)):
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
