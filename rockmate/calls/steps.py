"""The calls of one step share its budget: which of them wait for their backward, and in which way each of them runs.

A step begins with a call while no other waits for its backward, and ends before the next such call. What a step of
several calls was is known when it is over. Where their plans exceed the budget together, or run something again, the
calls of later steps that begin in the same way are planned together: see ``solvers.calls``. So are those of other
sizes, as if the calls followed that followed in the largest step of the same models. A call that no known step has gets
what those that wait leave of the budget.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

from rkgb.warn import warn
from rockmate.budget import show_bytes
from rockmate.calls.look import FAILED, Look
from rockmate.calls.whole_steps import (
    FIRST,
    UNMEASURED,
    WITHOUT,
    Form,
    KnownStep,
    StepInfeasibleError,
    Turn,
    WholeStep,
    form_of,
    infeasible_step,
    least_from_start,
    names_of,
    phases_of,
    shared,
)
from rockmate.errors import BudgetWarning, InfeasibleBudgetError
from rockmate.planning.report import line_of_call
from rockmate.planning.ways import Ways, peak_of
from rockmate.tell import LOG, LONG
from solvers import InfeasibleError
from solvers.calls import Way, least_of, level

MOST_TURNS = 64
"""Calls of a step that are remembered."""

MOST_PLACES = 4
"""Of the calls of a step, so many are observed apart after the first."""

MOST_WAYS = 128
"""Kinds of calls that are remembered."""

MOST_STEPS = 16
"""Steps of several calls that are known."""

FEW = 4
"""New steps of one call after which no others are expected in a new one."""


class Steps:
    """The steps under one budget. See the file's text."""

    def __init__(self, terms: Any) -> None:
        """``terms``: the ``rockmate.calls.terms.Terms`` that have these steps."""
        self.terms = terms
        self._known: dict[Form, KnownStep] = {}
        self._eager: dict[Form, int] = {}  # bytes of steps that run nothing again
        self._ways: dict[tuple[Hashable, bool], Ways] = {}  # by kinds, and whether the gradients are there
        self._here = threading.local()
        self._said: set[str] = set()
        self._last: Form | None = None
        self._trained: list[tuple[Hashable, ...]] = []  # kinds of calls of steps that had a backward
        self.unknown = True  # no step had a backward yet, or of the last one's calls only bounds are known

    def forget(self, owner: object) -> None:
        """Nothing is known of the calls of ``owner`` any more."""
        self._drop({key for (key, _), ways in self._ways.items() if ways.owner is owner})

    def _drop(self, gone: set[Hashable]) -> None:
        """Nothing is known of these kinds of calls any more."""
        self._ways = {(key, made): ways for (key, made), ways in self._ways.items() if key not in gone}
        self._known = {form: s for form, s in self._known.items() if gone.isdisjoint(form.keys)}
        self._eager = {form: s for form, s in self._eager.items() if gone.isdisjoint(form.keys)}

    # ------------------------------------------------------------------------- this thread

    @property
    def turns(self) -> list[Turn]:
        """Of the step that is here, in order."""
        turns: list[Turn] = self._here.__dict__.setdefault("turns", [])
        return turns

    def waiting(self) -> list[Turn]:
        """The calls of this thread that wait for their backward."""
        return [turn for turn in self.turns if turn.waits]

    def held(self) -> int:
        """Bytes that these keep."""
        return sum(turn.way.kept_in_forwards for turn in self.waiting())

    def place(self) -> int:
        """How many calls of the step have come before the one that comes now."""
        return len(self.turns) if self.waiting() else 0

    def observed_place(self) -> int:
        """Where in the step the call that comes now is observed: those after ``MOST_PLACES`` others are as one."""
        return min(self.place(), MOST_PLACES)

    def expected_now(self, key: Hashable) -> KnownStep | None:
        """The step whose calls are planned together in which a call that comes now is expected."""
        before = [turn.key for turn in self.turns] if self.waiting() else []
        return self._expected((*before, (key, len(before))))

    @property
    def calls(self) -> int:
        """How many calls the step that is here has, as far as that is known."""
        return max(len(self.turns), 1 if self._last is None else len(self._last.keys))

    def of_one(self, error: InfeasibleBudgetError) -> str:
        """What is said of the least budget of an ``error``, where it is that of one call, and others may come."""
        calls, seen = max(self.place() + 1, self.calls), self._last is not None or bool(self.turns)
        if isinstance(error, StepInfeasibleError) or (calls == 1 and seen):
            return ""
        return f" This is for one call{f' of {calls}' * (calls > 1)}: all calls before a backward share the budget."

    @property
    def are_planned(self) -> bool:
        """Whether calls of a step are planned together, so that what one of them was decides on the others."""
        return bool(self._known)

    def follows_a_backward(self, key: Hashable) -> bool:
        """Whether the backward of the call that comes now is expected after one of the same parameters."""
        step, place = self.expected_now(key), self.place()
        return step is not None and step.form.owners[place] in step.form.earlier(place)

    # ------------------------------------------------------------------------- calls

    def begin(self) -> None:
        """A call comes: a step begins with it unless others wait, and the one before is over."""
        if self.turns and not self.waiting():
            self._finish()

    def take(self, key: Hashable, ways: Ways, after: bool = False, news: bool = False) -> Turn:
        """A call of such a kind comes: its turn, in the way in which it is to run. ``key``: of the kind, and of what
        it is expected to compute. ``after``: the ``ways`` are those where the gradients of parameters are there, as
        ``follows_a_backward`` says. ``news``: the call itself is to be observed, and not the step.

        Raises ``InfeasibleBudgetError`` where the calls of the step do not fit the budget in any ways that are known.
        """
        self.begin()
        turns, began = self.turns, time.perf_counter()
        if len(turns) >= MOST_TURNS:
            turns[:] = self.waiting()
        key = key, len(turns)
        if (key, after) not in self._ways and len(self._ways) >= MOST_WAYS:
            self._drop({next(iter(self._ways))[0]})
        self._ways[key, after] = ways
        way, step = self._way(turns, key, ways)
        first = way is not None and not turns and not news
        if first and step is not None and step.is_to_be_measured and Look.possible():
            WholeStep(step, turns, ways.device, self._say)
        if (seconds := time.perf_counter() - began) > LONG:
            LOG.info(
                f"{ways.owner.name}: looked for {seconds:.1f} s for ways in which calls share the budget of their step "
                f"({line_of_call(ways.call)})"
            )
        turn = Turn(key, ways, way or ways.alone)
        turns.append(turn)
        return turn

    def _way(self, turns: Sequence[Turn], key: tuple[Hashable, int], ways: Ways) -> tuple[Way | None, KnownStep | None]:
        """The way of a call of this ``key`` after ``turns``, None if as where it is alone; and the step expected."""
        step, budget = self._expected((*(turn.key for turn in turns), key)), self.terms.budget
        if not isinstance(budget, int):
            return None, step
        way = self._as_in_others(turns, key, ways, budget) if step is None else self._planned(step, turns, ways, budget)
        if way is None and self.waiting():
            way = self._left(ways, budget, step)
        return way, step

    @contextlib.contextmanager
    def forward_of(self, turn: Turn, look: Look | None) -> Iterator[None]:
        """The forward of a call runs: where it fails, the call has no ``turn``, and a ``look`` at it ends."""
        try:
            yield
        except BaseException:
            if look is not None:
                look.abandon(FAILED[0])
            if turn in self.turns:
                self.turns.remove(turn)
            raise

    def seen(self, turn: Turn, key: Hashable, ways: Ways) -> None:
        """The call of ``turn`` was seen to be one of this ``key``, which can run in these ``ways``."""
        turn.way, turn.ways = ways.alone, ways
        self.learned(turn, key, ways)

    def learned(self, turn: Turn, key: Hashable, ways: Ways) -> None:
        """As ``seen``, when the backward is over: later calls can run so."""
        turn.key = key, turn.key[1]
        self._ways[turn.key, False] = ways

    def way_seen(self, turn: Turn, key: Hashable, ways: Ways) -> Way:
        """As ``seen``, while the forward runs: the way for the rest of it. That none fits is said in the next call."""
        self.seen(turn, key, ways)
        before = self.turns[: self.turns.index(turn)]
        with contextlib.suppress(InfeasibleBudgetError):
            turn.way = self._way(before, turn.key, ways)[0] or ways.alone
        return turn.way

    def _ways_of(self, form: Form) -> tuple[Ways, ...]:
        found = []
        for k, key in enumerate(form.keys):
            after = form.owners[k] in form.earlier(k)
            found.append(self._ways.get((key, after)) or self._ways[key, not after])
        return tuple(found)

    def _expected(self, keys: tuple[Hashable, ...]) -> KnownStep | None:
        """Of the known steps that begin so, the one that takes most."""
        found = [step for form, step in self._known.items() if form.keys[: len(keys)] == keys]
        return max(found, key=lambda step: (len(step.form.keys), self._eager[step.form]), default=None)

    def _as_in_others(self, turns: Sequence[Turn], key: tuple[Hashable, int], own: Ways, budget: int) -> Way | None:
        """The way for the call of this ``key`` after ``turns``, of its ``own``, in a step that did not come before, as
        of other sizes. Those are supposed to follow that followed in the largest step of the same models; None where
        no such step is known, or the last new ones had one call each.
        """
        keys = (*(turn.key for turn in turns), key)
        if any(known[: len(keys)] == keys for known in self._trained):
            return None
        if all(len(known) == 1 for known in self._trained[-FEW:]):
            return None
        came = [*(turn.ways for turn in turns), own]
        owners = tuple(id(ways.owner) for ways in came)
        like = [form for form in self._known if len(form.keys) > 1 and form.owners[: len(owners)] == owners]
        if not like:
            return None
        form = max(like, key=self._eager.__getitem__)
        left, every = max(0, budget - self._known[form].beside), (*came, *self._ways_of(form)[len(came) :])
        taken = [[turn.way] for turn in turns]
        with contextlib.suppress(InfeasibleError):
            return shared(taken, every[len(taken) :], phases_of(form, every), left)[len(taken)]
        return None

    def _planned(self, step: KnownStep, turns: Sequence[Turn], own: Ways, budget: int) -> Way | None:
        """The way for the call after ``turns``, of its ``own``; None if plans of later calls are to be known before."""
        taken, known_ways = [turn.way for turn in turns], self._ways_of(step.form)
        ways = (*known_ways[: len(taken)], own, *known_ways[len(taken) + 1 :])
        step.check_waits(ways)
        left = max(0, budget - step.beside)
        known = step.budget == left and step.ways == ways and step.fixed <= len(taken)
        if known and step.problem is not None:
            return None
        if not known or step.chosen[: len(taken)] != taken:
            phases, fixed = phases_of(step.form, ways), [[way] for way in taken]
            problem: tuple[str, int] | None = None
            try:
                step.chosen = shared(fixed, ways[len(taken) :], phases, left)
            except InfeasibleError as error:
                if any(w.rough for w in ways) or (taken and step.problem is not None):
                    return None
                if not taken:  # else this call is seen to take more than when the ways of those before were chosen
                    least = least_from_start(ways, phases, error.min_budget) + step.beside
                    eager = self._eager[step.form] + step.beside
                    problem = infeasible_step(step, ways, budget, least, eager), least
                    if not self.terms.least and not self._may_be_another(step.form):
                        raise StepInfeasibleError(*problem) from None
                step.chosen = least_of([*fixed, *(w.within(left, tight=True) for w in ways[len(taken) :])], phases)
            step.budget, step.ways, step.fixed = left, ways, len(taken)
            step.problem = None if self.terms.least else problem
            if step.problem is not None:
                return None  # the calls that fit run: see ``_left``
            if problem is not None:
                self._say(f"{problem[0].removesuffix(UNMEASURED)} The plans of least memory run instead.")
            peak = max(level(phase, step.chosen) for phase in phases) + step.beside
            if peak != step.peak:
                step.peak, step.asked = peak, budget
                step.tell()
        return step.chosen[len(taken)]

    def _may_be_another(self, form: Form) -> bool:
        """Whether steps that begin with the same call have come that are not of this ``form``, or this one came in a
        validation without ``torch.no_grad``: some of its calls had no backward.
        """
        return not form.is_whole or any(keys[0] == form.keys[0] and keys != form.keys for keys in self._trained)

    def _left(self, ways: Ways, budget: int, step: KnownStep | None) -> Way:
        """The fastest way in what those that wait leave of the budget; if there is none, that of least memory. Where
        one of them has no plan, room is left if that can be for what its backward and the loss take.

        Raises ``InfeasibleBudgetError`` instead where no plan fits the ``step`` that is expected.
        """
        waiting = self.waiting()
        held = self.held() + (0 if step is None else step.beside)
        room = max(0, budget - held)
        easily = int(FIRST * room) if any(turn.ways.rough for turn in waiting) else room
        if peak_of(ways.alone) <= easily:
            return ways.alone
        for tight in (False, True):
            choices = [ways.alone, *ways.within(budget, tight=tight)]
            if fitting := [way for way in choices if peak_of(way) <= room]:
                return min(fitting, key=lambda way: (max(peak_of(way), easily), way.time))
        if step is not None and step.problem is not None:
            raise StepInfeasibleError(*step.problem)
        least = min(choices, key=peak_of)
        names = names_of([*(turn.ways for turn in waiting), ways])
        self._say(
            f"{names} {'were' if ' and ' in names else 'was'} called {len(waiting) + 1} times before a backward. What "
            f"the calls keep adds up, here to {show_bytes(held + peak_of(least))}, and the budget of "
            f"{show_bytes(budget)} is for the whole step. "
            f"The calls of later steps like this one are planned together. {WITHOUT}"
        )
        return least

    def _say(self, message: str) -> None:
        """Warn of a step once, whatever the figures are."""
        about = "".join(c for c in message if not c.isdigit())
        if about not in self._said:
            self._said.add(about)
            warn(message, BudgetWarning)

    # ------------------------------------------------------------------------- steps

    def _finish(self) -> None:
        """The last step of this thread is over: learn what it was, if it had several calls."""
        turns: list[Turn] = self._here.__dict__.pop("turns", [])
        self.unknown = self.unknown and not any(turn.began for turn in turns)
        form = form_of(turns)
        before, self._last = self._last, form
        if form.keys not in self._trained and any(turn.began for turn in turns):
            self._trained = [*self._trained[1 - MOST_STEPS :], form.keys]
        known = {key for key, _ in self._ways}
        if len(turns) < 2 or any(turn.key not in known for turn in turns):
            return
        if all(not waiting for _, _, waiting in form.phases):
            return  # one after another
        ways = self._ways_of(form)
        phases = phases_of(form, ways)
        self._eager[form] = max(level(phase, [w.eager for w in ways]) for phase in phases)
        self.unknown = any(w.rough for w in ways)
        if not self.unknown and (form.is_whole or form == before):  # a validation without torch.no_grad comes once
            beside = {known: step.beside for known, step in self._known.items()}
            counted = (f for f in self._eager if f.is_whole or f == form)
            self.terms.settle_step(max(self._eager[f] + beside.get(f, 0) for f in counted))
        peak, budget = max(level(phase, [w.alone for w in ways]) for phase in phases), self.terms.budget
        binds = isinstance(budget, int) and (peak > budget or any(turn.way.time for turn in turns))
        if binds and form not in self._known:
            if len(self._known) == MOST_STEPS:
                self._known.pop(next(iter(self._known)))
            self._known[form] = KnownStep(form)
