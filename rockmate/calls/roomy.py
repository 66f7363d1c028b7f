"""Calls of a model that take far less than the budget: its own Python runs them, and nothing is captured.

How much a call takes is not known before it has run. Where the budget is many times what is there before (parameters,
gradients, inputs), the first call of a kind runs as it is and is measured. Meanwhile it is followed, so that it is held
within the budget if it takes more. Where it does, and where it comes near the budget, later calls are captured, as are
those of sizes that are no smaller.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch

from rkgb.probe.contexts import next_number
from rkgb.sample import Call
from rkgb.trees import tensors_of
from rkgb.warn import warn
from rockmate.budget import show_bytes
from rockmate.calls.free import Extent, FreeCall, FreeLook, Spacious
from rockmate.calls.front import Front
from rockmate.calls.keys import call_key
from rockmate.calls.runnable import ROOM_TO_KEEP
from rockmate.calls.surroundings import modes_again
from rockmate.calls.whole_steps import Turn
from rockmate.errors import BudgetWarning
from rockmate.follow.following import following, lasting_of
from rockmate.follow.online import Online
from rockmate.follow.tape import Tape
from rockmate.planning.planner import lacks_gradient
from rockmate.planning.report import line_of_call
from rockmate.planning.ways import Ways
from rockmate.tell import LOG, names_of
from solvers.calls import Way

MOST_KINDS = 256
"""Kinds of calls that are remembered, and that are measured at most: a number that changes in each step makes many."""

FAR = 0.4
"""Part of the budget that calls of a step may take beside gradients: no guard tells that Python does more later."""

HELD = 0.45
"""Part of the budget that the data of a step may take which is measured; gradients and temporary memory come beside."""

AT_FIRST = 12
"""Times the bytes that are there before a first call that it is supposed to take."""


def _extent(model: torch.nn.Module, call: Call, trained: tuple[int, ...]) -> Extent:
    """Of a ``call`` before it runs. ``trained``: bytes of the parameters that get gradients."""
    leaves = [float if type(x) is float else x for x in call.leaves]  # a number that changes in each call
    form = call_key(leaves, call.spec, sized=False), model.training, trained
    return Extent(form, tuple(t.numel() for t in call.tensors))


class RoomyCalls:
    """See the file's text. ``spacious``: kinds of which a step was measured. ``binding``: those that are to be planned.
    ``extents``: of all that came.
    """

    def __init__(self, front: Front) -> None:
        self.front = front
        self.spacious: dict[Hashable, Spacious] = {}
        self.binding: set[Hashable] = set()
        self.extents: dict[Hashable, Extent] = {}
        self._rough: dict[Hashable, Ways] = {}  # what such calls take, as far as it is known
        self._nodes: Counter[Hashable] = Counter()  # that autograd recorded in calls that were measured, by kinds
        self._planned: set[Hashable] = set()  # calls that are none, and stay so under this budget; followed or not
        self._last: Hashable = None  # what was called last that is to be planned
        self._measured = self._calls = 0

    def clear(self) -> None:
        """Begin again with what is known of kinds of calls."""
        self.begin_budget()
        self.spacious.clear()
        self._rough.clear()
        self._nodes.clear()
        self._measured = 0

    def begin_budget(self) -> None:
        """Which calls are to be planned is not known any more; what was measured is."""
        self.binding.clear()
        self._planned.clear()

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

    def run_measured(self, kind: Hashable, call: Callable[[Turn], Any]) -> Any:
        """As ``run``; how much memory the step takes shows whether later ones are to be planned."""
        self.front.note_free_call()
        return self.run(kind, call, FreeLook(self, kind, self._rough[kind]))

    def run(self, kind: Hashable, call: Callable[[Turn], Any], look: FreeLook | None = None) -> Any:
        """What ``call`` returns, which is of this ``kind``, for its turn in the step. ``look``: at this call."""
        steps = self.front.terms.steps
        turn = steps.take(kind, self._rough[kind])
        if look is not None:
            look.turn = turn
        self.front.ran_freely = True
        with steps.forward_of(turn, look):
            result = call(turn)
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
        if peak + look.gone <= self._most(budget, rough.made):
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
            warn(
                f"the last step took {show_bytes(peak)}, more than the budget of {show_bytes(budget)}, "
                "which the sizes of the results did not show. Later steps like it are planned.",
                BudgetWarning,
            )

    def kind(self, model: torch.nn.Module, call: Call, followed: bool) -> Hashable | None:
        """The kind of a call that may take far less than the budget; None for all others. ``followed``: others are."""
        terms, device = self.front.terms, self.front.device(call.tensors)
        if terms.always or terms.options.compile or (followed and terms.asked.share is not None):
            return None
        called = call_key(call.leaves, call.spec), model.training
        budget = terms.bytes_known(device)
        if budget is None:  # it is to be a share of what this call takes
            trained = tuple(p.nbytes for p in model.parameters() if p.requires_grad)
            self.note((called, trained), _extent(model, call, trained))
            self.binding.add((called, trained))
            return None
        kind = None
        if (called, followed) not in self._planned or self._plain_peak(called) <= FAR * budget:
            kind = self._kind(model, call, called, budget, followed)
        if kind is not None and self.fits_beside(kind):
            return kind
        self._last = called
        return None

    def _most(self, budget: int, made: int) -> float:
        """Bytes that a call may take which makes gradients of ``made``, beside others of its step."""
        return made + FAR / self.front.terms.steps.calls * (budget - made)

    def _plain_peak(self, called: Hashable) -> float:
        """Bytes of a step as it was seen, if it was of one call, ``called`` so, and its plan runs nothing again."""
        runnable = self.front.last and self.front.last.ran if self.front.terms.steps.calls == 1 else None
        if self._last != called or runnable is None or runnable.plan.recomputed or not runnable.plan.room.seen:
            return inf
        return inf if runnable.observer is None or runnable.observer.unsure else int(runnable.planner.eager_peak)

    def _kind(
        self, model: torch.nn.Module, call: Call, called: Hashable, budget: int, followed: bool
    ) -> Hashable | None:
        """As in ``kind``, for a call that is ``called`` so."""
        parameters = list(model.parameters())
        trained = tuple(p.nbytes for p in parameters if p.requires_grad)
        made = sum(p.nbytes for p in parameters if lacks_gradient(p))
        kind = called, trained
        if self.is_known(kind, made):
            known = self.spacious[kind]
            return kind if known.peak <= self._most(budget, known.made) else None  # "auto" may be less than before
        if not (trained or any(t.requires_grad for t in call.tensors)):
            return None
        extent = _extent(model, call, trained)
        there = sum(t.nbytes for t in (*parameters, *call.tensors) if t.layout == torch.strided)
        larger = next((kind for kind in self.larger(extent) if self.is_known(kind, made)), None)
        most = self._most(budget, made)
        if larger is not None:
            peak: float = self.spacious[larger].peak
            most = self._most(budget, self.spacious[larger].made)
        elif followed:
            peak = self._supposed(extent, inf)
            if peak < inf and not self._binds(extent):  # it is held within the budget as well where it is measured
                peak = min(peak, most)
        else:
            supposed = self._supposed(extent, made + AT_FIRST * there + self.front.terms.declared)
            peak = min(supposed, self._plain_peak(called))
        if peak > most or kind in self.binding or self._covers_binding(extent):
            if len(self._planned) >= MOST_KINDS:
                self._planned.clear()
            self._planned.add((called, followed))  # as long as the budget stays, such calls are not asked about again
            return None
        if larger is None and not self.may_measure:
            return None
        said, device = self.front.described(names_of(call), call.leaves), self.front.device(call.tensors)
        of_larger, nodes = (None, 0) if larger is None else (self.spacious[larger], self._nodes[larger])
        self.note(kind, extent)
        self.suppose(kind, device, said, int(peak), made)
        self.spacious.pop(kind, None)
        self._nodes[kind] = nodes
        if of_larger is not None:
            self.spacious[kind] = of_larger
        return kind

    def _covers_binding(self, extent: Extent) -> bool:
        """Whether smaller calls exceed the budget."""
        return any(extent.covers(self.extents[kind]) for kind in self.binding if kind in self.extents)

    def _binds(self, extent: Extent) -> bool:
        """Whether calls of the same form, smaller or larger, exceed the budget."""
        known = (self.extents[kind] for kind in self.binding if kind in self.extents)
        return any(other.sizeless == extent.sizeless for other in known)

    def _supposed(self, call: Extent, at_first: float) -> float:
        """Bytes that a call is supposed to take: the square of its growth over one that was measured, all tensors
        together. Else a few more boxes beside an image would count as many more images.
        """
        found, now = [], sum(call.counts)
        for kind, seen in self.extents.items():
            if kind in self.spacious and seen.sizeless == call.sizeless:
                growth = max(1.0, now / max(1, sum(seen.counts)))
                found.append(self.spacious[kind].peak * growth**2)
        return min(found, default=at_first)

    def run_own(self, kind: Hashable, model: torch.nn.Module, call: Call) -> Any:
        """What the model returns for a call of this ``kind``; its own Python runs.

        Those are measured that ``is_measured`` tells, and the one after a call that recorded more.
        """
        before = next_number()
        if not self.is_measured(kind in self.spacious) and kind in self.spacious:
            result = self.run(kind, partial(self._called, model, call))
            if (nodes := next_number() - before) > self._nodes[kind]:
                self._does_more(kind, nodes)
            return result
        result = self.run_measured(kind, partial(self.held, model, call))
        self._nodes[kind] = max(self._nodes[kind], next_number() - before)
        return result

    def _does_more(self, kind: Hashable, nodes: int) -> None:
        """A call has recorded more ``nodes`` than those that were measured: the next one is measured."""
        known, before = self.spacious.pop(kind), self._nodes[kind]
        if known.peak * nodes > self.front.budget * before:
            warn(
                f"{self.front.name} computes more than in the step that was measured, though it is called with "
                f"the same sizes ({nodes} differentiable operations, {before} then): it may take more than the budget "
                f"of {show_bytes(self.front.budget)}. The next one is measured, and planned if it has to be",
                BudgetWarning,
            )

    def _called(self, model: torch.nn.Module, call: Call, turn: Turn) -> Any:
        with modes_again(self.front.modes):
            return model._call_impl(*call.args, **call.kwargs)

    def held(self, model: torch.nn.Module, call: Call, turn: Turn | None = None) -> Any:
        """What the model returns; its own Python runs, within the budget as far as sizes tell. ``turn``: its own."""
        terms, device = self.front.terms, self.front.device(call.tensors)
        budget, made = terms.bytes_known(device), sum(self.front.bytes_of_missing_gradients().values())
        if budget is None:
            policy = Online(None, HELD * float(getattr(terms.budget, "share", 1.0)))
        else:
            policy = Online(int(HELD * max(0, budget - made)), turns=terms.steps.turns, own=turn)
        tape = Tape(device, policy, lasting_of(model, call))
        if turn is not None:
            turn.followed_on(tape)
        with following(tape, self.front.modes):
            return model._call_impl(*call.args, **call.kwargs)
