"""Calls for which the budget does not bind: their sizes, looks at them, and what is remembered of one, whose frontier
can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.device.kind import Moment
from rkgb.sample import Call
from rkgb.settings import settings
from rkgb.storages import has_memory, memory_of
from rkgb.trace.capture import current_mode
from rkgb.trace.preserved import without_gradients
from rkgb.trees import unflatten
from rockmate.calls.look import LET_GO, StepLook
from rockmate.calls.surroundings import RETAINED, graph_is_retained, running_in, warn_unplanned
from rockmate.calls.whole_steps import Turn
from rockmate.errors import InputError
from rockmate.planning.planner import lacks_gradient
from rockmate.planning.ways import Ways


class Spacious(NamedTuple):
    """A kind of call for which the budget does not bind: bytes of the gradients that its step made, and its peak."""

    made: int
    peak: int


class Extent(NamedTuple):
    """The sizes of a call: its form apart from sizes, and the numbers of elements of its tensors."""

    sizeless: Hashable
    counts: tuple[int, ...]

    def covers(self, other: Extent) -> bool:
        """Whether nothing in the ``other`` call is larger than here. Only kernels that choose by size may then take
        more memory in it, so its first step is measured.
        """
        if self.sizeless != other.sizeless:
            return False
        return all(mine >= theirs for mine, theirs in zip(self.counts, other.counts, strict=True))


class FreeLook(StepLook):
    """A look at a step of a call of this ``kind``, ``of`` the ``RoomyCalls``. ``rough``: what it is supposed to take.
    ``turn``: of the call in its step. ``kept``: what the call keeps.
    """

    def __init__(self, of: Any, kind: Hashable, rough: Ways) -> None:
        super().__init__(rough.device)
        self.of, self.kind, self.rough, self.budget = of, kind, rough, of.front.budget
        self.turn: Turn | None = None
        self.kept = 0
        self.outputs: list[tuple[StorageWeakRef, int]] = []  # their memory, and its bytes
        self.gone = 0  # bytes of outputs that went before the backward, which a caller may hold
        self.mark()

    def follow(self, outputs: Sequence[torch.Tensor]) -> None:
        """These are what the call returns."""
        self.mark()
        storages = {id(s): s for t in outputs if has_memory(t) for s in [memory_of(t)]}
        self.outputs = [(StorageWeakRef(s), s.nbytes()) for s in storages.values()]
        self.arrives = sum(t.nbytes for t in outputs if t.grad_fn is not None)

    def reach(self) -> None:
        if not self.reached:
            self.gone = sum(size for memory, size in self.outputs if memory.expired())
        super().reach()

    def close(self) -> list[Moment] | None:
        seen = super().close()
        if seen is not None and len(seen) > 1:  # also where another forward comes before the backward
            self.kept = seen[1].level
            self.of.saw(self, self.rough.alone.backward)
        return seen

    def ended(self, moments: list[Moment], stays: bool) -> None:
        self.of.judge(self, max(moment.peak for moment in moments))


class FreeCall:
    """A call that ran without a plan. Its graph owns it, by hooks. ``look``: at this call, if there is one. ``tight``:
    a backward of its backward may exceed the budget.
    """

    def __init__(self, outputs: Sequence[torch.Tensor], turn: Turn, look: FreeLook | None, tight: bool) -> None:
        self.turn, self.look, self.tight = turn, look, tight
        turn.held_by(self)
        for t in outputs:
            if t.grad_fn is not None:
                t.grad_fn.register_prehook(self._begin)

    def _begin(self, _: Any) -> None:
        self.turn.begin(self.look)
        if self.look is not None:
            self.look.reach()
        if self.tight and graph_is_retained():
            self.tight = False
            warn_unplanned(RETAINED)

    def __del__(self) -> None:
        """The graph goes."""
        if self.look is not None:
            self.look.abandon(LET_GO)


class RememberedCall:
    """A call of ``model``, and the modes and settings in which it ran.

    No tensor of the caller's is held: inputs are made anew in the same form, with random numbers, or with the values
    that they had where these may be indices.
    """

    def __init__(self, model: torch.nn.Module, call: Call) -> None:
        self._mode, self._settings = current_mode(), settings()
        self._missing = {n for n, p in model.named_parameters() if lacks_gradient(p)}
        self._leaves, self._spec = [_again(leaf) for leaf in call.leaves], call.spec

    @contextmanager
    def again(self, model: torch.nn.Module) -> Iterator[Call]:
        """Such a call, as it was when it came: the gradients that its step makes are not there.

        Raises ``InputError`` where an input cannot be made again.
        """
        missing = [p for name, p in model.named_parameters() if name in self._missing]
        with without_gradients(missing), running_in(self._mode, self._settings):
            yield Call(*unflatten([make() for make in self._leaves], self._spec))


def _again(x: Any) -> Callable[[], Any]:
    """What makes something like the input ``x``."""
    if not isinstance(x, torch.Tensor):
        return lambda: x
    if type(x) not in (torch.Tensor, torch.nn.Parameter) or not has_memory(x) or x.is_quantized:
        return _refused
    shape, strides, dtype, device, wanted = x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if x.numel() else 0
    exact: bytes | None = None  # in Python's memory, which is none of the step's
    if not (wanted or dtype.is_complex or (x.dim() and dtype.is_floating_point)):
        exact = x.detach().as_strided((size,), (1,)).to("cpu").view(torch.uint8).numpy().tobytes()

    def make() -> torch.Tensor:
        if exact:
            return torch.frombuffer(bytearray(exact), dtype=dtype).to(device).as_strided(shape, strides)
        numbers = torch.rand(size, generator=torch.Generator().manual_seed(0))
        return numbers.to(device, dtype).as_strided(shape, strides).requires_grad_(wanted)

    return make


def _refused() -> Any:
    raise InputError(
        "an input of the last step is no plain tensor, and is not there any more: use rockmate.frontier(model, sample)"
    )
