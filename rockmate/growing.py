"""Calls that are made larger along some dimensions of their tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch

from rkgb.sample import Call
from rockmate.errors import InputError


class Growing:
    """A call whose tensors can be made larger along dimensions ``dims``, from ``size``."""

    def __init__(self, call: Call, dims: tuple[int, ...]) -> None:
        self.call, self.dims = call, dims
        tensors = {id(t): t for t in call.tensors}
        having = [(t, d) for d in dims for t in tensors.values() if -t.dim() <= d < t.dim()]
        if not having:
            if not tensors:
                raise InputError("the sample has no tensors: rockmate.estimate(model, sample, sizes)")
            shapes = ", ".join(str(list(t.shape)) for t in tensors.values())
            raise InputError(
                f"no tensor of the sample has a dimension {show_dims(dims)}; its tensors have the shapes {shapes}: say "
                "with dim= which dimension grows"
            )
        self.size = having[0][0].shape[having[0][1]]
        self.along = {id(t): [d % t.dim() for u, d in having if u is t and t.shape[d] == self.size] for t, _ in having}
        if not self.size:
            raise InputError(f"dimension {show_dims(dims)} of the sample is empty: give a sample with something in it")

    def at(self, size: int) -> Call:
        """The call with rows of the sample again and again; a tensor given twice is one tensor."""
        made: dict[int, torch.Tensor] = {}
        return self.call.with_tensors(lambda t: self._larger(t, size, made))

    def _larger(self, leaf: torch.Tensor, size: int, made: dict[int, torch.Tensor]) -> torch.Tensor:
        if not self.along.get(id(leaf)):
            return leaf
        if id(leaf) not in made:
            found = leaf.detach() if size == self.size else self._repeated(leaf, size)
            made[id(leaf)] = found.requires_grad_(leaf.requires_grad)
            for d in self.along[id(leaf)]:
                torch._dynamo.maybe_mark_dynamic(found, d)
        return made[id(leaf)]

    def _repeated(self, leaf: torch.Tensor, size: int) -> torch.Tensor:
        order = sorted(range(leaf.dim()), key=lambda k: (-leaf.stride()[k], k))
        larger = leaf.detach().permute(order)  # memory keeps its order, such as channels-last
        rows = torch.arange(size, device=leaf.device) % self.size
        for d in self.along[id(leaf)]:
            larger = larger.index_select(order.index(d), rows)
        return larger.permute(sorted(range(leaf.dim()), key=order.__getitem__))

    def said(self) -> str:
        """Which tensors grow, and which do not."""
        shapes = [(bool(self.along.get(id(t))), list(t.shape)) for t in self.call.tensors]
        grow, stay = (", ".join(str(s) for g, s in shapes if g is grows) for grows in (True, False))
        kept = f", of shape {stay} did not" if stay else ""
        dims = show_dims(self.dims)
        return f"Along dimension {dims}, tensors of shape {grow} grew{kept}; what is no tensor stayed as it is"


def show_dims(dims: Sequence[int]) -> str:
    return " or ".join(map(str, dims))


def checked_dims(dim: Any) -> tuple[int, ...]:
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if not dims or not all(isinstance(d, int) and not isinstance(d, bool) for d in dims):
        raise InputError(f"dim={dim!r}: give the number of the dimension that grows, or a tuple of such")
    return dims


def checked_sizes(sizes: int | Iterable[int], call: Growing) -> tuple[int, ...]:
    """Rising sizes, each once."""
    dims = show_dims(call.dims)
    wanted = [sizes] if isinstance(sizes, Integral) else list(sizes) if isinstance(sizes, Iterable) else [sizes]
    for size in wanted:
        if isinstance(size, bool) or not isinstance(size, Integral):
            raise InputError(f"sizes={sizes!r}: give whole numbers, the sizes that dimension {dims} shall have")
        if size < call.size:
            raise InputError(
                f"the size {size} is below the sample's, {call.size} in dimension {dims}: give a sample of the "
                "smallest size or less"
            )
    if not wanted:
        raise InputError(f"sizes is empty: give the sizes that dimension {dims} shall have")
    return tuple(sorted({int(size) for size in wanted}))
