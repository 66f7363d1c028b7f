"""What is known of the steps of a followed model, by kinds of calls and by the ways in which these compute; which steps
of a kind are observed, and what is said where they cannot be.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import ge
from typing import Any

import torch

from rkgb.cost.memory import is_measuring, refuse_within_measurements
from rkgb.probe.contexts import next_number
from rkgb.sample import Call
from rkgb.warn import warn
from rockmate.calls.front import Front
from rockmate.calls.keys import call_key
from rockmate.calls.look import FAILED, Look
from rockmate.errors import BudgetWarning
from rockmate.follow.checkpoints import Parts
from rockmate.follow.observed import FollowedLook, Observed, Seen
from rockmate.follow.plan import FollowedPlan, Found, eager_peak_of
from rockmate.follow.planned import FollowedProgram, Planned, program_of
from rockmate.follow.problem import FollowedProblem
from rockmate.follow.record import Use
from rockmate.follow.tape import Tape
from rockmate.memory import StepBytes, step_of
from rockmate.planning.report import line_of_call
from rockmate.planning.ways import Asked, Waits
from rockmate.tell import names_of
from solvers import Frontier, Schedule, walk

MOST_LOOKS = 16
"""Steps of one kind of call that are observed."""

MOST_UNSEEN = 3
"""Steps without a plan that could not be observed, after which that is said."""

_THREAD = "they run in another thread than the main one"
_ELSEWHERE = "they begin within a backward, or while another step is observed"
_NO_RECORD = "the memory of the process cannot be recorded now"


@dataclass(eq=False)
class Watch:
    """``name`` of the model, and the ``call`` in a few words. ``looks``: steps that were observed. ``unseen``: those in
    a row that were to be, and could not be to their end; ``why``: the reasons. ``failed``: steps in a row whose
    backward raised an error.
    """

    name: str
    call: tuple[str, ...]
    looks: int = 0
    unseen: int = 0
    failed: int = 0
    why: dict[str, None] = field(default_factory=dict)
    _last: FollowedLook | None = None
    _said: set[str] = field(default_factory=set)

    def look(self, device: torch.device, planned: bool) -> FollowedLook | None:
        """A look at the step that begins; None if there can be none. ``planned``: there is a plan for such steps."""
        if self.looks >= MOST_LOOKS or (Look.current is not None and (Look.current.in_gap or Look.current.whole)):
            return None  # where another call of the step is observed, this one is later
        if is_measuring():
            if not planned and not self.looks and not self.unseen:
                refuse_within_measurements()  # it runs once as it is, to be observed, and is measured the next time
            if not planned:
                self._say(
                    f"{self.name} has no plan for such steps yet. For a plan, this step is to be observed, but its "
                    "memory is measured: it may exceed the budget. Run it twice before you measure it"
                )
            return None
        if self._last is not None and self._last.why_not in FAILED:
            self.unseen -= 1  # it was no step
            self.failed += self._last.why_not == FAILED[1]  # that of a forward is seen
            if self.failed == MOST_UNSEEN and not planned:
                self._say(
                    f"{self.name} has no plan for calls with {line_of_call(self.call)}: each of {MOST_UNSEEN} steps "
                    f"raised an error ({self._last.why_not}), and a plan is made of a step that ends. What they keep "
                    "is decided as they run, and the budget does not hold"
                )
        elif self._last is not None and self._last.why_not:
            self.why[self._last.why_not] = None
        if self.unseen >= MOST_UNSEEN and not planned:
            self._say(
                f"{self.name} has no plan for calls with {line_of_call(self.call)}: {MOST_UNSEEN} steps could not be "
                f"observed from their forward to the end of one backward ({'; '.join(self.why)}). What they keep is "
                "decided as they run, and the budget does not hold"
            )
        self.unseen += 1
        self._last = None
        if not Look.possible():
            main = threading.current_thread() is threading.main_thread()
            self.why[_ELSEWHERE if main else _THREAD] = None
            return None
        look = FollowedLook(device)
        if look.window is None:
            look.close()
            self.why[_NO_RECORD] = None
            return None
        self.looks += 1
        self._last = look
        return look

    def saw(self) -> None:
        """A step was observed to its end."""
        self.unseen, self.failed, self._last = 0, 0, None
        self.why.clear()

    def _say(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            warn(message, BudgetWarning)


MOST_SCHEDULES = 8
"""Schedules that are tried for other sizes of a way."""


@dataclass(eq=False)
class Known:
    """What was observed of one way, ``number``, in which a kind of call computes, which is the ``call`` in a few words.

    ``missing``: parameters whose gradients the step made, of ``made`` bytes. ``budget``: of ``plan``, in bytes.
    ``least``: the schedule of the least budget that was stated. ``alike``: schedules that it had at other sizes.
    ``carried``: its schedule is that of another size, which has had so many ``uses``. ``problem``: why no plan
    fits, and the least that does. ``rehearsed``: the step was a synthetic one, with room for a loss. ``used``: the
    ways in which outputs were used that ``found`` is for. ``waits``: what the step holds while its other calls run.
    ``then``: the way that came after it. ``frontier``: once it was asked for, as a second search may end elsewhere
    at its time limit.
    """

    number: int
    call: tuple[str, ...]
    found: FollowedProblem
    seen: Seen
    missing: frozenset[str]
    made: int
    seconds: float
    rehearsed: bool
    device: torch.device
    budget: int = -1
    plan: FollowedPlan | None = None
    schedule: Schedule | None = None
    least: Schedule | None = None
    alike: list[Schedule] = field(default_factory=list)
    carried: bool = False
    uses: int = 0
    problem: tuple[str, int] | None = None
    used: set[Use] = field(default_factory=set)
    waits: Waits = field(default_factory=Waits)
    ways: Any = None  # see rockmate.follow.solving
    searched: dict[Asked, list[Schedule]] = field(default_factory=dict)  # for ``ways``
    then: weakref.ref[Known] | None = None
    frontier: Frontier | None = None
    ran: FollowedProgram | None = None  # the last time, beside other calls of its step
    _program: FollowedProgram | None = None

    @property
    def program(self) -> FollowedProgram | None:
        """What runs the plan, made when it is first asked for: a plan that does not fit may never run."""
        if self._program is None and self.plan is not None:
            self._program = program_of(self.found, self.plan.schedule, self.seen)
        return self._program

    def plan_as(self, plan: FollowedPlan) -> None:
        """``plan`` is for such calls from now on."""
        self.plan, self.budget, self.schedule, self._program, self.ran = plan, plan.budget, plan.schedule, None, None

    @cached_property
    def eager_peak(self) -> int:
        return eager_peak_of(self.found.problem)

    @cached_property
    def backward_peak(self) -> int:
        """Bytes that a moment of the backward takes at most, beside followed data."""
        return max((node.backward.peak for node in self.found.problem.nodes if node.backward), default=0)

    @property
    def places(self) -> tuple[str, ...]:
        """The user's source line of each node of ``found.problem``."""
        return tuple(self.seen.places[ops[-1]] if ops else "" for ops in self.found.ops_of)

    def covers(self, seen: Seen) -> bool:
        """Whether its plan has room for a step that was ``seen`` to compute the same and to use its outputs alike, as
        something is larger here, and nothing there: where sizes follow from values, the larger one comes again.
        """
        pairs = zip(self.seen.sizes, seen.sizes, strict=True)
        room = all(len(here) == len(there) and all(map(ge, here, there)) for here, there in pairs)
        return room and self.seen.sizes != seen.sizes and seen.use in self.used

    def inherit(self, others: Sequence[Known]) -> None:
        """Know the schedules of ``others``, which compute as it does, at other sizes too."""
        like = [k for k in others if k.found.is_like(self.found)]
        if like:  # the last ones first
            schedules = [s for s in (like[0].schedule, *like[0].alike) if s is not None]
            self.alike = [*dict.fromkeys(schedules)][:MOST_SCHEDULES]
        if same := [k for k in like if k.seen.sizes == self.seen.sizes]:
            self.schedule, self.least, self.searched = same[0].schedule, same[0].least, same[0].searched
        before = (k for k in others if k.rehearsed and k.schedule and k.found.has_nodes_of(self.found))
        self.alike += (s for k in before if k.schedule and (s := self.found.with_runs_of(k.schedule)))

    def judged(self, schedules: Iterable[Schedule | None]) -> list[Found]:
        """These ``schedules`` with their figures."""
        return [Found(s, walk(self.found.problem, s), 0) for s in dict.fromkeys(schedules) if s is not None]

    def fastest(self, schedules: Iterable[Schedule | None], budget: int) -> Found | None:
        """The fastest of these ``schedules`` that fits ``budget``."""
        return min(
            (f for f in self.judged(schedules) if f.walk.peak <= budget), key=lambda f: f.walk.time, default=None
        )

    def step_bytes(self, plan: FollowedPlan) -> StepBytes:
        return step_of(plan.problem, plan.schedule, plan.predicted_peak, self.made)


