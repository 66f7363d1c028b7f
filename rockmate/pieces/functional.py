"""Operations in place on results that nobody reads again, as operations that make memory: in a piece there is none."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from rockmate.pieces.seen import Seen

IN_PLACE = "in_place"
"""The meta entry of a changed node: target and keyword arguments as they were, and the node whose memory it changed."""


def arguments_of(node: fx.Node) -> dict[str, Any]:
    """What a function of ``torch.nn.functional`` is given, by the names of its arguments, defaults included."""
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type] # a function
    bound.apply_defaults()
    return bound.arguments


def without_writes(program: fx.GraphModule, seen: Mapping[fx.Node, Seen]) -> bool:
    """Change operations in place that are light, where that changes no value; whether there were any."""
    places = {n: k for k, n in enumerate(program.graph.nodes)}
    aliases: dict[fx.Node, list[fx.Node]] = {}
    found = False
    for n, about in seen.items():
        recorded = about.mode.grad or not about.grad  # else the result keeps the history of the tensor before
        own = about.writes == [about.base] and about.base.op.startswith("call")
        if about.light and own and recorded and len(about.types) == 1:
            before = aliases[about.base]
            other = _without(n)
            if other and all(places[user] <= places[n] for m in before for user in m.users):
                n.meta[IN_PLACE] = n.target, dict(n.kwargs), about.base
                n.target, n.kwargs = other
                aliases[about.base] = [n]
                found = True
                continue
        aliases.setdefault(about.base, []).append(n)
    return found


def put_back(copy: fx.Node, chosen: Mapping[fx.Node, Any]) -> None:
    """Let the ``copy`` of a node that is in no piece work in place, as it did, unless it reads a piece's result.

    ``chosen``: the nodes that are in pieces.
    """
    target, kwargs, base = copy.meta.pop(IN_PLACE, (None, None, None))
    if target is not None and base not in chosen:
        copy.target, copy.kwargs = target, kwargs


def _without(n: fx.Node) -> tuple[Any, dict[str, Any]] | None:
    """Target and keyword arguments of the operation that makes new memory for what ``n`` does in place."""
    if n.kwargs.get("inplace") is True:
        return n.target, {**n.kwargs, "inplace": False}
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    if n.op == "call_method" and name.endswith("_") and callable(getattr(torch.Tensor, name[:-1], None)):
        return name[:-1], dict(n.kwargs)
    if getattr(operator, name, None) is n.target and hasattr(operator, name[1:]):
        return getattr(operator, name[1:]), dict(n.kwargs)
    if name.endswith("_") and getattr(torch, name, None) is n.target and hasattr(torch, name[:-1]):
        return getattr(torch, name[:-1]), dict(n.kwargs)
    return None
