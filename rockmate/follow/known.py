"""What is known of the steps of a followed model, by kinds of calls and by the ways in which these compute."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from rkgb.probe.contexts import next_number
from rkgb.sample import Call
from rockmate.calls.front import Front
from rockmate.calls.keys import call_key
from rockmate.follow.checkpoints import Parts
from rockmate.follow.observed import Observed, Seen
from rockmate.follow.plan import FollowedPlan, Found, eager_peak_of
from rockmate.follow.planned import FollowedProgram, Planned
from rockmate.follow.problem import FollowedProblem
from rockmate.follow.record import Use
from rockmate.follow.tape import Tape
from rockmate.follow.watch import Watch
from rockmate.memory import StepBytes, step_of
from rockmate.planning.ways import Asked, Waits
from rockmate.tell import names_of
from solvers import Frontier, Schedule, walk

MOST_SCHEDULES = 8
"""Schedules that are tried for other sizes of a way."""


@dataclass(eq=False)
class Known:
    """What was observed of one way, ``number``, in which a kind of call computes, which is the ``call`` in a few words.

    ``missing``: parameters whose gradients the step made. ``budget``: of ``plan``, in bytes. ``least``: the schedule of
    the least budget that was stated. ``alike``: schedules that it had at other sizes. ``carried``: its schedule is that
    of another size, which has had so many ``uses``. ``problem``: why no plan fits, and the least that does.
    ``rehearsed``: the step was a synthetic one, with room for a loss. ``used``: the ways in which outputs were used
    that ``found`` is for. ``waits``: what the step holds while its other calls run. ``then``: the way that came after
    it. ``frontier``: once it was asked for, as a second search may end elsewhere at its time limit.
    """

    number: int
    call: tuple[str, ...]
    found: FollowedProblem
    seen: Seen
    missing: frozenset[str]
    seconds: float
    rehearsed: bool
    device: torch.device
    budget: int = -1
    plan: FollowedPlan | None = None
    program: FollowedProgram | None = None
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

    @cached_property
    def eager_peak(self) -> int:
        return eager_peak_of(self.found.problem)

    @property
    def places(self) -> tuple[str, ...]:
        """The user's source line of each node of ``found.problem``."""
        return tuple(self.seen.places[ops[-1]] if ops else "" for ops in self.found.ops_of)

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

    def fastest(self, schedules: Iterable[Schedule | None], budget: int) -> Found | None:
        """The fastest of these ``schedules`` that fits ``budget``."""
        found = [Found(s, walk(self.found.problem, s), 0) for s in dict.fromkeys(schedules) if s is not None]
        return min((f for f in found if f.walk.peak <= budget), key=lambda f: f.walk.time, default=None)

    def made(self, sizes: dict[str, int]) -> int:
        """Bytes of gradients that the step makes, of parameters of such ``sizes``."""
        return sum(sizes[name] for name in self.missing & sizes.keys())

    def step_bytes(self, plan: FollowedPlan, sizes: dict[str, int]) -> StepBytes:
        return step_of(plan.problem, plan.schedule, plan.predicted_peak, self.made(sizes))


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
            known = next((k for k in self.known if k.program is policy.program), None)
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
