"""Restoring the parameters that a module's forward changes, such as averaged copies of others or clamped scales.

``put_back`` watches writes below autograd, where all of them show. While tracing, a dispatch mode would hide
convolutions from the tracer, which records them from inside; ``Written`` watches calls instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from rkgb.storages import has_memory, storage_key
from rkgb.trace.operators import STATISTICS, WritesSeen
from rkgb.trees import tensor_leaves

_C: Any = torch._C
_Copies = list[tuple[torch.Tensor, int, torch.Tensor]]  # tensor, its version, a copy


class Written:
    """Keeps copies of parameters that were written.

    A parameter is copied before each call that gets it. The copy is dropped after the call if nothing was changed, so
    that planning needs the memory of one parameter, not of all.
    """

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        strided = [t for t in _strided(own) if not t.is_meta]
        self._own = {id(t) for t in strided}
        self._parameters = {storage_key(t): t for t in strided if isinstance(t, torch.nn.Parameter)}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._changed: set[int] = set()

    def before(self, name: str, arguments: Any) -> _Copies:
        """Copies of the parameters among the arguments of a call, for ``after``."""
        if not self._parameters or name.endswith("__get__"):
            return []
        given = {id(p): p for t in _strided(arguments) if (p := self._parameters.get(storage_key(t))) is not None}
        return [(p, p._version, p.detach().clone()) for k, p in given.items() if k not in self._copies]

    def after(self, name: str, copies: _Copies) -> None:
        """Keep the copies of parameters that the call changed; batch norm's changes show in no version counter."""
        for p, version, copy in copies:
            if p._version != version or name.split(".")[-1] in STATISTICS or not torch.equal(p, copy):
                self._copies[id(p)] = (p, copy)

    def keep(self, t: torch.Tensor) -> None:
        """Copy ``t``, which is about to be read in a form whose writes its version counter does not show."""
        p = self._parameters.get(storage_key(t))
        if p is not None and id(p) not in self._copies:
            self._copies[id(p)] = (p, p.detach().clone())

    def keep_captured(self, t: torch.Tensor) -> None:
        """Copy ``t``, a tensor from outside of the module that is about to be used."""
        if has_memory(t):
            self._copies[id(t)] = (t, t.detach().clone())

    def is_parameter(self, t: torch.Tensor) -> bool:
        return id(t) in self._own and isinstance(t, torch.nn.Parameter)

    def put_back(self) -> None:
        """Restore every parameter that was written."""
        with torch.no_grad():
            for key, (p, copy) in self._copies.items():
                self._changed.add(key)  # also where it holds the same: an average of two equal tensors
                if not torch.equal(p, copy):
                    p.copy_(copy)
        self._copies.clear()

    def changed(self, t: torch.Tensor) -> bool:
        """Whether ``put_back`` had a copy of ``t``, which may have been written."""
        return id(t) in self._changed


@contextlib.contextmanager
def put_back(model: torch.nn.Module, seen: WritesSeen) -> Iterator[None]:
    """A context that restores parameters, and tensors in plain attributes of modules, at its end. ``seen`` is active
    where they are written.

    Takes the memory of the tensors that are written, not of all.
    """
    held = [t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor)]
    own = [t for t in (*model.parameters(), *held) if t.layout == torch.strided]
    data = [(t, t.detach()) for t in own]
    in_memory: dict[int, list[torch.Tensor]] = {}
    for t in own:
        in_memory.setdefault(storage_key(t), []).append(t)
    copies: dict[int, tuple[torch.Tensor, int, torch.Tensor]] = {}

    def keep(written: list[Any]) -> None:
        for t in (t for x in _strided(written) for t in in_memory.get(storage_key(x), ())):
            if id(t) not in copies:
                copies[id(t)] = (t, t._version, t.detach().clone())

    seen.before_write = keep
    try:
        yield
    finally:
        with torch.no_grad():
            for t, before in data:
                if storage_key(t) != storage_key(before):
                    t.data = before
            for t, version, copy in copies.values():
                t.copy_(copy)
                torch._C._autograd._unsafe_set_version_counter((t,), (version,))


def _strided(tree: Any) -> Iterable[torch.Tensor]:
    return filter(has_memory, tensor_leaves(tree))
