"""Tensors that an ``autograd.Function`` keeps as attributes of its ``ctx``, beside ``save_for_backward``.

Saved-tensor hooks do not see them, so they cannot be freed early. They live from the first run of the function until
autograd's graph is freed, at the end of the step. The backward reads these; those of a second run are freed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from rkgb.errors import UnsupportedError
from rkgb.graphs import S_graph
from rkgb.trees import tensors_in

next_number: Any = torch._C._autograd._get_sequence_nr
"""The sequence number of the next node that this thread adds to autograd's graph."""


def functions_of(results: Sequence[torch.Tensor], first: int) -> Iterator[Any]:
    """Autograd's functions that made ``results``, each once.

    ``first``: the sequence number of the first of them. Raises ``UnsupportedError`` where autograd does not tell.
    """
    try:
        left: list[Any] = [t.grad_fn for t in results]
    except RuntimeError as error:  # of a view that was written within no_grad, which eager mode never asks
        raise UnsupportedError(f"a view is written without gradients: {error}") from error
    seen: set[Any] = {None}
    while left:
        function = left.pop()
        if function not in seen and function._sequence_nr() >= first:
            seen.add(function)
            yield function
            left += (following for following, _ in function.next_functions)


def leaves_of(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that a backward of ``results`` gives gradients, each once."""
    variables = (f.variable for f in functions_of(results, 0) if hasattr(f, "variable"))
    return [t for t in dict.fromkeys((*results, *variables)) if t.is_leaf and t.requires_grad]


def context_tensors(results: Sequence[torch.Tensor], first: int) -> list[torch.Tensor]:
    """The tensors in attributes of ``ctx`` (also in lists, tuples, dicts) of the functions that made ``results``.

    ``first``: as above.
    """
    made = functions_of(results, first)
    return [t for function in made if isinstance(function, BackwardCFunction) for t in tensors_in(vars(function))]


def context_bytes(s: S_graph) -> int:
    """Bytes that functions keep in their ``ctx``, without storages of the graph."""
    return sum(sum(facts.context.private) for facts in s.d.facts)


def context_storages(s: S_graph) -> set[int]:
    """The storages of the graph that functions keep in their ``ctx``."""
    return {x for facts in s.d.facts for x in facts.context.storages}
