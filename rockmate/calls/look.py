"""Close observation of a step: what is allocated until its backward, or to the end of it, without what others take
meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd import profiler
from torch.autograd import profiler_legacy as legacy

from rkgb.cost.memory import give_way, timeline
from rkgb.device.kind import Moment, Timeline

MOST_OTHERS = 64
"""Backwards that may come before that of a call that is looked at, which may never have one."""

MOST_CALLS = 64
"""Calls under a plan or a budget that may come between a call that is looked at and its backward."""

_ENGINE = "_engine_run_backward"
"""Where Python hands backwards to autograd's engine; ``torch.compiler`` replaces the same function for its tracers."""


class Look(ABC):
    """Close observation of one call: the next backward in its thread that comes to it is intercepted, memory until then
    recorded. Others that run before (of a discriminator, of parts of the loss) belong to what is recorded.

    There is at most one in a process. It ends with that backward, when the graph is released, or when other code starts
    a profiler, since two cannot run. The forward or the backward of another call under a plan ends it, or is a gap.
    """

    current: Look | None = None
    others = 0  # backwards that have come to other graphs
    why_not = ""  # it has seen nothing: the reason, as a clause
    calls = 0  # forwards of other calls under a plan that have come
    in_gap = False  # what runs now is of another call
    whole = False  # all calls and backwards are of what is looked at: there are no gaps

    def __init__(self, opened: Timeline | None) -> None:
        """``opened``: what records memory, None if nothing does."""
        Look.current = self
        self.thread = threading.get_ident()
        self.replaced: list[tuple[Any, str, Any, Any]] = []
        self.window = opened
        self.replace(torch.autograd, _ENGINE, self._intercepted(getattr(torch.autograd, _ENGINE)))
        if self.window is not None:
            starts = ("_prepare_profiler", "_enable_profiler", "_enable_profiler_legacy")
            for module, name in zip((profiler, profiler, legacy), starts, strict=True):
                self.replace(module, name, partial(self.give_way, getattr(module, name)))

    @staticmethod
    def possible() -> bool:
        """Whether a call can be looked at: this is the main thread, no other call is, torch has what is intercepted,
        and no backward runs, at whose end a profiler that was opened in it would be lost.
        """
        main = threading.current_thread() is threading.main_thread()  # which ends last
        alone = Look.current is None and torch._C._current_graph_task_id() == -1
        return main and alone and hasattr(torch.autograd, _ENGINE)

    def _intercepted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``run_backward``, in which TorchDynamo captures nothing: where a backward runs in code that it captures, it
        would take the hooks of this package for code of the model's, and break them up.
        """

        def run(*args: Any, **kwargs: Any) -> Any:
            return self.run_backward(original, *args, **kwargs)

        return torch._dynamo.disable(run) if "torch._dynamo" in sys.modules else run

    def replace(self, owner: Any, name: str, new: Callable[..., Any]) -> None:
        self.replaced.append((owner, name, getattr(owner, name), new))
        setattr(owner, name, new)

    def run_backward(self, original: Callable[..., Any], ends: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """A backward, which ``original`` runs.

        A backward within another one, as that of reentrant checkpoints, is a part of that.
        """
        run = partial(original, ends, *args, **kwargs)
        if self.thread != threading.get_ident() or torch._C._current_graph_task_id() != -1:
            return run()
        return self.watched(run, ends, stays=any(args[1:3]))

    @abstractmethod
    def watched(self, run: Callable[[], Any], ends: Sequence[Any], stays: bool) -> Any:
        """Call ``run``, a backward from ``ends``. ``stays``: its graph does (``retain_graph``, ``create_graph``)."""

    def pause(self) -> None:
        """What comes from now on is of another call, and is taken out of the recording."""
        if not (self.in_gap or self.whole):
            self.in_gap = True
            self.gap_begins()

    def resume(self) -> None:
        """What comes from now on is of this call."""
        if self.in_gap:
            self.in_gap = False
            self.gap_ends()

    def gap_begins(self) -> None:
        """What another call takes is not recorded from now on."""
        if self.window is not None and self.window.marks:
            self.window.pause()

    def gap_ends(self) -> None:
        """What comes is recorded again."""
        if self.window is not None and self.window.marks:
            self.window.resume()

    def lets_call(self, planned: bool) -> bool:
        """Pause for the forward of another call, if that may be; ``planned``: as far as is known, it has a plan."""
        if not planned or self.calls == MOST_CALLS or self.in_gap or self.thread != threading.get_ident():
            return False
        self.calls += 1
        self.pause()
        return True

    def another(self) -> None:
        """A backward is over that did not come to the call."""
        self.others += 1
        if self.others == MOST_OTHERS:
            self.abandon(f"{MOST_OTHERS} backwards of other graphs came")

    def give_way(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of what starts a profiler."""
        self.abandon("a profiler was started")
        return original(*args, **kwargs)

    def abandon(self, why: str = "") -> None:
        """Close, unless this is the wrong place for it: a later forward then does. ``why``: as a clause."""
        self.why_not = self.why_not or why
        if self.thread == threading.get_ident() and torch._C._current_graph_task_id() == -1:
            self.close()

    def close(self) -> list[Moment] | None:
        """Put back what was replaced; the moments that were recorded, None if nothing was."""
        if Look.current is self:
            Look.current = None
            for owner, name, original, new in self.replaced:
                if getattr(owner, name) == new:
                    setattr(owner, name, original)
            self.replaced.clear()
        opened, self.window = self.window, None
        return opened.close() if opened is not None else None


