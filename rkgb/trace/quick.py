"""Torch's rules for sizes are Python, and take a tenth of a millisecond: of equal calls, the first alone asks them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.storages import storage_key
from rkgb.trace.operators import named

_META = torch.device("meta")
_Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class QuickRules(TorchDispatchMode):
    """Results of operations on tensors without data, as torch makes them: new tensors like those of an equal call, or
    the first argument, changed in place. ``drawn``: an operation would have drawn random numbers since it was entered.

    What is known of calls is theirs alone, whatever the sizes, and goes with this object.
    """

    def __init__(self) -> None:
        super().__init__()
        self.drawn = False
        self._known: dict[Hashable, tuple[type, tuple[_Form, ...]]] = {}  # by call: type and forms of what it makes
        self._in_place: set[Hashable] = set()

    def __enter__(self) -> QuickRules:
        self.drawn = False
        super().__enter__()
        return self

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see rkgb.trace.operators.WritesSeen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_quick, may_draw = _kind(func)
        if is_quick:
            return func(*args, **kwargs)
        if may_draw:
            given = {x.name: x.default_value for x in func._schema.arguments} | named(func, args, kwargs)
            self.drawn |= given.get("dropout_p") != 0.0
        try:
            call = func, _key(args), _key(tuple(kwargs.items()))
            known = self._known.get(call)
        except TypeError:  # of what has no form, nothing is known
            return func(*args, **kwargs)
        if call in self._in_place:
            return args[0]
        if known is not None:
            kind, forms = known
            made = [torch.empty_strided(shape, stride, dtype=dtype, device=_META) for shape, stride, dtype in forms]
            return made[0] if kind is torch.Tensor else kind(made)
        result = func(*args, **kwargs)
        if args and result is args[0] and torch.Tag.inplace_view not in func.tags:
            self._in_place.add(call)
        found = result if isinstance(result, (tuple, list)) else [result]
        if _are_new(found, (*args, *kwargs.values())):
            self._known[call] = type(result), tuple((tuple(t.shape), t.stride(), t.dtype) for t in found)
        return result


@cache
def _kind(func: Any) -> tuple[bool, bool]:
    """Whether an operator is as quick as to look for an equal call, and whether it may draw random numbers."""
    return func.is_view or func in _QUICK, torch.Tag.nondeterministic_seeded in func.tags


_QUICK = (torch.ops.aten._unsafe_view.default, torch.ops.aten.empty_strided.default)
"""These are, beside views."""


def _key(argument: Any) -> Hashable:
    """Equal for arguments on which the same sizes follow. Raises ``TypeError`` for those that nothing is known of."""
    if isinstance(argument, torch.Tensor):
        # A number on the CPU may be one of Python's, which counts less for the type of a result.
        if type(argument) not in _PLAIN or not argument.is_meta or argument.layout != torch.strided:
            raise TypeError
        return tuple(argument.shape), argument.stride(), argument.storage_offset(), argument.dtype
    if isinstance(argument, (tuple, list)):
        return tuple(map(_key, argument))
    return type(argument), argument


def _are_new(results: Sequence[Any], arguments: Sequence[Any]) -> bool:
    """Whether ``results`` are tensors without data, which lie in memory of their own that ends where they do."""
    if not results or not all(type(t) is torch.Tensor and t.is_meta and not t.storage_offset() for t in results):
        return False
    given = {storage_key(t) for t in torch.utils._pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)}
    places = {storage_key(t) for t in results}
    fits = all(t.untyped_storage().nbytes() == _extent(t) for t in results)
    return fits and len(places) == len(results) and given.isdisjoint(places)


def _extent(t: torch.Tensor) -> int:
    """Bytes from the first to the last element."""
    if not t.numel():
        return 0
    return t.element_size() * (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)))
