"""What operators a run calls below autograd: counts of them, and what they write.

Two runs of a module with different counts took different branches in Python.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A program calls these, and views, elsewhere than the module (``rkgb/probe/decompose.py``).
_ADDED = frozenset(
    "add sub rsub mul div pow add_ sub_ mul_ div_ fill_ fill full empty empty_like empty_strided bernoulli_ _to_copy "
    "copy_ clone".split()
)


# These operations change running statistics, on which their results in training do not depend. So they may be
# recomputed, on copies of the statistics. Other operations that read these run once, as does one that changes any other
# buffer. Version counters and most of their schemas do not show the writes.
STATISTICS = frozenset(
    "batch_norm instance_norm native_batch_norm _batch_norm_impl_index cudnn_batch_norm cumulative_batch_norm".split()
)


class _About(NamedTuple):
    """An operator: its name; whether a program may call it where the module does not; the arguments that it writes to,
    by place and name, running statistics among them.
    """

    name: str
    added: bool
    writes: tuple[tuple[int, str], ...]


@cache
def _about(func: Any) -> _About:
    added = func.is_view or func._schema.name.removeprefix("aten::") in _ADDED
    names = [x.name for x in func._schema.arguments]
    statistics = [(names.index(name), name) for name in ("running_mean", "running_var") if name in names]
    return _About(str(func), added, (*written_arguments(func), *statistics))


@cache
def written_arguments(op: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes to, by its schema: positions and names."""
    arguments = enumerate(op._schema.arguments)
    return tuple((k, x.name) for k, x in arguments if x.alias_info is not None and x.alias_info.is_write)


class OperatorCount(TorchDispatchMode):
    """Counts operators while it is active.

    ``given``: counts by operator and arguments that are numbers and the like. Some arguments have no effect on some
    values, such as the bounds of ``clamp``, the target that a loss ignores, or a place among zeros. ``before_write``:
    called with what an operator is about to write to. ``largest``: bytes of the largest result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.given: Counter[tuple[str, bool, str]] = Counter()
        self.before_write: Callable[[list[Any]], None] | None = None
        self.largest = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: to skip its methods, torch would import TorchDynamo, which takes seconds."""
        return False

    def got_arguments_of(self, ours: OperatorCount) -> bool:
        """Whether the operators of this run had, in a run of a program, the same arguments.

        Of an operator that a program may add, as many calls may have others as it was called more often.
        """
        here, there = self.operators, ours.operators
        others: Counter[tuple[str, bool]] = Counter()
        for (name, added, arguments), n in ours.given.items():
            if name in here:
                others[name, added] += max(0, n - self.given[name, added, arguments])
        return all(n <= (there[name] - here[name] if added else 0) for (name, added), n in others.items() if n)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, added, writes = _about(func)
        self.operators[name] += 1
        given = repr((*map(_without_tensors, args), *sorted(_without_tensors(kwargs).items())))
        self.given[name, added, given] += 1
        if writes and self.before_write is not None:
            self.before_write([args[k] if k < len(args) else kwargs.get(argument) for k, argument in writes])
        result = func(*args, **kwargs)
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor):
                self.largest = max(self.largest, t.numel() * t.element_size())
        return result


def _without_tensors(a: Any) -> Any:
    """An argument with nothing in place of tensors, but of what may be a number; lists and tuples are alike."""
    if isinstance(a, torch.Tensor):
        number = not a.dim() and a.dtype in (torch.int64, torch.float64) and a.layout == torch.strided and not a.is_meta
        return a.item() if number else None
    if isinstance(a, (list, tuple)):
        return [*map(_without_tensors, a)]
    if isinstance(a, dict):
        return {k: _without_tensors(x) for k, x in a.items()}
    return a
