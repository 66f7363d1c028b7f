"""Tensors that an ``autograd.Function`` keeps as attributes of its ``ctx``, beside ``save_for_backward``.

No hook sees them, so nothing can take their place: they stay from the first run of the function until autograd's graph
goes, at the end of the step. A second run makes others, which go at once, and the backward reads the first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from rkgb.graphs import S_graph
from rkgb.trees import tensors_in

next_number: Any = torch._C._autograd._get_sequence_nr
"""The number of the next node of autograd's graph that this thread makes."""


def context_tensors(results: Sequence[torch.Tensor], first: int) -> list[torch.Tensor]:
    """What the functions that made ``results`` keep in lists, tuples, dicts and attributes of their ``ctx``.

    ``first``: the number of the first node of autograd's graph that is theirs.
    """
    left: list[Any] = [t.grad_fn for t in results]
    found: list[torch.Tensor] = []
    seen: set[Any] = set()
    while left:
        function = left.pop()
        if function is None or function in seen or function._sequence_nr() < first:
            continue
        seen.add(function)
        if isinstance(function, BackwardCFunction):
            found += tensors_in(vars(function))
        left += (following for following, _ in function.next_functions)
    return found


def context_bytes(s: S_graph) -> int:
    """Bytes that functions keep so, of memory that nothing else of the graph lies in."""
    return sum(sum(facts.context.private) for facts in s.d.facts)


def context_storages(s: S_graph) -> set[int]:
    """The storages of the graph that functions keep so."""
    return {x for facts in s.d.facts for x in facts.context.storages}
