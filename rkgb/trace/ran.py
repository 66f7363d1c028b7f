"""Which operators a run calls, below autograd: two runs of a module that differ here took different ways in Python."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# A wrong number shows in the results of these, whatever the values are.
_ARITHMETIC = frozenset("add sub rsub mul div pow add_ sub_ mul_ div_ fill_ fill full arange".split())


class Ran(TorchDispatchMode):
    """Counts operators. ``numbers``: those with numbers that may have no effect on some values, as the bounds of
    ``clamp``, with these numbers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.numbers: Counter[tuple[str, str]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiler looks into a plan's making; to say so to torch would import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.operators[str(func)] += 1
        for position, name in _numbers(func):
            given = kwargs[name] if name in kwargs else args[position] if position < len(args) else None
            if given is not None:
                self.numbers[str(func), f"{name}={given!r}"] += 1
        return func(*args, **kwargs)


@cache
def _numbers(func: Any) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that are numbers of any type."""
    if func._schema.name.removeprefix("aten::") in _ARITHMETIC:
        return ()
    return tuple((k, a.name) for k, a in enumerate(func._schema.arguments) if "number" in str(a.type))