class UseOfOutputs:
    """Sees how a step uses what one forward returned, from there to the begin of its backward, without a look at
    memory: that tells a loss from another one.
    """

    def __init__(self, tape: Tape) -> None:
        self.thread, self.first = threading.get_ident(), next_number()
        self.outside = tape.held_outside(set(tape.ledger.at.values()))  # a copy: storages may go meanwhile

    def now(self, tape: Tape) -> Use:
        """The backward has come to the first saved tensor."""
        nodes = next_number() - self.first if threading.get_ident() == self.thread else -1
        return Use(nodes, tape.held_outside(self.outside))


@dataclass(eq=False)
class CallKind:
    """Calls with arguments of one ``form``, which is ``loose`` without their numbers and texts. ``known``: the way that
    came last first; ``before``: the one before it, or the same; ``numbered``: how many have come. ``news``: another one
    came. ``parts``: that are checkpointed. ``unsure``: ways in which outputs were used that no plan is for.
    ``unplanned``: calls that came while it was not worth a plan.
    """

    call: tuple[str, ...]
    watch: Watch
    form: Hashable
    loose: Hashable
    known: list[Known] = field(default_factory=list)
    before: Known | None = None
    numbered: int = 0
    parts: Parts = field(default_factory=list)
    unsure: set[Use] = field(default_factory=set)
    news: bool = True
    unplanned: int = 0

    @property
    def is_new(self) -> bool:
        """Whether a way is known to come that was not observed yet, and will be."""
        return self.news and self.watch.looks < MOST_LOOKS

    def next(self, missing: frozenset[str]) -> Known | None:
        """The way in which a call may compute that begins now: the one that came after the last one when that came
        before, as ways often alternate. ``missing``: parameters whose gradients are not there.
        """
        fitting = [k for k in self.known if missing <= k.missing]
        if not fitting:
            return None
        last = self.known[0]
        if self.before is not None:
            self.before.then = weakref.ref(last)
        self.before = last
        then = None if last.then is None else last.then()
        return then if then in fitting else fitting[0]

    def known_of(self, seen: Seen, missing: frozenset[str]) -> tuple[list[Known], list[Known]]:
        """What is known of the way in which a step computed that was ``seen``, and of others."""
        way = seen.forms, missing, seen.packs
        same = [k for k in self.known if (k.seen.forms, k.missing, k.seen.packs) == way]
        return same, [k for k in self.known if k not in same]

    def came(self, known: Known) -> None:
        self.known = [known, *(k for k in self.known if k is not known)]

    def computes(self, known: Known) -> bool:
        """Whether it is known to compute as ``known``, and to keep the same of it."""
        return any((k.seen.forms, k.seen.packs) == (known.seen.forms, known.seen.packs) for k in self.known)

    def note_use(self, tape: Tape, use: Use) -> None:
        """A backward comes to a call: the loss that its plan counts on may be another one."""
        policy = tape.policy
        if isinstance(policy, Observed):
            policy.seen.use = use
        elif isinstance(policy, Planned):
            known = next((k for k in self.known if k._program is policy.program), None)
            if known is not None and not known.rehearsed and use not in known.used:
                self.unsure.add(use)
                self.news = True

    def under_another_budget(self) -> CallKind:
        """The same calls, which are planned anew."""
        known = [replace(k, budget=-1, used=set(k.used), ways=None) for k in self.known]
        return replace(self, known=known, unsure=set(self.unsure))

    def take_from(self, other: CallKind) -> None:
        """Begin with what is known of the same calls at another place of their step: what is done with their outputs is
        to be seen here.
        """
        self.known, self.numbered = [replace(k, used=set(), ways=None) for k in other.known], other.numbered


