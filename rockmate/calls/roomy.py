"""Calls of a model that take far less than the budget: its own Python runs them, and nothing is captured.

How much a call takes is not known before it has run. Where the budget is many times what is there before (parameters,
gradients, inputs), the first call of a kind runs as it is and is measured. Meanwhile it is followed, so that it is held
within the budget if it takes more. Where it does, and where it comes near the budget, later calls are captured, as are
those of sizes that are no smaller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from functools import partial
from math import inf
from typing import Any

import torch

from rkgb.probe.contexts import next_number
from rkgb.sample import Call
from rkgb.warn import warn
from rockmate.budget import show_bytes
from rockmate.calls.free import MOST_KINDS, Extent, FreeCalls, FreeLook
from rockmate.calls.front import Front
from rockmate.calls.keys import call_key
from rockmate.calls.surroundings import modes_again
from rockmate.errors import BudgetWarning
from rockmate.follow.following import following, lasting_of
from rockmate.follow.online import Online
from rockmate.follow.tape import Tape
from rockmate.planning.planner import lacks_gradient
from rockmate.tell import names_of

FAR = 0.25
"""Part of the budget that such calls may take: Python may do more in later ones, of which no guard tells."""

HELD = 0.3
"""Part of the budget that the data of a step may take which is measured; gradients and temporary memory come beside."""

AT_FIRST = 4
"""Times the bytes that are there before a first call that it is supposed to take."""


def _extent(model: torch.nn.Module, call: Call, trained: tuple[int, ...]) -> Extent:
    """Of a ``call`` before it runs. ``trained``: bytes of the parameters that get gradients."""
    leaves = [float if type(x) is float else x for x in call.leaves]  # a number that changes in each call
    form = call_key(leaves, call.spec, sized=False), model.training, trained
    return Extent(form, tuple(t.numel() for t in call.tensors))


class RoomyCalls(FreeCalls):
    """See the file's text."""

    def __init__(self, front: Front) -> None:
        super().__init__(front, FAR)
        self._nodes: Counter[Hashable] = Counter()  # that autograd recorded in calls that were measured, by kinds
        self._planned: set[Hashable] = set()  # calls that are none, and stay so under this budget; followed or not
        self._exceeded: set[Hashable] = set()  # calls whose steps took more than the budget

    def clear(self) -> None:
        super().clear()
        self._nodes.clear()
        self._planned.clear()
        self._exceeded.clear()

    def judge(self, look: FreeLook, peak: int) -> None:
        super().judge(look, peak)
        if peak > look.budget:
            self._exceeded.add(look.kind[0])  # type: ignore[index]

    def has_exceeded(self, model: torch.nn.Module, call: Call) -> bool:
        """Whether a step of such a ``call`` took more than the budget."""
        return bool(self._exceeded) and (call_key(call.leaves, call.spec), model.training) in self._exceeded

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
        if (called, followed) in self._planned:
            return None
        kind = self._kind(model, call, called, FAR * budget, followed)
        return kind if kind is not None and self.fits_beside(kind) else None

    def _kind(
        self, model: torch.nn.Module, call: Call, called: Hashable, most: float, followed: bool
    ) -> Hashable | None:
        """The kind of a call that may take ``most`` bytes or less; None for all others."""
        parameters = list(model.parameters())
        trained = tuple(p.nbytes for p in parameters if p.requires_grad)
        made = sum(p.nbytes for p in parameters if lacks_gradient(p))
        kind = called, trained
        if self.is_known(kind, made):
            return kind if self.spacious[kind].peak <= most else None  # "auto" may be less than before
        if not (trained or any(t.requires_grad for t in call.tensors)):
            return None
        extent = _extent(model, call, trained)
        there = made + sum(t.nbytes for t in (*parameters, *call.tensors) if t.layout == torch.strided)
        larger = next((kind for kind in self.larger(extent) if self.is_known(kind, made)), None)
        if larger is not None:
            peak: float = self.spacious[larger].peak
        elif followed:
            peak = self._supposed(extent, inf)
            if peak < inf and not self._binds(extent):  # it is held within the budget as well where it is measured
                peak = min(peak, most)
        else:
            peak = self._supposed(extent, AT_FIRST * there + self.front.terms.declared)
        if peak > most or kind in self.binding or self._covers_binding(extent):
            if len(self._planned) >= MOST_KINDS:
                self._planned.clear()
            self._planned.add((called, followed))  # as long as the budget stays, such calls are not asked about again
            return None
        if larger is None and not self.may_measure:
            return None
        said, device = self.front.described(names_of(call), call.leaves), self.front.device(call.tensors)
        known, nodes = (None, 0) if larger is None else (self.spacious[larger], self._nodes[larger])
        self.note(kind, extent)
        self.suppose(kind, device, said, int(peak), made)
        self.spacious.pop(kind, None)
        self._nodes[kind] = nodes
        if known is not None:
            self.spacious[kind] = known
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
        found, now = [], sum(call.counts or ())
        for kind, seen in self.extents.items():
            if kind in self.spacious and seen.sizeless == call.sizeless:
                growth = max(1.0, now / max(1, sum(seen.counts or ())))
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

    def _called(self, model: torch.nn.Module, call: Call) -> Any:
        with modes_again(self.front.modes):
            return model._call_impl(*call.args, **call.kwargs)

    def held(self, model: torch.nn.Module, call: Call) -> Any:
        """What the model returns; its own Python runs, within the budget as far as sizes tell."""
        terms, device = self.front.terms, self.front.device(call.tensors)
        budget, made = terms.bytes_known(device), sum(self.front.bytes_of_missing_gradients().values())
        if budget is None:
            policy = Online(None, HELD * float(getattr(terms.budget, "share", 1.0)))
        else:
            policy = Online(int(HELD * max(0, budget - terms.steps.held() - made)))
        with following(Tape(device, policy, lasting_of(model, call)), self.front.modes):
            return model._call_impl(*call.args, **call.kwargs)
