"""What autograd's graph holds in place of the tensors that it would save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rockmate.executor import CallState


class Slot:
    """What autograd keeps in place of a tensor that node ``node`` saves: which datum, and how the tensor lies in it.

    ``store``: the datum itself, once only backwards read it (see ``rockmate.compiled.Give``).
    """

    __slots__ = ("__weakref__", "data", "form", "held", "index", "node", "state", "store", "version")

    def __init__(self, state: CallState, node: int) -> None:
        self.state, self.node = state, node
        self.data = -1  # -1: ``held`` is the tensor itself
        self.index = -1  # position among the private tensors, -1: a view of the datum's storage
        self.form: Any = None
        self.held: torch.Tensor | None = None
        self.store: Any = None
        self.version = 0


def version_of(t: torch.Tensor) -> int:
    """How often ``t`` was changed in place; tensors of inference mode do not count it, nor does autograd save them."""
    return -1 if t.is_inference() else t._version


def form_of(t: torch.Tensor) -> Any:
    """How ``t`` lies in its storage."""
    return (t.dtype, t.size(), t.stride(), t.storage_offset(), t.is_conj(), t.is_neg())


def _in_form(base: torch.Tensor, form: Any) -> torch.Tensor:
    """The tensor of this form in the storage of ``base``."""
    if form_of(base) == form:
        return base
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


def unpack(slot: Slot) -> torch.Tensor:
    """The tensor that autograd saved; computed again if the schedule has dropped it."""
    state = slot.state
    if slot.data < 0:
        assert slot.held is not None
        if slot.held._version != slot.version:
            raise changed(f"a tensor of shape {list(slot.held.shape)}", slot.held, slot.version)
        return slot.held
    if slot.store is None and state.live[slot.data] is None:
        state.catch_up(slot.node)
    held = slot.store
    if held is None:
        state.need(slot.data)
        held = state.live[slot.data]
    if slot.index < 0:
        for v, value in held.items():
            state.check_unchanged(v, value)
        return _in_form(next(iter(held.values())), slot.form)
    t: torch.Tensor = held[slot.index]
    if t._version != slot.version:
        raise changed(f"a tensor of shape {list(t.shape)}", t, slot.version)
    return t
