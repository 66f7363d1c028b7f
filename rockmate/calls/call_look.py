"""One planned call from its forward to the end of its first backward, and a close look at it.

Such a look records the memory between the phases of the call, and intercepts its backward where Python hands it to
autograd's engine (``torch.compiler`` replaces the same function for its tracers).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from rkgb.cost.memory import timeline
from rkgb.cost.usage import Expanded, Usage
from rkgb.device.kind import Moment
from rkgb.probe.contexts import next_number
from rockmate.calls.look import Look
from rockmate.calls.observe import Observer, Signs
from rockmate.calls.surroundings import RETAINED, graph_is_retained
from rockmate.calls.whole_steps import Turn
from rockmate.planning.ways import waits_at
from rockmate.run.program import Program


class CallLook(Look):
    """Of one call that is planned: the memory between its phases, if ``observer`` measures that, and the ends that its
    backward starts from.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__(timeline(observer.device) if observer.measures else None)
        self.before = 0  # moments before the backward came: the first one, and the beginnings of gaps
        self.gaps: list[bool] = []  # of each gap before it, whether that is a backward
        self.arrived = False  # the gradients of the outputs may have come in a gap
        self.call: weakref.ref[ObservedCall] | None = None
        self.then: Callable[[], None] | None = None  # is called when the backward is over and was noted

    def begin(self, call: ObservedCall) -> None:
        """Forward returns now."""
        self.call = weakref.ref(call)
        if self.window is not None:
            self.window.mark()

    def gap_begins(self) -> None:
        if self.window is not None and self.window.marks and not self.before:
            self.gaps.append(torch._C._current_graph_task_id() != -1)
        super().gap_begins()

    def _note_gaps(self, observer: Observer, before: list[Moment]) -> None:
        """What the call held in gaps, by the moments ``before`` its backward."""
        gaps = list(zip(before[1:], self.gaps, strict=True))
        forwards = [moment.level for moment, backward in gaps if not backward]
        backwards = [(moment.level, moment.new) for moment, backward in gaps if backward]
        early = before[: 1 + self.gaps.index(True)] if backwards else before
        observer.note_gaps(waits_at(forwards, backwards) if gaps else None, max(moment.peak for moment in early))

    def reach(self) -> None:
        """The backward has come to the outputs, with gradients that those of other calls may have made."""
        self.arrived = self.in_gap
        self.resume()
        if self.window is not None:
            self.before = self.window.marks
            self.window.mark()

    def close(self) -> list[Moment] | None:
        self.then = None
        if self.window is not None and self.before:
            self.window.mark()
        return super().close()

    def watched(self, run: Callable[[], Any], ends: Sequence[Any], stays: bool) -> Any:
        call = self.call() if self.call is not None else None
        if call is None:
            self.abandon()
            return run()
        roots = call.roots_of(ends)
        if not roots:
            try:
                return run()
            finally:
                self.resume()
                self.another()
        try:
            result = run()
        finally:
            then, moments = self.then, self.close()
            call.look = None
        seen: tuple[int, int, int] | None = None
        if moments and self.before:
            before, level = moments[: self.before], moments[self.before].new
            peak = max(moment.peak for moment in before)
            self._note_gaps(call.observer, before)
            if self.arrived:
                level += sum(call.observer.bytes[k] for k in roots)
                peak = max(peak, level)
            if not stays:  # what stays is no loss's
                seen = peak, level, moments[-1].new
        call.note(roots, seen)
        if then is not None:
            then()
        return result


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
        turn: Turn,
        warn_of_kept: Callable[[str], None] | None,
    ) -> None:
        """``warn_of_kept``: is told why, by a backward that keeps the graph, where that may exceed the budget."""
        self.observer, self.look, self.turn, self.warn_of_kept = observer, look, turn, warn_of_kept
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
        usage = Usage(tuple(sorted(self.reached)), self.held, self.attached, turned, viewed)
        self.observer.note(Signs(usage, self.nodes), roots, seen)

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


_OWNED: set[None] = set()  # by this name alone
_ONE_OWNER = _references(weakref.ref(_OWNED))


def _has_owner(ref: weakref.ref[torch.Tensor]) -> bool:
    """Whether Python code has the tensor. Where C++ has it too, that counts as an owner of the Python object."""
    t = ref()
    if t is None or not hasattr(t, "_use_count"):
        return t is not None
    shared = t._use_count() > 1
    del t
    return bool(_references(ref) >= _ONE_OWNER + shared)
