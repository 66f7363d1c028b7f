"""Which operators a run calls, below autograd: two runs of a module that differ here took different ways in Python."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Programs spell dropout with these otherwise (``rkgb/probe/decompose.py``). A wrong number in one shows in results,
# whatever the values are; so it does in views.
_ARITHMETIC = frozenset(
    "add sub rsub mul div pow add_ sub_ mul_ div_ fill_ fill full arange empty empty_like empty_strided bernoulli_ "
    "_to_copy copy_ clone".split()
)


class Ran(TorchDispatchMode):
    """Counts operators. ``given``: those with arguments that are no tensors, with these: some have no effect on some
    values, as the bounds of ``clamp``, or the target that a loss leaves out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.given: Counter[tuple[str, str]] = Counter()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiler looks into a plan's making; to say so to torch would import its compiler, which takes seconds."""
        return False

    def gave(self, ours: Ran) -> bool:
        """Whether a run of a program gave the operators that this run of the module called the same arguments."""
        return all(n <= self.given[call] for call, n in ours.given.items() if call[0] in self.operators)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        self.operators[name] += 1
        if not func.is_view and func._schema.name.removeprefix("aten::") not in _ARITHMETIC:
            self.given[name, _shown((args, kwargs))] += 1
        return func(*args, **kwargs)


def _shown(a: Any) -> str:
    """Arguments without the tensors."""
    if isinstance(a, torch.Tensor):
        return "t"
    if isinstance(a, (list, tuple)):
        return f"[{', '.join(map(_shown, a))}]"
    if isinstance(a, dict):
        return f"{{{', '.join(f'{k}={_shown(x)}' for k, x in sorted(a.items()))}}}"
    return repr(a)