FAILED = ("forward failed", "backward failed")
"""Why a step is not seen that is none."""

LET_GO = "no backward came to their outputs: the loss raised an error, or did not use them"
"""Why a step is not seen whose graph goes."""


def end_look() -> None:
    """End a look that is open: another forward begins, and what it does is no loss."""
    if Look.current is not None:
        Look.current.abandon("no backward came before the next forward of a model with a plan")


class LookInTheWay(Exception):
    """A plan is to be made in a call while another one is looked at: end that look, and begin the call again."""


def check_no_look() -> None:
    """Raise ``LookInTheWay`` if a look is open, which a measurement would end.

    A session of torch's profiler must not end within frames of TorchDynamo, which record for it: where another session
    begins there, the profiler writes into the memory of the one that ended.
    """
    if Look.current is not None:
        raise LookInTheWay


@contextlib.contextmanager
def others_looks_paused(planned: bool) -> Iterator[None]:
    """While a call runs, it is not of a step that is looked at, which ends where that cannot be. ``planned``: there is
    a plan for such calls, as far as that is known.
    """
    look = Look.current
    if look is not None and look.lets_call(planned):
        try:
            yield
        except BaseException:
            look.abandon(FAILED[0])
            raise
        look.resume()
    else:
        end_look()
        yield


@contextlib.contextmanager
def others_data() -> Iterator[None]:
    """Data go that are of others than of the call that is looked at, if one is."""
    look = Look.current
    if look is None or look.in_gap or look.thread != threading.get_ident():
        yield
    else:
        look.pause()
        yield
        look.resume()


give_way.append(end_look)
atexit.register(end_look)  # torch crashes where a profiler that is open outlives the interpreter


class StepLook(Look):
    """The memory of a whole step: from now to the end of the next backward in this thread that reaches the call.

    ``reached``: it has. ``window`` is marked when it is over.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(timeline(device))
        self.reached = False
        self._gaps: list[_Gap] = []
        self.arrives = 0  # bytes of the gradients of its outputs, which the backwards of others may make
        self.before_gaps: list[tuple[Before, str]] = []  # while it waits for others, and for what

    def mark(self) -> None:
        """A moment is now."""
        if not self.in_gap:
            self._mark()

    def _mark(self) -> None:
        if self.window is not None:
            self.window.mark()

    @property
    def _marks(self) -> int:
        return 0 if self.window is None else self.window.marks

    def gap_begins(self) -> None:
        self._gap_begins("forward" if torch._C._current_graph_task_id() == -1 else "part of a backward")

    def _gap_begins(self, of: str) -> None:
        self._gaps.append(_Gap(of, not self.reached, self._marks))
        self._mark()

    def gap_ends(self) -> None:
        self._gaps[-1].ends = self._marks
        self._mark()

    def reach(self) -> None:
        """The backward comes to this call, with gradients that those of other calls may have made."""
        in_gap = self.in_gap
        self.resume()
        if in_gap and not self.reached:
            self._gaps[-1].arrived = self.arrives
        self.reached = True

    def close(self) -> list[Moment] | None:
        """The moments of this step; None if nothing was recorded."""
        seen = super().close()
        if seen is None:
            return None
        found, self.before_gaps = _without(seen, self._gaps)
        return found

    @abstractmethod
    def ended(self, moments: list[Moment], stays: bool) -> None:
        """The step is over; the last of ``moments`` is its end. ``stays``: its graph does."""

    def watched(self, run: Callable[[], Any], ends: Sequence[Any], stays: bool) -> Any:
        if not (self.reached or self.in_gap or self.whole):  # at first it may make what is for another call
            self._gap_begins("backward")
            self.gap_ends()
        try:
            result = run()
        except BaseException:  # it may have come from a hook before the backward came to the call
            self.abandon(FAILED[1])
            raise
        if not self.reached:
            self.resume()
            self.another()
        else:
            self.mark()
            seen = self.close()
            if seen is not None:
                self.ended(seen, stays)
        return result


@dataclass
class _Gap:
    """``of`` what it is. ``waits``: the backward of the call is to come. ``begins``, ``ends``: moments; -1 before.
    ``arrived``: bytes that it made for this step.
    """

    of: str
    waits: bool
    begins: int
    ends: int = -1
    arrived: int = 0


class Before(NamedTuple):
    """Where a gap begins: the ``level`` of the step, how many of its ``moments`` were before, and the ``peak`` since
    the last of these.
    """

    level: int
    moments: int
    peak: int


def _without(moments: list[Moment], gaps: list[_Gap]) -> tuple[list[Moment], list[tuple[Before, str]]]:
    """``moments`` without those of gaps, and where gaps begin while the call waits.

    Later levels are less by what each gap left, but for the bytes that arrived. A gap that does not end is the end.
    """
    found: list[Moment] = []
    levels: list[tuple[Before, str]] = []
    begins, ends = {gap.begins: gap for gap in gaps}, {gap.ends: gap for gap in gaps}
    beside, before = 0, 0
    for k, (level, peak, _) in enumerate(moments):
        if gap := begins.get(k):
            before = level
            if gap.waits:
                levels.append((Before(level - beside, len(found), found[-1].peak if found else 0), gap.of))
            if gap.ends < 0:
                found.append(Moment(level - beside, level - beside))
                break
        elif gap := ends.get(k):
            beside += level - before - gap.arrived
            if found:
                found[-1] = Moment(found[-1].level, max(found[-1].peak, peak - beside))
        else:
            found.append(Moment(level - beside, peak - beside))
    return found, levels
