"""What the caller does with the outputs of a call, observed from its forward to the end of its backward.

Before the first step a plan assumes that a scalar beside other outputs is the loss, and that a loss takes three times
the bytes of its input. A step shows the truth: which outputs the backward starts from, how their gradients lie in
memory, which outputs the caller still holds when the backward begins, and what was allocated between the two phases.
The plan that is made when its backward is over is for the union of what was observed.

Hooks on the outputs notice at every call whether it differs from the calls so far. The next call is then observed
closely: the memory between its phases is recorded, and its backward is intercepted where Python hands it to autograd's
engine (``torch.compiler`` replaces the same function for its tracers).
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.cost.usage import Expanded, Usage, differentiable, turned_strides
from rkgb.device import kind_of
from rkgb.Ktools import K_graph
from rkgb.probe.contexts import next_number
from rkgb.warn import warn
from rockmate.calls.call_look import CallLook
from rockmate.calls.surroundings import RETAINED, graph_is_retained
from rockmate.calls.turns import Turn
from rockmate.errors import BudgetWarning
from rockmate.planning.room import Room, bytes_of_outputs, device_of_outputs, scaled, seen_room
from rockmate.run.program import Program

if TYPE_CHECKING:
    from rockmate.planning.planner import Planner

_LOOKS = 8
"""Calls of one kind that are looked at closely, at most: a loop whose every step is new is not slowed down for ever."""


@dataclass(frozen=True, slots=True)
class Signs:
    """What the hooks notice of one call: outputs that get gradients; those of them whose gradients are not contiguous;
    those whose gradients are views; outputs whose memory the caller holds; outputs that it holds as they are; how many
    nodes the caller's code added to autograd's graph between the phases (-1 if that is not known).
    """

    reached: tuple[int, ...]
    turned: frozenset[int]
    viewed: frozenset[tuple[int, Expanded]]
    held: frozenset[int]
    attached: frozenset[int]
    nodes: int

    def differ_in_holding(self, other: Signs) -> bool:
        """Whether it is only what the caller holds that tells the calls apart."""
        return self == dataclasses.replace(other, held=self.held, attached=self.attached)


class Observer:
    """Watches the calls of one plan. ``news``: they differ from what it is for, which ``usage`` and ``room`` say.

    ``measures``: whether the room for the loss is to be learned.
    """

    def __init__(self, k: K_graph, measures: bool) -> None:
        d = k.s.d
        self.measures = measures
        self.gradients = k.gradient_bytes
        self.storages = [d.values[v].storage for v in d.outputs]
        self.saved = {x for facts in d.facts for x in facts.saved.storages}
        self.usage: Usage | None = None
        self.news = False
        self.unsure = False  # a call differed from those that were looked at: its loss may take more
        self.places = differentiable(d)
        self.device = device_of_outputs(d)
        self.may_turn = frozenset(k for k in self.places if turned_strides(d.values[d.outputs[k]]))
        self.bytes = {k: d.values[d.outputs[k]].bytes for k in self.places}
        self.outputs = bytes_of_outputs(d)
        self.refused: Planner | None = None  # for what was seen, where no plan for that fitted the budget
        self._known: set[Signs] = set()
        self._peak = self._kept = -1
        self._outputs = self.outputs  # for which these are: of this size, or of a larger one
        self.waits = 0  # bytes that the caller holds while other calls of the step run
        self._looks = 0
        self._wasted = self._passing = 0  # looks in a row that showed nothing new; calls to pass over before the next
        self._look = True  # at the next call
        self._said = False  # that there are no more

    @property
    def room(self) -> Room | None:
        """For the loss, as it was seen; None if it was not."""
        if self._peak < 0:
            return None
        return seen_room(self._peak, self._kept, kind_of(self.device).scalars, self._outputs)

    def as_seen_by(self, other: Observer, room: Room) -> None:
        """Calls of the same graph at another size were seen; their loss took what is now ``room``."""
        if other.usage is None or other.unsure:
            return
        self.usage, self._known, self._look = other.usage, set(other._known), False
        if room.outputs is not None:
            self._peak, self._kept = room.between + room.kept + room.scalars, room.kept + room.scalars
            self._outputs = room.outputs

    def leave_room(self) -> None:
        """What was allocated between the phases was not the loss's: forget it, and measure no more."""
        self.measures, self._peak, self._kept = False, -1, -1

    def look(self) -> CallLook | None:
        """A close look at the call whose forward is about to run, if it is worth one."""
        if self.unsure and self._look and len(self._known) >= _LOOKS <= self._looks and not self._said:
            self._said = True
            warn(
                f"the loss is another one in each of {_LOOKS} observed steps, and steps are observed no more: where it "
                "takes more than was seen, a step exceeds the budget. Declare what it takes at most (loss_memory=)",
                BudgetWarning,
            )
        if not self._look or self._looks >= _LOOKS or not self.places or not CallLook.possible():
            return None
        if self._passing:
            self._passing -= 1
            return None
        self._looks += 1
        return CallLook(self.device if self.measures else None)

    def watch(
        self,
        program: Program,
        outputs: Sequence[torch.Tensor],
        look: CallLook | None,
        warn_of_kept: Callable[[str], None] | None = None,
    ) -> ObservedCall | None:
        """Follow the call that returns ``outputs``, if one of them can have a backward.

        ``warn_of_kept``: called, with the reason, by a backward that keeps the graph, where that may exceed the budget.
        """
        if any(outputs[k].grad_fn is not None for k in self.places):
            return ObservedCall(self, program, outputs, look, warn_of_kept)
        if look is not None:
            look.abandon()
        return None

    def planned_for(self, supposed: Usage) -> Usage:
        """How outputs are used, by all that is known; ``supposed``: before the first step."""
        if self.usage is None or not self.unsure:
            return self.usage or supposed
        return dataclasses.replace(_union(self.usage, supposed), turned=None)

    def note_later(self, k: int) -> None:
        """A second backward of a call comes to output ``k``."""
        if self.usage is not None and k not in self.usage.roots:
            self.usage = _union(self.usage, Usage((k,), frozenset(), frozenset(), frozenset()))
            self.news = True

    def note(self, signs: Signs, roots: tuple[int, ...] | None, seen: tuple[int, int, int] | None) -> None:
        """A call is over. ``roots``, ``seen`` (see ``Window.close``): where it was looked at closely."""
        if signs in self._known:
            if roots is not None:  # of the calls of a step, others are to be looked at
                self._wasted += 1
                self._passing = self._wasted
            return
        if roots is None and self.usage is not None and any(signs.differ_in_holding(other) for other in self._known):
            held = _union(self.usage, Usage((), signs.held, signs.attached, frozenset()))
            self.news, self.usage, self._look = self.news or held != self.usage, held, True
            return
        if roots is None or (self.measures and seen is None and self._looks < _LOOKS):
            self.news = self.news or (self.usage is not None and not self.unsure)
            self.unsure = self._look = True
            return
        self._known.add(signs)
        self._wasted = 0
        self._look, self.news, self.unsure = False, True, False
        viewed = frozenset(found for found in signs.viewed if found[0] in roots)
        now = Usage(roots, signs.held, signs.attached, signs.turned.intersection(roots), viewed)
        self.usage = now if self.usage is None else _union(self.usage, now)
        if self.measures and seen is not None:
            peak, level, left = seen
            # What is left and was not there when the backward began, the backward has made, as a state of optimizers.
            kept = max(0, level - sum(self.bytes[k] for k in roots), min(level, left - self.gradients))
            peak, kept = (scaled(x, self.outputs, self._outputs) for x in (peak, kept))
            self._peak, self._kept = max(self._peak, peak), max(self._kept, kept)


