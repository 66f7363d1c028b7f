"""A piece: light operations as one, whose forward and backward are compiled once for each form of its arguments.

Whether compiled kernels are right, and whether they pay, is seen by eager kernels on what the model computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from statistics import median
from types import FunctionType
from typing import Any

import torch
from torch import fx
from torch.testing._comparison import default_tolerances

from rkgb.device import KINDS, kind_of
from rkgb.errors import UnsupportedError
from rockmate.calls.numbers import found_in
from rockmate.errors import PieceError
from rockmate.pieces.dropout import seeded_dropout
from rockmate.pieces.kernels import Form, Kernel, compiled, form_of, isolated, without_data

REPEAT = 5

REACH = 16
"""Roundings that a piece may be off by, each as much as the last bit of its inputs changes: about as many as it has one
after the other, forward and backward. See ``Runner.check``.
"""

MOVES = 12
"""Ways to change the last bits that are tried: a number at a step (``round``) is on its other side in some of them."""


class Piece(torch.nn.Module):
    """``body``: a program of tensors and numbers that changes nothing. ``wants``: which of its arguments need a
    gradient; ``flows``: which of its results have one. ``types``: of all that it is given and computes. ``words``: what
    it does, in short; ``where``: the user's line; ``listed``: all operations, with the lines of the first such piece.

    A second run calls the code that the first has called, so no plan changes a bit.
    """

    of_torch = True  # as a captured function has it

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
        """Pieces with equal ones compute the same. Functions that are not found by name may have one name."""
        body: fx.GraphModule = self.__dict__["body"]
        functions = (n.target for n in body.graph.nodes if isinstance(n.target, FunctionType))
        return body.code, self.wants, self.flows, tuple(f for f in functions if not found_in(f))

    @cached_property
    def draws(self) -> bool:
        """Whether it draws from a seed."""
        return any(n.target is seeded_dropout for n in self.__dict__["body"].graph.nodes)

    @cached_property
    def reached(self) -> tuple[frozenset[int], ...]:
        """For each argument, the places of the results with a gradient that are computed from it."""
        *nodes, output = self.__dict__["body"].graph.nodes
        found: dict[fx.Node, set[int]] = {n: set() for n in nodes}
        for k, n in enumerate(r for r, flows in zip(output.args[0], self.flows, strict=True) if flows):
            found[n].add(k)
        for n in reversed(nodes):
            for i in n.all_input_nodes:
                found[i] |= found[n]
        return tuple(frozenset(found[n]) for n in nodes if n.op == "placeholder")

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
            Runner(self, arguments).check()
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
        ctx.piece = piece
        ctx.set_materialize_grads(False)
        found = kernel.forward([a for a, is_tensor in zip(arguments, kernel.tensors, strict=True) if is_tensor])
        results = tuple(found[: kernel.count])
        ctx.save_for_backward(*found[kernel.count :])
        if not all(piece.flows):
            ctx.mark_non_differentiable(*(r for r, flows in zip(results, piece.flows, strict=True) if not flows))
        return results if len(results) > 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kernel: Kernel = ctx.kernel
        piece: Piece = ctx.piece
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"gradients of gradients are wanted (create_graph=True), and a compiled piece ({piece.words}) has "
                "none: attach the model without compile=True"
            )
        given = [g for g, flows in zip(gradients, piece.flows, strict=True) if flows]
        laid = [_laid(g, form) for g, form in zip(given, kernel.gradients, strict=True)]
        feed = iter(kernel.backward([*ctx.saved_tensors, *laid]))
        found = [next(feed) if is_tensor else None for is_tensor in kernel.tensors]
        if any(g is None for g in given):  # what only their results are computed from has none in eager mode either
            there = {k for k, g in enumerate(given) if g is not None}
            found = [None if there.isdisjoint(ks) else g for g, ks in zip(found, piece.reached, strict=True)]
        return (None, *found)


def _laid(g: torch.Tensor | None, form: Form) -> torch.Tensor:
    """``g`` as the kernel reads it; zeros for none."""
    if g is not None and g.stride() == form.strides and not g.is_neg():
        return g
    made = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=form.device)
    return made.zero_() if g is None else made.copy_(g)


@dataclass(frozen=True)
class Runner:
    """Runs a piece forward and backward on ``arguments``, with the same gradients each time."""

    piece: Piece
    arguments: Sequence[Any]

    def run(self, compiled: bool, moved: int = 0) -> list[torch.Tensor]:
        """Its results, and the gradients of its arguments. ``moved``: the way, from 1 on, in which the last bits of
        numbers are others.
        """
        place = partial(_moved, way=moved) if moved else torch.Tensor.detach
        given = [
            place(a).requires_grad_(w) if isinstance(a, torch.Tensor) else a
            for a, w in zip(self.arguments, self.piece.wants, strict=True)
        ]
        with torch.enable_grad():
            results = self.piece(*given) if compiled else self.piece.eager(*given)
            several = results if isinstance(results, tuple) else (results,)
            flowing = [r for r, flows in zip(several, self.piece.flows, strict=True) if flows]
            wanted = [a for a, w in zip(given, self.piece.wants, strict=True) if w]
            gradients = torch.autograd.grad(flowing, wanted, [place(_gradient(r)) for r in flowing], allow_unused=True)
        return [*(r.detach() for r in several), *(torch.zeros(()) if g is None else g for g in gradients)]

    def nanoseconds(self, compiled: bool) -> float:
        """Of a forward and a backward: the median of some runs."""
        device = next(a.device for a in self.arguments if isinstance(a, torch.Tensor))
        kind = kind_of(device)
        self.run(compiled)
        found = []
        for _ in range(REPEAT):
            start = kind.mark(device)
            self.run(compiled)
            found.append(kind.between(start, kind.mark(device)))
        return median(found)

    def check(self) -> None:
        """Raise ``PieceError`` where the compiled piece is further from eager kernels than ``torch.testing`` allows for
        the types of a piece: the larger of its tolerances, relative to the largest number of a tensor, as sums have an
        error of that size. Where terms cancel (a bias before a batch norm has no gradient but what was rounded), or a
        function has steps, that says nothing: then it may be as far as ``REACH`` times what the last bit of what the
        piece is given changes in eager kernels, in one of ``MOVES`` ways.
        """
        for k, (mine, theirs) in enumerate(zip(self.run(True), self.run(False), strict=True)):
            relative, absolute = default_tolerances(mine, theirs, *self.piece.types)
            absolute = max(absolute, max(relative, absolute) * _largest(theirs))
            if torch.allclose(mine, theirs, relative, absolute, equal_nan=True):
                continue
            for way in range(1, MOVES + 1):
                absolute = max(absolute, REACH * _largest(self.run(False, way)[k] - theirs))
                if torch.allclose(mine, theirs, relative, absolute, equal_nan=True):
                    break
            try:
                torch.testing.assert_close(mine, theirs, rtol=relative, atol=absolute, equal_nan=True)
            except AssertionError as error:
                count = len(self.piece.flows)
                what = f"result {k}" if k < count else f"the gradient of argument {k - count}"
                raise PieceError(
                    f"the compiled piece {self.piece.words}{self.piece.where} differs from eager kernels in {what}: "
                    f"{error}. Leave compile=True out, and report this piece to PyTorch"
                ) from None

    def pays(self) -> bool:
        """Whether the compiled piece takes less time than eager kernels."""
        return self.nanoseconds(True) < self.nanoseconds(False)


def _gradient(r: torch.Tensor, way: int = 1) -> torch.Tensor:
    """A gradient for ``r`` whose numbers differ; the same each time, and no generator is asked."""
    places = torch.arange(r.numel(), device=r.device, dtype=torch.float32)
    return torch.empty_like(r).copy_((way * (places + 1) * 0.61803398875).remainder(2).sub(1).view(r.shape))


def _moved(t: torch.Tensor, way: int) -> torch.Tensor:
    """``t`` with about the last bit of its numbers changed, as rounding does it; the same each time for one ``way``."""
    if not t.is_floating_point():
        return t.detach()
    return t.detach() * (1 + 2 * torch.finfo(t.dtype).eps * _gradient(t, way))


def _largest(t: torch.Tensor) -> float:
    """Of its finite numbers, without their signs."""
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
