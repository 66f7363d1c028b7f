"""Calls for which the budget does not bind: they run as they are, and the first ones of each kind are measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import Node

from rkgb.trees import tensors_of
from rkgb.warn import warn
from rockmate.budget import show_bytes
from rockmate.calls.front import Front
from rockmate.calls.look import Look, abandoned
from rockmate.calls.runnable import ROOM_TO_KEEP
from rockmate.calls.step_look import WholeLook
from rockmate.calls.surroundings import RETAINED, graph_is_retained, warn_unplanned
from rockmate.calls.turns import Rough, Turn
from rockmate.errors import BudgetWarning
from rockmate.planning.plan import line_of_call
from rockmate.tell import LOG
from solvers.calls import Way

MOST_KINDS = 256
"""Kinds of calls of a graph that are remembered where the budget does not bind, and that are measured at most: a number
that changes in each step makes each a kind of its own."""


class Spacious(NamedTuple):
    """A kind of call for which the budget does not bind: its description, the bytes of the gradients that its step
    made, and its peak.
    """

    call: tuple[str, ...]
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


class FreeCall:
    """A call that ran without a plan. Its graph owns it, by a hook. ``look``: at this call, if there is one. ``tight``:
    a backward of its backward may exceed the budget.
    """

    def __init__(self, function: Node, turn: Turn, look: Look | None, tight: bool) -> None:
        self.turn, self.look, self.tight = turn, look, tight
        turn.held_by(self)
        function.register_prehook(self._begin)

    def _begin(self, _: Any) -> None:
        self.turn.begin(self.look)
        if self.tight and graph_is_retained():
            warn_unplanned(RETAINED)


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
        self._rough: dict[Hashable, Rough] = {}  # what such calls take, as far as it is known
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

    def measured(self) -> list[Rough]:
        """What the calls took that were measured."""
        return [self._rough[kind] for kind in self.spacious if kind in self._rough]

    @property
    def may_measure(self) -> bool:
        """Whether a call that comes now can be measured."""
        return self._measured < MOST_KINDS and WholeLook.possible()

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
            self._rough[kind] = Rough(self.front, device, call, Way(0, peak, peak, 0), made)

    def fits_beside(self, kind: Hashable) -> bool:
        """Whether such a call, which is supposed to fit, need not be planned with others of its step, either."""
        steps = self.front.terms.steps
        return not steps.is_known(kind) and steps.held() + self._rough[kind].alone.backward <= self.front.budget

    def run_measured(self, kind: Hashable, call: Callable[[], Any]) -> Any:
        """The same; how much memory the step takes shows whether later ones are to be planned."""
        rough, budget, turns = self._rough[kind], self.front.budget, list[Turn]()
        self.front.note_free_call()

        def forward_measured(kept: int) -> None:
            self._saw(kind, turns, kept, rough.alone.backward)

        def measured(peak: int, gone: int) -> None:
            self._measured += 1
            if peak + gone <= self.part * budget:
                self._saw(kind, turns, self._rough[kind].alone.kept, peak)
                LOG.log(
                    logging.DEBUG if self.spacious else logging.INFO,
                    "%s needs no plan for %s: a step took %s of %s",
                    *(self.front.name, line_of_call(rough.call), show_bytes(peak), show_bytes(budget)),
                )
                most = max(peak, self.spacious[kind].peak) if kind in self.spacious else peak
                self.spacious[kind] = Spacious(rough.call, rough.made, most)
                return
            self.spacious.pop(kind, None)
            self.binding.add(kind)
            if peak > budget:
                warn(
                    f"the last step took {show_bytes(peak)}, more than the budget of {show_bytes(budget)}, "
                    "which the sizes of the results did not show. Later steps like it are planned.",
                    BudgetWarning,
                )

        return self.run(kind, call, WholeLook(rough.device, forward_measured, measured), turns)

    def run(
        self, kind: Hashable, call: Callable[[], Any], look: WholeLook | None = None, turns: list[Turn] | None = None
    ) -> Any:
        """What ``call`` returns, which is of this ``kind``, and has a turn in its step, which ``turns`` gets. ``look``:
        at this call.
        """
        if not torch.is_grad_enabled():
            return call()
        steps = self.front.terms.steps
        turn = steps.take(kind, self._rough[kind], self.front.name, self.front.terms)
        if turns is not None:
            turns.append(turn)
        self.front.ran_freely = True
        try:
            with abandoned(look):
                result = call()
        except BaseException:
            steps.undo(turn)
            raise
        outputs = tensors_of(result)
        if function := next((t.grad_fn for t in outputs if t.grad_fn is not None), None):
            FreeCall(function, turn, look, ROOM_TO_KEEP * turn.way.backward > self.front.budget)
        if look is not None:
            look.follow(outputs)
        return result

    def _saw(self, kind: Hashable, turns: Sequence[Turn], kept: int, peak: int) -> None:
        """A call was measured: what it keeps, and takes."""
        if kind in self._rough:
            self._rough[kind] = replace(self._rough[kind], alone=Way(kept, peak, peak, 0))
            for turn in turns:
                self.front.terms.steps.seen(turn, self._rough[kind])
