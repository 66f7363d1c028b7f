"""Parameters that a module's forward changes (averaged copies of others, clamped scales): put back after a trace."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

_Copies = list[tuple[torch.Tensor, int, torch.Tensor]]  # tensor, its version, a copy


class Written:
    """Keeps what parameters held before they were written: each is copied before a call that gets it, and the copy
    dropped after if the call changed nothing. So planning needs the memory of one parameter, not of all."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        strided = list(_strided(own))
        self._own = {id(t) for t in strided}
        self._at = {_address(t): t for t in strided}
        self._parameters = {_address(t): t for t in strided if isinstance(t, torch.nn.Parameter)}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._changed: set[int] = set()

    def before(self, name: str, arguments: Any) -> _Copies:
        """What to hand to ``after``."""
        if not self._parameters or name.endswith("__get__"):
            return []
        found = {id(p): p for t in _strided(arguments) if (p := self._parameters.get(_address(t))) is not None}
        return [(p, p._version, p.detach().clone()) for k, p in found.items() if k not in self._copies]

    def after(self, copies: _Copies) -> None:
        """The call is over."""
        for p, version, copy in copies:
            if p._version != version:
                self._copies[id(p)] = (p, copy)

    def keep(self, t: torch.Tensor) -> None:
        """``t`` is about to be had in a form whose changes are not counted."""
        p = self._parameters.get(_address(t))
        if p is not None and id(p) not in self._copies:
            self._copies[id(p)] = (p, p.detach().clone())

    def keep_captured(self, t: torch.Tensor) -> None:
        """``t``, which nobody knew of, is about to be used."""
        if _has_memory(t) and not torch._C._functorch.is_functorch_wrapped_tensor(t):
            self._copies[id(t)] = (t, t.detach().clone())

    def is_parameter(self, t: torch.Tensor) -> bool:
        return id(t) in self._own and isinstance(t, torch.nn.Parameter)

    def may_take(self, t: torch.Tensor, value: torch.Tensor) -> bool:
        """Whether ``t.data = value`` is to copy: ``t`` is the module's, and none of the module's holds ``value``."""
        alike = t.shape == value.shape and t.dtype == value.dtype and t.device == value.device
        return id(t) in self._own and alike and _address(value) not in self._at

    def put_back(self) -> None:
        """Give every parameter what it held."""
        with torch.no_grad():
            for key, (p, copy) in self._copies.items():
                if not torch.equal(p, copy):
                    self._changed.add(key)
                    p.copy_(copy)
        self._copies.clear()

    def changed(self, t: torch.Tensor) -> bool:
        """Whether ``put_back`` had to change it."""
        return id(t) in self._changed


def _strided(tree: Any) -> Iterable[torch.Tensor]:
    """The tensors of ``tree`` that have memory."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return (t for t in pytree.tree_leaves(tree) if isinstance(t, torch.Tensor) and _has_memory(t) and not wrapped(t))


def _has_memory(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and not t.is_nested


def _address(t: torch.Tensor) -> int:
    address: int = t.untyped_storage()._cdata
    return address
