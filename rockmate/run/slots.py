"""What autograd's graph holds in place of the tensors that it would save."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.storages import storage_key

Form = tuple[Any, ...]
"""How a tensor lies in its storage: dtype, size, stride, offset, and whether it is a conjugate or negative view."""


@dataclass(frozen=True, slots=True)
class Place:
    """What autograd saves at one position of a node: a tensor in memory of ``value``, lying in it as ``form`` says.

    ``value``: -1 if the tensor is private to the node. ``data``: of the value or of the private tensors, -1 if autograd
    keeps the tensor itself; ``form`` is None then, as it is of private ones. ``exact``: the tensor is the value.
    """

    value: int = -1
    data: int = -1
    form: Any = None
    exact: bool = False

    def tensor_in(self, held: dict[int, torch.Tensor]) -> torch.Tensor:
        """The tensor, from the values of its datum."""
        if self.exact and self.value in held:
            return held[self.value]
        return formed(next(iter(held.values())), self.form)

    def holds(self, t: torch.Tensor, env: dict[int, torch.Tensor]) -> bool:
        """Whether ``t`` is what the place says. Of private tensors that is to be found out anew."""
        if self.exact or self.value < 0:
            return t is env.get(self.value)
        same = storage_key(t) == storage_key(env[self.value])
        return same and (self.form is None or form_of(t) == self.form)


class Finder:
    """Finds what autograd saved of a node. ``known``: values in whose memory it may lie, and their data."""

    def __init__(self, known: Iterable[tuple[int, int]], private: Place, env: dict[int, torch.Tensor]) -> None:
        self.env, self.private = env, private
        self.data: dict[int, int] = {}
        self.at: dict[int, int] = {}  # address -> the first value there
        for v, datum in known:
            self.data[v] = datum
            self.at.setdefault(storage_key(env[v]), v)

    def place_of(self, t: torch.Tensor) -> Place:
        v = self.at.get(storage_key(t))
        if v is None:
            return self.private
        v = next((w for w in self.data if self.env[w] is t), v)
        return Place(v, self.data[v], form_of(t) if self.data[v] >= 0 else None, self.env[v] is t)


NOWHERE = Place()
"""Where autograd keeps the tensor itself, and of private tensors that nobody else reads."""


class Slot:
    """What autograd keeps in place of a tensor that node ``node`` saves.

    ``data``: the number of the datum that stands for it, -1 if none does; then ``held`` is the tensor itself.
    ``index``: its position among private tensors, -1 if it lies in memory of a value. ``datum``: the datum's tensors,
    once only backwards read it (see ``rockmate.run.program.HandOver``).
    """

    __slots__ = ("__weakref__", "data", "datum", "held", "index", "node", "place", "version")

    def __init__(self, node: int, version: int) -> None:
        self.node, self.version = node, version
        self.data = -1
        self.index = -1
        self.place = NOWHERE
        self.held: torch.Tensor | None = None
        self.datum: dict[int, torch.Tensor] | None = None


def version_of(t: torch.Tensor) -> int:
    """How often ``t`` was changed in place; tensors of inference mode do not count it, nor does autograd save them."""
    return -1 if t.is_inference() else t._version


def form_of(t: torch.Tensor) -> Form:
    """How ``t`` lies in its storage."""
    return (t.dtype, t.size(), t.stride(), t.storage_offset(), t.is_conj(), t.is_neg())


def formed(base: torch.Tensor, form: Form) -> torch.Tensor:
    """The tensor that lies in the storage of ``base`` as ``form`` says."""
    dtype, size, stride, offset, conj, neg = form
    if dtype == base.dtype and not (conj or neg or base.is_conj() or base.is_neg()):
        return base.as_strided(size, stride, offset)
    t = torch.empty(0, dtype=dtype, device=base.device).set_(base.untyped_storage(), offset, size, stride)
    t = torch._neg_view(t) if neg else t
    return torch._conj(t) if conj else t


def changed(what: str, t: torch.Tensor, then: int) -> RuntimeError:
    """Eager mode's error for a tensor that was changed in place since version ``then``."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} is at version {t._version}; expected version {then} instead. It was changed between the forward and "
        "the backward that reads it."
    )