class CallKinds(dict[tuple[Hashable, int, int], CallKind]):
    """Kinds of calls of a model, by their forms, ``Terms.made`` and their places in a step."""

    def __init__(self) -> None:
        super().__init__()
        self._alike: dict[Hashable, Hashable] = {}  # the forms of calls whose numbers do not tell what they compute

    def of(self, call: Call, training: bool, front: Front) -> CallKind:
        """The kind of ``call``, a new one where none is known."""
        form: Hashable = call_key(call.leaves, call.spec), training
        made, place = front.terms.made, front.terms.steps.observed_place()
        if (form, made, place) not in self:
            loose = call_key(call.leaves, call.spec, valued=False), training
            form = self._alike.get(loose, form)
            if (form, made, place) not in self:
                alike = next((kind for (other, _, at), kind in self.items() if (other, at) == (form, place)), None)
                said = front.described(names_of(call), call.leaves)
                watches = (kind.watch for (other, *_), kind in self.items() if other == form)  # of all places
                new = CallKind(said, next(watches, None) or Watch(front.name, said), form, loose)
                self[form, made, place] = new if alike is None else alike.under_another_budget()
        found = self[form, made, place]
        if not found.known:
            others = (kind for at, kind in self.items() if at[:2] == (form, made) and kind.known)
            if (other := next(others, None)) is not None:
                found.take_from(other)
        return found

    def learn(self, kind: CallKind, known: Known) -> None:
        """A call of ``kind`` was seen to compute as ``known``: those that do so with other numbers are of one kind."""
        alike = (k for k in self.values() if k.loose == kind.loose and k.form != kind.form)
        if any(k.computes(known) for k in alike):
            self._alike.setdefault(kind.loose, kind.form)
