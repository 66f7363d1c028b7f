"""A piece: light operations as one, whose forward and backward are compiled once for each form of its arguments."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from rkgb.device import KINDS
from rkgb.errors import UnsupportedError
from rockmate.pieces.dropout import seeded_dropout
from rockmate.pieces.judged import Runner, check
from rockmate.pieces.kernels import Kernel, compiled, form_of, isolated, without_data


class Piece(torch.nn.Module):
    """``body``: a program of tensors and numbers that changes nothing. ``wants``: which of its arguments need a
    gradient; ``flows``: which of its results have one. ``types``: of all that it is given and computes. ``words``: what
    it does, in short; ``where``: the user's line; ``listed``: all operations, with the lines of the first such piece.

    A second run calls the code that the first has called, so no plan changes a bit.
    """

    def __init__(
        self,
        body: fx.GraphModule,
        wants: tuple[bool, ...],
        flows: tuple[bool, ...],
        types: frozenset[torch.dtype],
        words: str,
        where: str = "",
        listed: str = "",
    ) -> None:
        super().__init__()
        self.__dict__["body"] = body
        self.wants, self.flows, self.types = wants, flows, types
        self.words, self.where, self.listed = words, where, listed
        self.kernels: dict[Hashable, Kernel] = {}
        self.ahead: dict[Hashable, Kernel] = {}  # compiled, and not yet called

    @cached_property
    def identity(self) -> Hashable:
        """Pieces with equal ones compute the same."""
        return self.__dict__["body"].code, self.wants, self.flows

    @cached_property
    def draws(self) -> bool:
        """Whether it draws from a seed."""
        return any(n.target is seeded_dropout for n in self.__dict__["body"].graph.nodes)

    @property
    def seconds(self) -> float:
        """That compiling took."""
        return sum(k.seconds for k in (*self.kernels.values(), *self.ahead.values()))

    def __repr__(self) -> str:
        """Nodes that call pieces count as equal where these print alike."""
        return f"Piece({self.words}, {hashlib.sha256(repr(self.identity).encode()).hexdigest()[:16]})"

    def kernel(self, arguments: Sequence[Any]) -> Kernel:
        """The code for such arguments; compiled and compared with eager kernels if they are new."""
        forms = tuple(map(form_of, arguments))
        key = _key(forms)
        found = self.kernels.get(key)
        if found is None:
            if any(isinstance(a, torch.Tensor) and a.is_meta for a in arguments):
                found = without_data(self.__dict__["body"], arguments, self.wants, self.flows)
            else:
                found = isolated(lambda: self._compared(key, forms, arguments))
            self.kernels[key] = found
        return found

    def compile_for(self, forms: tuple[Any, ...]) -> None:
        """Compile it for arguments of such ``forms`` (see ``form_of``), ahead of the first call."""
        self.ahead[_key(forms)] = compiled(self.__dict__["body"], forms, self.wants)

    def _compared(self, key: Hashable, forms: tuple[Any, ...], arguments: Sequence[Any]) -> Kernel:
        if key not in self.ahead:
            self.compile_for(forms)
        found = self.kernels[key] = self.ahead.pop(key)
        try:
            check(Runner(self, arguments))
        except BaseException:
            del self.kernels[key]
            raise
        return found

    def forward(self, *arguments: Any) -> Any:
        """The results: one tensor, or a tuple."""
        return _Applied.apply(self, *arguments)

    def eager(self, *arguments: Any) -> Any:
        """The same by eager kernels."""
        results = self.__dict__["body"].forward(*arguments)
        return results if len(results) > 1 else results[0]


def _key(forms: tuple[Any, ...]) -> Hashable:
    return (*forms, *(torch.get_autocast_dtype(k) for k in KINDS if torch.is_autocast_enabled(k)))


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Piece, *arguments: Any) -> Any:
        ctx.kernel = kernel = piece.kernel(arguments)
        ctx.flows, ctx.words = piece.flows, piece.words
        found = kernel.forward([a for a, is_tensor in zip(arguments, kernel.tensors, strict=True) if is_tensor])
        results = tuple(found[: kernel.count])
        ctx.save_for_backward(*found[kernel.count :])
        if not all(piece.flows):
            ctx.mark_non_differentiable(*(r for r, flows in zip(results, piece.flows, strict=True) if not flows))
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kernel: Kernel = ctx.kernel
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"gradients of gradients are wanted (create_graph=True), and a compiled piece ({ctx.words}) has none: "
                "attach the model without compile=True"
            )
        given = [g for g, flows in zip(gradients, ctx.flows, strict=True) if flows]
        laid = [g if g.stride() == s else _with_strides(g, s) for g, s in zip(given, kernel.strides, strict=True)]
        found = iter(kernel.backward([*ctx.saved_tensors, *laid]))
        return (None, *(next(found) if is_tensor else None for is_tensor in kernel.tensors))


def _with_strides(g: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    return torch.empty_strided(g.shape, strides, dtype=g.dtype, device=g.device).copy_(g)
