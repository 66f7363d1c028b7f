"""Calls for which the budget does not bind: they run as they are, and the first ones of each kind are measured. What is
remembered of such a call, so that its frontier can be asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.device.kind import Moment
from rkgb.sample import Call
from rkgb.settings import settings
from rkgb.storages import has_memory, memory_of
from rkgb.trace.capture import current_mode
from rkgb.trace.preserved import without_gradients
from rkgb.trees import tensors_of, unflatten
from rkgb.warn import warn
from rockmate.budget import show_bytes
from rockmate.calls.front import Front
from rockmate.calls.look import LET_GO, StepLook
from rockmate.calls.runnable import ROOM_TO_KEEP
from rockmate.calls.surroundings import RETAINED, graph_is_retained, running_in, warn_unplanned
from rockmate.calls.whole_steps import Turn
from rockmate.errors import BudgetWarning, InputError
from rockmate.planning.plan import line_of_call
from rockmate.planning.planner import lacks_gradient
from rockmate.planning.ways import Ways
from rockmate.tell import LOG
from solvers.calls import Way

MOST_KINDS = 256
"""Kinds of calls of a graph that are remembered where the budget does not bind, and that are measured at most: a number
that changes in each step makes each a kind of its own."""


class Spacious(NamedTuple):
    """A kind of call for which the budget does not bind: bytes of the gradients that its step made, and its peak."""

    made: int
    peak: int


class Extent(NamedTuple):
    """The sizes of a call: its form apart from sizes, and numbers of elements, in the same order for all of the form;
    None where these follow from values.
    """

    sizeless: Hashable
    counts: tuple[int, ...] | None

    def covers(self, other: Extent) -> bool:
        """Whether nothing in the ``other`` call is larger than here. Only kernels that choose by size may then take
        more memory in it, so its first step is measured.
        """
        if self.sizeless != other.sizeless or self.counts is None or other.counts is None:
            return False
        return all(mine >= theirs for mine, theirs in zip(self.counts, other.counts, strict=True))


class FreeLook(StepLook):
    """A look at a step of a call ``of`` this ``kind``. ``rough``: what it is supposed to take. ``turn``: of the call in
    its step. ``kept``: what the call keeps.
    """

    def __init__(self, of: FreeCalls, kind: Hashable, rough: Ways) -> None:
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


class FreeCalls:
    """The calls of a graph, or of a model, for which the budget does not bind. ``spacious``: kinds of which a step was
    measured. ``binding``: those that are to be planned. ``extents``: of all that came. ``part`` of the budget that they
    may take.
    """

    def __init__(self, front: Front, part: float = 1.0) -> None:
        self.front, self.part = front, part
        self.spacious: dict[Hashable, Spacious] = {}
        self.binding: set[Hashable] = set()
        self.extents: dict[Hashable, Extent] = {}
        self._rough: dict[Hashable, Ways] = {}  # what such calls take, as far as it is known
        self._measured = self._calls = 0

    def clear(self) -> None:
        """Begin again with what is known of kinds of calls."""
        self.spacious.clear()
        self.binding.clear()
        self._rough.clear()
        self._measured = 0

    def is_known(self, kind: Hashable, made: int) -> bool:
        """Whether a step of such a call was measured, which made as many bytes of gradients."""
        return kind in self.spacious and made <= self.spacious[kind].made

    def note(self, kind: Hashable, extent: Extent) -> None:
        """A call of this kind came."""
        if len(self.extents) >= MOST_KINDS and kind not in self.extents:
            self.extents.clear()
            self.clear()
        self.extents[kind] = extent

    def larger(self, extent: Extent) -> list[Hashable]:
        """The kinds in which nothing is smaller."""
        return [kind for kind, other in self.extents.items() if other.covers(extent)]

    def measured(self) -> list[Ways]:
        """What the calls took that were measured."""
        return [self._rough[kind] for kind in self.spacious if kind in self._rough]

    @property
    def has_measured_binding(self) -> bool:
        """Whether a step was measured whose like is to be planned; of a share, calls bind that nobody has measured."""
        return any(kind in self._rough for kind in self.binding)

    @property
    def may_measure(self) -> bool:
        """Whether a call that comes now can be measured."""
        return self._measured < MOST_KINDS and FreeLook.possible()

    def is_measured(self, known: bool) -> bool:
        """Whether a call that runs now is to be measured: it is of no ``known`` kind, or it is the 2nd, the 4th, the
        8th of all, and so on. What Python does may have changed, or what the caller keeps of the results.
        """
        self._calls += 1
        return self.may_measure and not (known and self._calls & (self._calls - 1))

    def suppose(self, kind: Hashable, device: torch.device, call: tuple[str, ...], peak: int, made: int) -> None:
        """Such a ``call`` takes at most ``peak`` bytes, and makes gradients of ``made``, as far as it is known."""
        if len(self._rough) >= MOST_KINDS and kind not in self._rough:
            self.clear()
        known = self._rough.get(kind)
        if known is None or made > known.made:
            self._rough[kind] = Ways(self.front, device, call, Way(0, peak, peak, 0), made)

    def fits_beside(self, kind: Hashable) -> bool:
        """Whether such a call, which is supposed to fit, need not be planned with others of its step, either."""
        steps = self.front.terms.steps
        return steps.expected_now(kind) is None and steps.held() + self._rough[kind].alone.backward <= self.front.budget

    def run_measured(self, kind: Hashable, call: Callable[[], Any]) -> Any:
        """As ``run``; how much memory the step takes shows whether later ones are to be planned."""
        self.front.note_free_call()
        return self.run(kind, call, FreeLook(self, kind, self._rough[kind]))

    def run(self, kind: Hashable, call: Callable[[], Any], look: FreeLook | None = None) -> Any:
        """What ``call`` returns, which is of this ``kind``, and has a turn in its step. ``look``: at this call."""
        steps = self.front.terms.steps
        turn = steps.take(kind, self._rough[kind])
        if look is not None:
            look.turn = turn
        self.front.ran_freely = True
        with steps.forward_of(turn, look):
            result = call()
        outputs = tensors_of(result)
        if look is not None:
            look.follow(outputs)
        FreeCall(outputs, turn, look, ROOM_TO_KEEP * turn.way.backward > self.front.budget)
        return result

    def saw(self, look: FreeLook, peak: int) -> None:
        """What the call of ``look`` keeps is known, and the ``peak`` of its step, as far as it is."""
        if look.kind in self._rough:
            seen = self._rough[look.kind] = replace(self._rough[look.kind], alone=Way(look.kept, peak, peak, 0))
            if look.turn is not None:
                self.front.terms.steps.seen(look.turn, look.kind, seen)

    def judge(self, look: FreeLook, peak: int) -> None:
        """The step of ``look`` is over: whether later ones are to be planned."""
        kind, rough, budget = look.kind, look.rough, look.budget
        self._measured += 1
        if peak + look.gone <= self.part * budget:
            self.saw(look, peak)
            LOG.log(
                logging.DEBUG if self.spacious else logging.INFO,
                "%s needs no plan for %s: a step took %s of %s",
                *(self.front.name, line_of_call(rough.call), show_bytes(peak), show_bytes(budget)),
            )
            most = max(peak, self.spacious[kind].peak) if kind in self.spacious else peak
            self.spacious[kind] = Spacious(rough.made, most)
            return
        self.spacious.pop(kind, None)
        self.binding.add(kind)
        if peak > budget:
            self.front.short = max(self.front.short, peak / max(1, rough.alone.backward))
            warn(
                f"the last step took {show_bytes(peak)}, more than the budget of {show_bytes(budget)}, "
                "which the sizes of the results did not show. Later steps like it are planned.",
                BudgetWarning,
            )


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
