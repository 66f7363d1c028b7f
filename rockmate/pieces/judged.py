"""Whether a compiled piece is right, and whether it pays: compared with eager kernels on what the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

import torch
from torch.testing._comparison import default_tolerances

from rkgb.device import kind_of
from rockmate.errors import PieceError

REPEAT = 5

REACH = 16
"""Roundings that a piece may be off by, each as much as the last bit of its inputs changes: about as many as it has one
after the other, forward and backward. See ``check``.
"""


class Judged(Protocol):
    """What is asked of a piece: see ``rockmate.pieces.piece.Piece``."""

    wants: tuple[bool, ...]
    flows: tuple[bool, ...]
    types: frozenset[torch.dtype]
    words: str
    where: str

    def __call__(self, *arguments: Any) -> Any:
        """Its results, by compiled kernels."""

    def eager(self, *arguments: Any) -> Any:
        """Its results, by eager kernels."""


@dataclass(frozen=True)
class Runner:
    """Runs a piece forward and backward on ``arguments``, with the same gradients each time."""

    piece: Judged
    arguments: Sequence[Any]

    def run(self, compiled: bool, moved: bool = False) -> list[torch.Tensor]:
        """Its results, and the gradients of its arguments. ``moved``: of numbers of which the last bit is another."""
        place = _moved if moved else torch.Tensor.detach
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

    def seconds(self, compiled: bool) -> float:
        """Nanoseconds of a forward and a backward: the median of some runs."""
        device = next(a.device for a in self.arguments if isinstance(a, torch.Tensor))
        kind = kind_of(device)
        self.run(compiled)
        found = []
        for _ in range(REPEAT):
            start = kind.mark(device)
            self.run(compiled)
            found.append(kind.between(start, kind.mark(device)))
        return median(found)


def _gradient(r: torch.Tensor) -> torch.Tensor:
    """A gradient for ``r`` whose numbers differ; the same each time, and no generator is asked."""
    places = torch.arange(r.numel(), device=r.device, dtype=torch.float32)
    return torch.empty_like(r).copy_((places * 0.61803398875).remainder(2).sub(1).view(r.shape))


def _moved(t: torch.Tensor) -> torch.Tensor:
    """``t`` with about the last bit of its numbers changed, as rounding does it; the same each time."""
    return t.detach() * (1 + 2 * torch.finfo(t.dtype).eps * _gradient(t)) if t.is_floating_point() else t.detach()


def check(runner: Runner) -> None:
    """Raise ``PieceError`` where the compiled piece is further from eager kernels than ``torch.testing`` allows for the
    types of a piece: the larger of its tolerances, relative to the largest number of a tensor, as sums have an error of
    that size. Where terms cancel (a bias before a batch norm has no gradient but what was rounded) that says nothing:
    then it may be as far as ``REACH`` times what the last bit of what the piece is given changes in eager kernels.
    """
    moved: list[torch.Tensor] = []
    for k, (mine, theirs) in enumerate(zip(runner.run(True), runner.run(False), strict=True)):
        relative, absolute = default_tolerances(mine, theirs, *runner.piece.types)
        absolute = max(absolute, max(relative, absolute) * _largest(theirs))
        if torch.allclose(mine, theirs, relative, absolute, equal_nan=True):
            continue
        moved = moved or runner.run(False, moved=True)
        absolute = max(absolute, REACH * _largest(moved[k] - theirs))
        try:
            torch.testing.assert_close(mine, theirs, rtol=relative, atol=absolute, equal_nan=True)
        except AssertionError as error:
            count = len(runner.piece.flows)
            what = f"result {k}" if k < count else f"the gradient of argument {k - count}"
            raise PieceError(
                f"the compiled piece {runner.piece.words}{runner.piece.where} differs from eager kernels in {what}: "
                f"{error}. "
                "Leave compile=True out, and report this piece to PyTorch"
            ) from None


def _largest(t: torch.Tensor) -> float:
    """Of its finite numbers, without their signs."""
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def pays(runner: Runner) -> bool:
    """Whether the compiled piece takes less time than eager kernels."""
    return runner.seconds(True) < runner.seconds(False)
