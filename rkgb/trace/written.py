"""Parameters that a module's forward changes (averaged copies of others, clamped scales): put back after a trace.

In two ways: below autograd, where every write shows (``put_back``), except while tracing (``Written``), where a mode
there would hide convolutions from the tracer, which records them from inside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from rkgb.storages import storage_key
from rkgb.trace.ran import Ran
from rkgb.trees import tensor_leaves

_Copies = list[tuple[torch.Tensor, int, torch.Tensor]]  # tensor, its version, a copy


class Written:
    """Keeps what parameters held before they were written: each is copied before a call that gets it, and the copy
    dropped after if the call changed nothing. So planning needs the memory of one parameter, not of all."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        strided = list(_strided(own))
        self._own = {id(t) for t in strided}
        self._at = {storage_key(t): t for t in strided}
        self._parameters = {storage_key(t): t for t in strided if isinstance(t, torch.nn.Parameter)}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._changed: set[int] = set()

    def before(self, name: str, arguments: Any) -> _Copies:
        """What to hand to ``after``."""
        if not self._parameters or name.endswith("__get__"):
            return []
        found = {id(p): p for t in _strided(arguments) if (p := self._parameters.get(storage_key(t))) is not None}
        return [(p, p._version, p.detach().clone()) for k, p in found.items() if k not in self._copies]

    def after(self, copies: _Copies) -> None:
        """The call is over."""
        for p, version, copy in copies:
            if p._version != version:
                self._copies[id(p)] = (p, copy)

    def keep(self, t: torch.Tensor) -> None:
        """``t`` is about to be had in a form whose changes are not counted."""
        p = self._parameters.get(storage_key(t))
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
        return id(t) in self._own and alike and storage_key(value) not in self._at

    def put_back(self) -> None:
        """Give every parameter what it held."""
        with torch.no_grad():
            for key, (p, copy) in self._copies.items():
                self._changed.add(key)  # also where it holds the same: an average of two equal tensors
                if not torch.equal(p, copy):
                    p.copy_(copy)
        self._copies.clear()

    def changed(self, t: torch.Tensor) -> bool:
        """Whether it may have been written to, so that ``put_back`` had a copy."""
        return id(t) in self._changed


class _Keeping(Ran):
    """Copies each of ``own`` before the first operation that writes to it."""

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.own: dict[int, list[torch.Tensor]] = {}
        for t in own:
            self.own.setdefault(storage_key(t), []).append(t)
        self.copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
            written = [given.get(a.name) for a in func._schema.arguments if a.alias_info and a.alias_info.is_write]
            for own in (own for t in _strided(written) for own in self.own.get(storage_key(t), ())):
                if id(own) not in self.copies:
                    self.copies[id(own)] = (own, own._version, own.detach().clone())
        return super().__torch_dispatch__(func, types, args, kwargs)


@contextlib.contextmanager
def put_back(model: torch.nn.Module) -> Iterator[Ran]:
    """Afterwards parameters, and tensors that modules hold as plain attributes, are what they were.

    What runs meanwhile is noted. Takes the memory of what is written, not of all.
    """
    held = [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    own = [t for t in (*model.parameters(), *held) if t.layout == torch.strided]
    data = [(t, t.detach()) for t in own]
    keeping = _Keeping(own)
    try:
        with keeping:
            yield keeping
    finally:
        with torch.no_grad():
            for t, before in data:
                if storage_key(t) != storage_key(before):
                    t.data = before
            for t, version, copy in keeping.copies.values():
                t.copy_(copy)
                torch._C._autograd._unsafe_set_version_counter((t,), (version,))


def _strided(tree: Any) -> Iterable[torch.Tensor]:
    """The tensors of ``tree`` that have memory."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return (t for t in tensor_leaves(tree) if _has_memory(t) and not wrapped(t))


def _has_memory(t: torch.Tensor) -> bool:
    return t.layout == torch.strided and not t.is_nested
