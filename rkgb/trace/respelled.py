"""Other spellings of calls that torch's tracer does not record, or records as something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def data_of(t: torch.Tensor) -> torch.Tensor:
    """``t.data``, which the tracer would record as a constant."""
    return t.data


@dataclass(frozen=True)
class ViewAs:
    """``t.view(dtype)``, for which the tracer finds no overload."""

    dtype: torch.dtype

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        return t.view(self.dtype)


Respelled = Callable[[torch.Tensor], torch.Tensor]


def respelled(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Respelled | None:
    """The call ``name(*args, **kwargs)`` as a function of its first argument, if the tracer would not record it."""
    if name == "data.__get__":
        return data_of
    if name == "Tensor.view":
        dtype = next(iter((*args[1:], *kwargs.values())), None)
        if isinstance(dtype, torch.dtype):
            return ViewAs(dtype)
    return None


_BOOLEAN = "boolean"  # an attribute of constants


def spell_booleans(block: Any) -> Any:
    """Make True and False that stand for numbers (``mask & True``) 1 and 0, as torch.jit has no overload for them.

    ``constant`` returns them as booleans. Returns the first operation that still matches no overload, or None.
    """
    for node in list(block.nodes()):
        unmatched = next(filter(None, map(spell_booleans, node.blocks())), None)
        if unmatched is None and node.kind().startswith("aten::") and not _is_known(node):
            booleans = list(filter(_is_boolean, node.inputs()))
            if not any(_known_with_numbers(node, some) for some in (*([value] for value in booleans), booleans)):
                unmatched = node
        if unmatched is not None:
            return unmatched
    return None


def _known_with_numbers(node: Any, booleans: list[Any]) -> bool:
    """Whether ``node`` matches an overload if ``booleans`` are numbers; if it does, they become numbers."""
    for value in booleans:
        value.setType(torch._C.IntType.get())
    known = _is_known(node)
    for value in booleans:
        if known:
            value.node().i_(_BOOLEAN, 1)
        else:
            value.setType(torch._C.BoolType.get())
    return known


def _is_known(node: Any) -> bool:
    known: bool = node.schema() != "(no schema)"
    return known


def _is_boolean(value: Any) -> bool:
    return value.node().kind() == "prim::Constant" and type(value.toIValue()) is bool


def constant(node: Any) -> Any:
    """The value of a constant of the graph."""
    if node.hasAttribute(_BOOLEAN):
        return bool(node.i("value"))
    # A 0-dim tensor read by t() keeps its "wrapped number" flag, which decides type promotion.
    if node.hasAttribute("value") and node.kindOf("value") == "t":
        return node.t("value")
    return node.output().toIValue()
