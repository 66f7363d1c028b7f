"""The turns of calls in a step, what a step of several calls was, and one look at such a step as a whole."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rkgb.device.kind import Moment
from rockmate.budget import show_at_least, show_at_most, show_bytes
from rockmate.calls.look import Look, StepLook
from rockmate.errors import InfeasibleBudgetError
from rockmate.planning.report import line_of_call, some_of
from rockmate.planning.ways import Waits, Ways
from rockmate.tell import ANOTHER_OVERHEAD, LOG, costly
from solvers import InfeasibleError
from solvers.calls import Phase, Way, least_of, level, share

_CLOCK = itertools.count(1)
"""The order of forwards and backwards."""


class StepInfeasibleError(InfeasibleBudgetError):
    """No plans of all calls of a step fit its budget."""


class Turn:
    """One call of a step. ``way``: in which it runs. ``at``: when its forward began; ``began``: when its backward did,
    0 before; ``gone``: when it was seen that there will be none.
    """

    def __init__(self, key: tuple[Hashable, int], ways: Ways, way: Way) -> None:
        """``key``: of the kind of call, with how many calls of the step came before."""
        self.key, self.ways, self.way = key, ways, way
        self.at, self.began, self.gone = next(_CLOCK), 0, 0
        self._graph: weakref.ref[Any] | None = None
        self._tape: weakref.ref[Any] | None = None

    def held_by(self, graph: object) -> None:
        """``graph`` lives as long as there may be a backward."""
        self._graph = weakref.ref(graph)

    def begin(self, look: Look | None = None) -> None:
        """A backward has come to it. ``look``: at this call, if there is one."""
        if not self.began:
            self.began = next(_CLOCK)
            if Look.current is not None and Look.current is not look:
                Look.current.pause()

    def followed_on(self, tape: object) -> None:
        """Its operations are noted on ``tape``."""
        self._tape = weakref.ref(tape)

    @property
    def tape(self) -> Any:
        """The ``rockmate.follow.tape.Tape`` on which its operations are noted; None if there is none, or it is gone."""
        return None if self._tape is None else self._tape()

    @property
    def holds(self) -> int:
        """Bytes that it keeps now."""
        if self._tape is None:
            return self.way.kept_in_forwards if self.waits else 0
        return 0 if self.tape is None else self.tape.ledger.live

    @property
    def runs(self) -> bool:
        """Whether its forward is not over."""
        return self._graph is None

    @property
    def waits(self) -> bool:
        """Whether its forward is over, and a backward may still come."""
        if self._graph is None:
            return False
        if not self.began and not self.gone and self._graph() is None:
            self.gone = next(_CLOCK)
        return not self.began and not self.gone

    def waits_at(self, moment: int) -> bool:
        """Whether it kept its data at this moment."""
        return self.at < moment < (self.began or self.gone or moment + 1)


FIRST = 0.6
"""Part of the budget that the data of a step may take of which nothing is known yet."""

MOST_LOOKS = 16
"""Steps of one kind that are measured."""

MOST_TRIED = 3
"""Budgets of a step that are tried before one is stated."""

MOST_UNFINISHED = 2
"""Looks at steps of one kind that did not come to an end. Calls of such steps are looked at one by one."""


@dataclass(frozen=True)
class Form:
    """Which calls a step has, of which ``owners`` (by number), and for each of their phases in order, (call, whether it
    is the backward, calls that wait).
    """

    keys: tuple[Hashable, ...]
    owners: tuple[int, ...]
    phases: tuple[tuple[int, bool, tuple[int, ...]], ...]

    @property
    def is_whole(self) -> bool:
        """Whether each call had its backward."""
        return sum(backward for _, backward, _ in self.phases) == len(self.keys)

    def earlier(self, call: int) -> list[int]:
        """The owners of the calls whose backward comes before that of ``call``."""
        order = [k for k, backward, _ in self.phases if backward]
        return [self.owners[k] for k in order[: order.index(call)]] if call in order else []


@dataclass(eq=False)
class KnownStep:
    """Such steps are planned together. ``chosen``: ways of its calls, for ``budget`` and the ``ways`` that there were,
    the first ``fixed`` of which ran already; ``problem``: why they do not fit it, and the least that does. ``peak``:
    what they take, of the budget ``asked`` for. ``beside``: bytes that steps took above that, which ``looks`` at them
    have shown, of which some were ``unfinished``. ``measured``: the ways in which their calls ran, and the bytes that
    these calls were known to leave held meanwhile, ``waits``. ``said``: the budget and the overhead that were told.
    """

    form: Form
    budget: int = -1
    ways: tuple[Ways, ...] = ()
    chosen: list[Way] = field(default_factory=list)
    fixed: int = 0
    problem: tuple[str, int] | None = None
    peak: int = 0
    asked: int = 0
    beside: int = 0
    measured: list[Way] = field(default_factory=list)
    waits: tuple[Waits, ...] = ()
    looks: int = 0
    unfinished: int = 0
    said: tuple[int, float] | None = None

    @property
    def is_to_be_measured(self) -> bool:
        """Whether no step was measured whose calls run in the chosen ways."""
        planned = not any(w.rough for w in self.ways)
        few = self.looks < MOST_LOOKS and self.unfinished < MOST_UNFINISHED
        return planned and few and self.chosen != self.measured

    def check_waits(self, ways: Sequence[Ways]) -> None:
        """Where calls were observed since, what a step took beside the plans is in these now: it is measured again."""
        if self.measured and self.waits != _waits(ways):
            self.beside, self.measured = 0, []

    def tell(self) -> None:
        """Say how its calls were planned, unless little has changed since that was said."""
        rough = any(w.rough for w in self.ways)  # how long such a call takes is not known
        overhead = 0.0 if rough else sum(w.time for w in self.chosen) / max(1, sum(w.eager_time for w in self.ways))
        if self.said is not None and self.said[0] == self.asked and abs(overhead - self.said[1]) <= ANOTHER_OVERHEAD:
            return
        self.said = self.asked, overhead
        time = "" if rough else f", {100 * overhead:.1f} % more time{costly(overhead)}"
        LOG.info(
            f"{names_of(self.ways)}: {len(self.ways)} calls of a step are planned together: predicted peak "
            f"{show_bytes(self.peak)}, budget {show_bytes(self.asked)}{time}"
        )


def names_of(ways: Sequence[Ways]) -> str:
    """The names of the models whose calls these are, each once."""
    return " and ".join(dict.fromkeys(w.owner.name for w in ways))


def _waits(ways: Sequence[Ways]) -> tuple[Waits, ...]:
    return tuple(w.waits for w in ways)


class WholeStep(StepLook):
    """Measures a step whose calls were planned together. ``turns``: of its calls, as they come."""

    whole = True

    def __init__(self, step: KnownStep, turns: list[Turn], device: torch.device, say: Callable[[str], None]) -> None:
        super().__init__(device)
        self.step, self.turns, self.say = step, turns, say
        step.looks += 1
        self.mark()

    @property
    def _goes_on(self) -> bool:
        """Whether a call of it runs, or waits; a forward may have backwards of its own."""
        return any(turn.runs or turn.waits for turn in self.turns)

    def lets_call(self, planned: bool) -> bool:
        """All calls are of this step."""
        return self.thread == threading.get_ident() and self._goes_on

    def watched(self, run: Callable[[], Any], ends: Sequence[Any], stays: bool) -> Any:
        """The step is over when no call waits."""
        if not self._goes_on:  # another step's: calls of this one had no backward
            self.abandon("another step began")
            return run()
        result = super().watched(run, ends, stays)
        if Look.current is self and self._is_over():
            self.mark()
            moments = self.close()
            if moments is not None:
                self.ended(moments, stays)
        return result

    def _is_over(self) -> bool:
        """Whether no call waits, or none that has had a backward in such steps."""
        with_backward = [call for call, backward, _ in self.step.form.phases if backward]
        if len(self.turns) == len(self.step.form.keys) and all(self.turns[call].began for call in with_backward):
            return True
        return not self._goes_on

    def abandon(self, why: str = "") -> None:
        self.step.unfinished += 1
        super().abandon(why)

    def ended(self, moments: list[Moment], stays: bool) -> None:
        """What it took above the prediction is planned for."""
        step, peak = self.step, max(moment.peak for moment in moments)
        if [turn.way for turn in self.turns] != step.chosen:  # another step than was expected
            step.unfinished += 1
        else:
            step.measured, step.waits = step.chosen, _waits(step.ways)
            step.beside += max(0, peak - step.peak)
        if peak > step.asked >= step.peak:
            self.say(
                f"the last step of {names_of(step.ways)} took {show_bytes(peak)}, more than the budget of "
                f"{show_bytes(step.asked)}, as its calls were not known well enough. Later steps like it are planned "
                "for what this one took"
            )


def form_of(turns: Sequence[Turn]) -> Form:
    """What the step was whose calls had these turns."""
    moments = [(turn.at, k, False) for k, turn in enumerate(turns)]
    moments += [(turn.began, k, True) for k, turn in enumerate(turns) if turn.began]
    phases = tuple(
        (k, backward, tuple(j for j, other in enumerate(turns) if j != k and other.waits_at(moment)))
        for moment, k, backward in sorted(moments)
    )
    return Form(tuple(turn.key for turn in turns), tuple(id(turn.ways.owner) for turn in turns), phases)


def phases_of(form: Form, ways: Sequence[Ways]) -> list[Phase]:
    """Gradients that calls of one owner make are those of the same parameters."""
    made: dict[int, int] = {}
    left, phases = 0, []
    for call, backward, waiting in form.phases:
        phases.append(Phase(call, backward, waiting, left + sum(made.values())))
        if backward:
            left += ways[call].left
            owner = id(ways[call].owner)
            made[owner] = max(made.get(owner, 0), ways[call].made)
    return phases


def shared(fixed: Sequence[Sequence[Way]], ways: Sequence[Ways], phases: Sequence[Phase], budget: int) -> list[Way]:
    """The ways of all calls; those of the first ones are ``fixed``. Raises ``InfeasibleError`` where none fit."""
    try:
        return share([*fixed, *(w.within(budget) for w in ways)], phases, budget)
    except InfeasibleError:
        return share([*fixed, *(w.within(budget, tight=True) for w in ways)], phases, budget)


def least_from_start(ways: Sequence[Ways], phases: Sequence[Phase], least: int) -> int:
    """A budget of ``least`` bytes or more for which ways are found that fit, if it is given from the start."""
    for _ in range(MOST_TRIED):
        found = least_of([w.from_start(least) for w in ways], phases)
        need = max(level(phase, found) for phase in phases)
        if need <= least:
            break
        least = need
    return least


def infeasible_step(step: KnownStep, ways: Sequence[Ways], budget: int, least: int, eager: int) -> str:
    """Why no plans fit the ``budget``; ``least``, ``eager``: what the step takes at least, and without any."""
    calls, count = "; ".join(some_of(list(dict.fromkeys(line_of_call(w.call) for w in ways)))), len(ways)
    names = names_of(ways)
    return (
        f"no plan fits a budget of {show_at_most(budget)} for a step in which {names} "
        f"{'are' if ' and ' in names else 'is'} called {count} times before all backwards are over ({calls}): the "
        f"smallest budget that the calls can be planned for together is {show_at_least(least)}; without "
        f"recomputation the step takes {show_at_least(eager)}. Raise the budget, make the batch smaller, or call "
        f"backward after each call (gradients add up). {WITHOUT}{'' if step.measured else UNMEASURED}"
    )


WITHOUT = "Forwards without a backward belong under torch.no_grad()."

UNMEASURED = (
    " No such step was measured yet: what it makes between its calls comes on top, once a step under a larger budget "
    "has shown that."
)
