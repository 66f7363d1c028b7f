"""What is known of an operation before it runs, and what it must return."""

from __future__ import annotations

from typing import Any

import torch

from rkgb.errors import TraceError, UnsupportedError
from rkgb.nodes import Node, refs
from rkgb.trace.guards import is_guard
from rkgb.trace.operators import STATISTICS, named, written_arguments


def check_results(node: Node, results: tuple[Any, ...]) -> None:
    """Raise an error for results that no plan can hold."""
    if not all(isinstance(r, torch.Tensor) for r in results):
        kinds = ", ".join(type(r).__name__ for r in results)
        raise TraceError(
            f"{node.name} at {node.line} returns {kinds}, and operations of a plan return tensors alone. An "
            "autograd.Function does so where it counts or changes something else: do that outside of it"
        )
    for t in results:
        if t.layout != torch.strided or t.is_nested:
            raise UnsupportedError(
                f"{node.name} at {node.line} makes a {'nested' if t.is_nested else 'sparse'} tensor, which no plan "
                "can keep or drop. Plan the submodules around that line instead of the whole module."
            )


def is_python(node: Node) -> bool:
    """Whether the operation is Python (an ``autograd.Function``), of which no schema says what it does."""
    return not hasattr(node.op, "_schema") and not is_guard(node)


def announced_writes(node: Node) -> set[int]:
    """The values that the operation writes to by its schema.

    In-place operations are left out, since version counters show their writes. An operation that returns nothing
    (``retain_grad``, ``record_stream``) changes no contents. In training batch norm writes its running statistics,
    which its schema does not say; they may come out as they were.
    """
    schema = getattr(node.op, "_schema", None)
    if schema is None or node.name.endswith("_"):
        return set()
    names = [name for _, name in written_arguments(node.op)] if schema.returns else []
    if not names and node.name not in STATISTICS:
        return set()
    given = named(node.op, node.args, dict(node.kwargs))
    if node.name in STATISTICS and any(given.get(flag) for flag in ("training", "use_input_stats")):
        names += ["running_mean", "running_var"]
    return {v for name in names for v in refs([given.get(name)])}