def _union(a: Usage, b: Usage) -> Usage:
    turned = (a.turned or frozenset()) | (b.turned or frozenset())
    roots = tuple(sorted({*a.roots, *b.roots}))
    return Usage(roots, a.held | b.held, a.attached | b.attached, turned, a.viewed | b.viewed)


class ObservedCall:
    """One call until its first backward is over. The hooks in its graph own it, so it must not own the graph.

    ``begin`` is to be called when that backward has come to the module, where hooks of the module's own may come before
    those of its outputs.
    """

    def __init__(
        self,
        observer: Observer,
        program: Program,
        outputs: Sequence[torch.Tensor],
        look: CallLook | None,
        warn_of_kept: Callable[[str], None] | None,
    ) -> None:
        self.observer, self.warn_of_kept = observer, warn_of_kept
        self.thread, self.task = threading.get_ident(), -1
        self.refs = [weakref.ref(t) for t in outputs]
        self.memory: dict[int, StorageWeakRef] = {}  # of outputs that only the caller has, as far as the program goes
        for k, t in enumerate(outputs):
            stored = program.data_of.get(program.s.d.outputs[k]) in program.stored
            if not stored and observer.storages[k] not in observer.saved and t.layout == torch.strided:
                self.memory[k] = StorageWeakRef(t.untyped_storage())
        self.reached: dict[int, tuple[bool, Expanded | None]] = {}  # whether gradients are not contiguous, and views
        self.held: frozenset[int] = frozenset()
        self.attached: frozenset[int] = frozenset()
        self.nodes = -1
        self.edges: dict[tuple[int, int], int] = {}
        for k in observer.places:
            function, place = outputs[k].grad_fn, outputs[k].output_nr
            if function is not None:
                self.edges[function._sequence_nr(), place] = k
                function.register_prehook(partial(self.reach, k, place))
        self.look = look
        self.turn: Turn | None = None
        self.first = next_number()
        if look is not None:
            look.begin(self)

    def reach(self, k: int, place: int, gradients: tuple[torch.Tensor | None, ...]) -> None:
        """Output ``k`` is about to hand on its gradient, number ``place`` of those that its function gets."""
        self.begin()
        gradient = gradients[place]
        if gradient is None:
            return
        if torch._C._current_graph_task_id() != self.task:
            self.observer.note_later(k)
        else:
            expanded = tuple(dim for dim, stride in enumerate(gradient.stride()) if not stride)
            turned = not (expanded or gradient.is_contiguous())
            self.reached[k] = turned, expanded if gradient._is_view() else None

    @property
    def waits(self) -> bool:
        """Whether no backward has come to it."""
        return self.task == -1

    def begin(self) -> None:
        """The first backward has come to the module: the loss is done, and nothing runs again yet."""
        if self.waits:
            if self.turn is not None:
                self.turn.begin(self.look)
            self.task = torch._C._current_graph_task_id()
            if self.thread == threading.get_ident():
                self.nodes = next_number() - self.first
            self.attached = frozenset(k for k, ref in enumerate(self.refs) if _has_owner(ref))
            alive = (k for k, memory in self.memory.items() if not memory.expired())
            self.held = self.attached.union(alive)
            if self.look is not None:
                self.look.reach()
            if self.warn_of_kept is not None and graph_is_retained():
                self.warn_of_kept(RETAINED)
            torch.autograd.Variable._execution_engine.queue_callback(self.over)

    def over(self) -> None:
        """The backward is over; one that is looked at closely ends a little later."""
        if self.look is None:
            self.note(None, None)

    def note(self, roots: tuple[int, ...] | None, seen: tuple[int, int, int] | None) -> None:
        turned = frozenset(k for k, (turned, _) in self.reached.items() if turned) & self.observer.may_turn
        viewed = frozenset((k, expanded) for k, (_, expanded) in self.reached.items() if expanded is not None)
        signs = Signs(tuple(sorted(self.reached)), turned, viewed, self.held, self.attached, self.nodes)
        self.observer.note(signs, roots, seen)

    def roots_of(self, ends: Sequence[Any]) -> tuple[int, ...]:
        """The outputs that a backward from ``ends`` starts from: those that nodes made since forward returned read."""
        left = [(e.grad_fn, e.output_nr) if isinstance(e, torch.Tensor) else (e.node, e.output_nr) for e in ends]
        found: set[int] = set()
        known: set[int] = set()
        while left:
            function, place = left.pop()
            if function is None:
                continue
            number = function._sequence_nr()
            if (number, place) in self.edges:
                found.add(self.edges[number, place])
            elif number >= self.first and number not in known:
                known.add(number)
                left += function.next_functions
        return tuple(sorted(found))

    def __del__(self) -> None:
        """The graph goes without a backward."""
        if self.look is not None:
            self.look.abandon()


def _references(ref: weakref.ref[Any]) -> int:
    referred = ref()
    return 0 if referred is None else sys.getrefcount(referred)


class _Anything:
    """Something to count the references of."""


def _references_of_one_owner() -> int:
    owner = _Anything()
    return _references(weakref.ref(owner))


_ONE_OWNER = _references_of_one_owner()


def _has_owner(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether Python code has the tensor. Where C++ has it too, that counts as an owner of the Python object."""
    t = ref()
    if t is None or not hasattr(t, "_use_count"):
        return t is not None
    shared = t._use_count() > 1
    del t
    return bool(_references(ref) >= _ONE_OWNER + shared)
