"""Steps whose forward is several captured graphs, with other code between them, under one budget.

The first step of a sequence of graphs plans each of them and runs it with its least memory. The next one is observed:
what the code between the graphs, the loss and the gradients take at each moment. From then on every graph runs the
schedule that ``solvers.sequence.choose`` gives it. A step that leaves out some of the graphs runs under the same plan.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rkgb.cost.memory import is_measuring
from rkgb.device.kind import Moment
from rkgb.sample import Call
from rkgb.trace.guards import GuardFailed
from rkgb.warn import warn
from rockmate.budget import Budget, show_at_least, show_at_most, show_bytes
from rockmate.calls.front import Front
from rockmate.calls.look import InGraph, StepLook, end_look
from rockmate.calls.member import Graph, Member
from rockmate.calls.members import Members
from rockmate.calls.past import PastStep
from rockmate.calls.released import Gradient, Outputs, Spared, bytes_that_came
from rockmate.calls.seen import SeenStep
from rockmate.calls.sequence import GraphSequence, bounds_of
from rockmate.calls.shared import SharedStages
from rockmate.calls.surroundings import RETAINED, graph_is_retained, warn_unplanned
from rockmate.calls.terms import least_instead
from rockmate.calls.unguarded import CAPTURING
from rockmate.errors import BudgetWarning, InfeasibleBudgetError
from rockmate.planning.least import saves_nothing
from rockmate.planning.places import places_of
from rockmate.planning.step import StepPlan, graphs_of
from rockmate.run.backward import Backward
from rockmate.run.executor import CallState
from rockmate.tell import LOG
from solvers import Frontier, InfeasibleError
from solvers.sequence import choose, fastest, least_budget, overhead_of

MOST_LOOKS, MOST_REPEATED = 16, 64
"""Steps of a model that are observed, and those of them that were known: one whose steps are never alike, or rarely of
a new kind, is not slowed down for ever."""

MOST_UNSEEN = 3
"""Steps that may end unobserved before that is said."""

SEEN = 4
"""Steps of one sequence that are observed, where sizes follow from values, so that no step is like another."""

MOST_SEQUENCES = 16
"""Sequences of graphs that are remembered."""


class Steps:
    """The steps of one model. ``known``: sequences of graphs, the longest first.
    ``composites``: classes of torch's modules in the model that have submodules. ``why`` a forward is not one graph.
    """

    def __init__(self, front: Front, composites: list[type], why: str) -> None:
        self.front, self.members, self.composites, self.why = front, Members(front), composites, why
        self.known: list[GraphSequence] = []
        self.last: GraphSequence | None = None
        self.news = True  # steps of a new sequence are to be observed
        self.again = False  # so are more of one whose sizes vary
        self.looks = self.repeated = 0  # observed steps: of new sequences, and of known ones that came in their place
        self.past: PastStep | None = None
        self.unseen = 0  # steps since that could not be observed to their end
        self.unseen_why: dict[str, None] = {}
        self.look: StepLook | None = None  # the last one
        self.idle = 0  # the last forwards, which ran no graph
        self.asked: Budget | None = None
        self.rehearsed = False  # what is known was seen in steps that were no training
        self.said: set[str] = set()
        self.said_least: set[tuple[tuple[Member, ...], int]] = set()  # budgets that no plan of such steps fits

    def forward(self) -> Forward:
        """A forward begins."""
        past, self.past = self.past, None
        if past is not None and past.over() and past.sequence is not None:
            self.turn(past.sequence, unsure=not past.observed)
        for sequence in self.known:
            if sequence.shared is not None and sequence.shared.is_new():
                sequence.stages = sequence.shared.stages
                self.solve(sequence)
        look = None
        end_look()
        looks = (self.news or self.again) and self.looks < MOST_LOOKS and self.repeated < MOST_REPEATED
        every = self.members.every if looks else []
        if every and threading.current_thread() is not threading.main_thread():
            self.say(_ELSEWHERE)
        elif every and StepLook.possible() and not is_measuring():
            self._count_unseen()
            self.look = look = StepLook(every[0].planner.device, lambda moments: None)
        return Forward(self, look)

    @property
    def captures_nothing(self) -> bool:
        """Whether graphs that were captured run no more: TorchDynamo gives a function up when it fails for one of the
        modules that call it. Where steps are known, their graphs were only left out.
        """
        return self.idle >= MOST_UNSEEN and not self.known

    def _count_unseen(self) -> None:
        """Another step is to be observed: say where those before could not be."""
        if self.look is not None and self.look.why_not:
            self.unseen_why[self.look.why_not] = None
        if self.unseen == MOST_UNSEEN and not self.known:
            warn(
                f"{self.front.name} has no plan: {MOST_UNSEEN} steps could not be observed from their forward to the "
                f"end of one backward ({'; '.join(self.unseen_why)}). Each graph runs with its least memory, and the "
                "budget does not hold",
                BudgetWarning,
            )
        self.unseen += 1

    def warn_of_measuring(self) -> None:
        """Say, once, that a step is to be observed, and is not."""
        self.warn_once(
            _MEASURED,
            f"{self.front.name}: the graphs of a step were not planned together yet. For a plan, it is to be "
            "observed, but its memory is measured: it runs with least memory, and may exceed the budget. Run it "
            "twice before you measure it",
        )

    def turn(self, sequence: GraphSequence, unsure: bool) -> None:
        """A step was none of those that were observed, or, not ``unsure``, such a step was observed by now."""
        self.again = self.again or unsure
        if sequence.unsure != unsure:
            sequence.unsure = unsure
            sequence.odd += unsure
            self.solve(sequence)

    def learn(self, forward: Forward, moments: list[Moment]) -> None:
        """A step was observed: plan such steps."""
        self.unseen, self.unseen_why, self.look = 0, {}, None
        assert forward.seen is not None
        found = forward.seen.shows(forward.ran, forward.reached, moments)
        if found is None:
            self.looks += 1
            return
        members, stages, options = found
        before = next((s for s in self.known if s.members == members and s.options == options), None)
        seen = [*(before.seen if before is not None and not before.doubtful else ()), stages]
        new = before is None or not forward.missing <= before.missing
        if before is None or new or (self.again and not before.unsure):
            self.looks += 1
        else:
            self.repeated += 1
        if new:
            self.news = False
        unsure = before is not None and before.unsure
        self.again = unsure or forward.captured or (forward.varies and len(seen) < SEEN)
        stages = bounds_of(seen, forward.varies)
        every = tuple(of[k] for of, k in zip(options, fastest(stages), strict=True))
        varies, peak = forward.sizes_differ or (before is not None and before.varies), forward.seen.peak(moments)
        roots = tuple(outputs.roots for outputs in forward.seen.outputs)
        unread = forward.seen.unread
        if before is not None:
            roots = tuple(a | b for a, b in zip(roots, before.roots, strict=True))
            unread = tuple(a & b for a, b in zip(unread, before.unread, strict=True))
        sequence = GraphSequence(members, stages, options, every, 0, forward.small, roots, unread, seen, varies, peak)
        if before is not None:
            sequence.gaps, sequence.unsure, sequence.odd = before.gaps, unsure, before.odd
        sequence.doubtful = forward.captured
        sequence.missing = frozenset(forward.missing) if before is None or new else before.missing
        if forward.past is self.past and self.past is not None:
            self.past.new = before is None or unread != before.unread
            self.past.sequence, self.past.observed = sequence, True
            self.past.gaps = [(i, gap) for i, (_, gap) in enumerate(self.past.gaps)]
        if (places := places_of(None)) is not None:
            shared = before.shared if before is not None else None
            sequence.shared = shared or SharedStages.of(places, sequence.whole_stages, options)
            sequence.shared.add(stages)
            sequence.stages = sequence.shared.stages
        if self.front.rehearses:
            self.rehearsed = self.again = sequence.doubtful = True
        elif self.rehearsed:
            self.rehearsed, self.front.terms.budget = False, self.asked or self.front.terms.budget
        self.solve(sequence)
        others = [s for s in self.known if s is not before]
        self.known = sorted([sequence, *others], key=lambda s: -len(s.members))[:MOST_SEQUENCES]
        self.last = sequence
        if sequence.problem is None:
            self.say(_said(sequence.plan))

    def say(self, line: str) -> None:
        """Write a line of the logger, unless it was written before."""
        if line not in self.said:
            self.said.add(line)
            LOG.info("%s: %s", self.front.name, line)

    def warn_once(self, what: str, message: str) -> None:
        """Warn of ``what``, unless this was done before."""
        if what not in self.said:
            self.said.add(what)
            warn(message, BudgetWarning)

    def solve(self, sequence: GraphSequence) -> None:
        """Choose for the budget of now."""
        terms = self.front.terms
        settled = _Settled(sequence.eager_peak, sequence.members[0].planner.device)
        if isinstance(terms.budget, Budget):
            self.asked, terms.budget = terms.budget, terms.budget.bytes(settled)
        elif self.asked is not None and self.asked.share is not None:
            terms.budget = max(terms.budget, self.asked.bytes(settled))  # a share is of the largest step so far
        sequence.budget, sequence.problem = terms.budget, None
        try:
            sequence.chosen = sequence.choose(terms.budget)
        except InfeasibleError as error:
            sequence.chosen, least = sequence.choose(error.min_budget), sequence.least_asked_for(error.min_budget)
            if sequence.unsure:
                return
            if sequence.varies and sequence.peak <= terms.budget:
                self.warn_of_sizes(least, terms.budget)
                return
            eager = show_at_least(sequence.eager_peak)
            message = (
                f"no plan fits a budget of {show_at_most(terms.budget)}: the forward of {self.front.name} is "
                f"{graphs_of(len(sequence.members))} ({self.why.rstrip('.')}), for which the smallest that can be "
                f"planned{_SO_FAR if sequence.varies else ''} is {show_at_least(least)}; without recomputation the "
                f"step takes {eager}. "
                f"{_NOTHING if saves_nothing(least, sequence.eager_peak) else ''}Raise the budget or make "
                "the batch smaller."
            )
            unsettled = self.known and self.asked is not None and self.asked.share is not None  # larger steps may come
            if not (terms.least or unsettled):
                sequence.problem = message, least
            elif (sequence.members, terms.budget) not in self.said_least:
                self.said_least.add((sequence.members, terms.budget))
                least_instead(InfeasibleBudgetError(message, least))

    def warn_of_sizes(self, least: int, budget: int) -> None:
        """Say, once, that a step of the largest sizes of all graphs would not fit."""
        self.warn_once(
            _SIZES,
            f"the graphs of {self.front.name} have other sizes in each step. If all were as large as they have "
            f"been at most, a step would take {show_at_least(least)}, more than the budget of "
            f"{show_at_most(budget)}. So each step runs with its least memory, and one of such sizes exceeds the "
            "budget",
        )

    def set_budget(self, budget: Budget) -> None:
        """Choose anew for ``budget``. Raises ``InfeasibleBudgetError`` where no plan of the last kind of step fits it,
        and nothing changes.
        """
        before = self.front.terms.budget, self.asked
        self._choose(budget)
        problem = None if self.last is None else self.last.problem
        if problem is not None:
            self._choose(before[0])
            self.asked = before[1]
            raise InfeasibleBudgetError(*problem)
        self.members.as_they_are.clear()  # a graph that is small beside one budget is not beside another

    def _choose(self, budget: Budget | int) -> None:
        self.front.terms.budget = budget
        for sequence in self.known:
            self.solve(sequence)

    def frontier(self) -> Frontier:
        """Time against memory for the last sequence of graphs."""
        assert self.last is not None
        stages = self.last.stages
        low, high = least_budget(stages), self.last.eager_peak
        budgets = [low + (high - low) * k // (_POINTS - 1) for k in range(_POINTS)]
        points = ((budget, overhead_of(stages, choose(stages, budget))) for budget in budgets)
        return Frontier(low, high, tuple(points))


_POINTS = 16

_NOTHING = (
    "Recomputation saves next to nothing here: nearly all of it is gradients of parameters, code between the graphs, "
    "and what one operation needs. "
)

_SO_FAR = " for the sizes that came so far"

_UNKNOWN = "a step ran graphs that were not planned together"

_MISSING = "a step makes gradients that were there when it was planned"

_SIZES = "a step of the largest sizes does not fit"

_MEASURED = "a step that is to be observed is measured"

_ELSEWHERE = (
    "steps in other threads than the main one cannot be observed: each graph of a step runs with its least memory. "
    "Train in the main thread for a plan of the whole step"
)


def _said(plan: StepPlan) -> str:
    return (
        f"planned a step of {len(plan.parts)} graph{'s' * (len(plan.parts) > 1)}: "
        f"predicted peak {show_bytes(plan.predicted_peak)}, budget {show_bytes(plan.budget)}, "
        f"{100 * plan.predicted_overhead:.1f} % more time"
    )


@dataclass(frozen=True)
class _Settled:
    """What a share of memory is of."""

    eager_peak: int
    device: torch.device


class Forward:
    """One forward pass, and its backward. Hooks in its graph own it.

    ``ran``: the members and their choices so far. ``living``: sequences that these are a part of, and the places of the
    members in them. ``chosen``: a choice for each member of the first, within ``room`` bytes. ``missing``: parameters
    whose gradients the backward makes. ``reached``: members, in the order in which the backward came to them, with the
    bytes of the gradients that came, and of those of them that others read, too. ``small``: graphs that ran as they
    are. ``backwards``: of each call that runs a plan; hooks in its graph own them, for longer than its slots own it.
    ``seen``: what is seen of the step, if it is observed. ``spared``: for each call, the sequence that it was planned
    in, and outputs that this counts as let go. ``past``: what is left of it when the next step begins.
    """

    def __init__(self, steps: Steps, look: StepLook | None) -> None:
        self.steps, self.look = steps, look
        self.seen = None if look is None else SeenStep(look)
        self.ran: list[tuple[Member, int]] = []
        self.living: list[tuple[GraphSequence, dict[int, int]]] = [(sequence, {}) for sequence in steps.known]
        self.chosen, self.room = (self.living[0][0].chosen, self.living[0][0].budget) if self.living else ((), 0)
        self.missing: set[str] = set()
        self.beyond: dict[str, int] | None = None  # missing gradients of the model, in bytes, where that is asked
        self.backwards: list[weakref.ref[Backward] | None] = []
        self.reached: dict[int, tuple[int, int]] = {}
        self.spared: list[tuple[GraphSequence, Spared] | None] = []
        self.past = PastStep()
        self.small = 0
        self.smaller = False  # whether a member of larger sizes ran
        self.captured = False  # whether something was captured
        self.in_graph = None if look is None else InGraph(look)  # until forward returns
        if look is not None:
            look.then, look.in_forward = partial(steps.learn, self), True
            self.mark("start", 0)  # levels are above this one

    def mark(self, what: str, i: int) -> None:
        """Note the memory of now."""
        if self.seen is not None:
            self.seen.mark(what, i)

    @property
    def varies(self) -> bool:
        """Whether graphs ran at other sizes than those that they are planned for."""
        return any(member.base is not member or member.free for member, _ in self.ran)

    @property
    def sizes_differ(self) -> bool:
        """Whether a graph ran at smaller sizes than those of the member that it is planned for."""
        return any(member.base is not member for member, _ in self.ran) or self.smaller

    # ------------------------------------------------------------------------- forward

    def choice(self, member: Member) -> int:
        """The choice of ``member``, whose call comes now: that of the sequence which fits the calls so far best.

        Raises ``InfeasibleBudgetError`` where no plan fits the only one.
        """
        before = self.living[0][0] if self.living else None
        self.living, more = sorted(self._with(member), key=_preferred), False
        while self.living:
            sequence, places = self.living[0]
            at, room = max(places), self._room(sequence)
            if sequence.problem is not None:  # where its graphs are as large as in that sequence
                if sequence.varies or (member.base is member and not self.smaller):
                    raise InfeasibleBudgetError(*sequence.problem)
                before = None
                del self.living[0]
                continue
            if sequence is before and room == self.room:
                return self.chosen[at]
            done = {place: self.ran[n][1] for place, n in places.items() if place != at}
            try:
                known = not done and at == 0 and room == sequence.budget
                self.chosen, self.room = sequence.chosen if known else sequence.choose(room, done, at), room
                return self.chosen[at]
            except InfeasibleError:
                more |= room < sequence.budget
                del self.living[0]
        self.steps.news = True
        if more:
            self.steps.warn_once(
                _MISSING,
                f"a step of {self.steps.front.name} makes gradients that the planned steps have found (zero_grad was "
                "called), and does not fit beside them: such steps are planned from the next one on, and this one may "
                "exceed the budget",
            )
        elif before is not None:
            self.steps.warn_once(
                _UNKNOWN,
                f"the forward of {self.steps.front.name} runs other graphs than those that were planned together: such "
                "steps are planned from the next one on, and this one may exceed the budget",
            )
        return member.least

    def _room(self, sequence: GraphSequence) -> int:
        """The budget, without gradients that this step makes and steps of ``sequence`` did not make."""
        if self.missing <= sequence.missing:
            return sequence.budget
        if self.beyond is None:
            self.beyond = self.steps.front.bytes_of_missing_gradients()
        return sequence.budget - sum(size for name, size in self.beyond.items() if name not in sequence.missing)

    def _with(self, member: Member) -> Iterator[tuple[GraphSequence, dict[int, int]]]:
        """The living sequences that ``member`` continues."""
        for sequence, places in self.living:
            place = sequence.place(member, max(places, default=-1) + 1)
            if place is not None:
                yield sequence, {**places, place: len(self.ran)}

    def member(self, graph: Graph, call: Call, arguments: tuple[Any, ...]) -> Member | None:
        """The member for such a call, made if there is none; None if the graph runs as it is."""
        members, (key, missing) = self.steps.members, graph.kind(call)
        self.missing.update(missing)
        member = members.find(key, missing)
        if member is None and key not in members.as_they_are:
            sizeless = graph.sizeless(call)
            member = members.larger(graph, call, sizeless, missing)
            self.smaller |= member is not None
            if member is None:
                small_from = members.small_from(graph, sizeless, arguments)
                if small_from <= members.rough_budget(arguments):
                    members.run_as_it_is(key)
                else:
                    self.mark("plan", len(self.ran))
                    member = members.make(graph, call, key, sizeless, small_from)
                    self.mark("planned", len(self.ran))
                    self.steps.news |= member is not None and member.base is member
        self.small += member is None
        return member

    def run(self, graph: Graph, call: Call, member: Member, inputs: Sequence[Any]) -> Any:
        """Run a graph; what it returns."""
        k, i = self.choice(member), len(self.ran)
        sequence, places = self.living[0] if self.living else (None, {})
        place = max(places, default=i)
        self.past.begin(place)
        self.ran.append((member, k))
        self.mark("begin", i)
        program = member.program(k)
        state = CallState(program, graph.module.values_of(program.s.d.sources, call.tensors, inputs))
        try:
            result = graph.returned(program.s.d.structure, state.forward())
        except GuardFailed as guard:
            return self._run_as_it_is(graph, call, inputs, guard)
        self.backwards.append(weakref.ref(state.backward))
        state.backward.arrived = partial(self.reach, i)  # before anything runs again
        self.follow(i, result)
        if self.seen is not None:
            self.seen.outputs.append(Outputs(member, state.store, result))
        if sequence is None or sequence.unsure:
            self.spared.append(None)
        else:
            self.spared.append((sequence, Spared(member.base, k, sequence.unread[place], state.store, result)))
        self.past.end()
        self.mark("end", i)
        return result

    def _run_as_it_is(self, graph: Graph, call: Call, inputs: Sequence[Any], guard: GuardFailed) -> Any:
        """The graph computes with a number that it reads from a tensor, and that is another now."""
        del self.ran[-1], self.past.gaps[-1]
        last = len(self.ran)
        self.living = [(sequence, {p: n for p, n in places.items() if n < last}) for sequence, places in self.living]
        if self.seen is not None:
            self.seen.marks = [mark for mark in self.seen.marks if mark != ("begin", len(self.ran))]
        self.small += 1
        self.steps.news = True  # this step cannot be observed: a mark is gone
        self.steps.members.run_as_it_is(graph.kind(call)[0])
        warn(
            f"a graph of {self.steps.front.name} depends on a number that its Python reads from a tensor ({guard}). It "
            "runs as it is from now on, and steps may exceed the budget. Compute with the tensor instead.",
            BudgetWarning,
        )
        return graph.tensors.forward(*inputs)

    def over(self) -> None:
        """Forward has returned."""
        self.captured, self.in_graph = CAPTURING.captured, None
        if self.look is not None:
            self.look.in_forward = False
        if self.living:
            self.steps.last = self.past.sequence = self.living[0][0]
        self.steps.past = self.past
        self.steps.idle = 0 if self.ran or self.small else self.steps.idle + 1
        if not self.ran:
            return
        if not self.living and is_measuring():
            self.steps.warn_of_measuring()
        front, kept = self.steps.front, self.kept
        if isinstance(front.terms.budget, int):
            front.check_alone(self.living[0][0].predicted_peak if self.living else kept)
        front.follow(self, kept)

    def follow(self, i: int, result: Any) -> None:
        """Be called when the backward comes to an output of member i."""
        functions = {t.grad_fn: None for t in result if isinstance(t, torch.Tensor) and t.grad_fn is not None}
        reach = partial(self.reach, i)
        hook = reach if self.in_graph is None else self.in_graph.hook(reach)
        for function in functions:
            function.register_prehook(hook)

    @property
    def kept(self) -> int:
        """Bytes that the graphs keep for the backward, and the code between them, where that is known."""
        if not self.living:
            return sum(member.base.choices[k].kept for member, k in self.ran)
        sequence, places = self.living[0]
        return sequence.kept({place: self.ran[n][1] for place, n in places.items()})

    # ------------------------------------------------------------------------ backward

    @property
    def waits(self) -> bool:
        """Whether no backward has come to it."""
        return not self.reached

    def reach(self, i: int, gradients: tuple[torch.Tensor | None, ...] = ()) -> None:
        """The backward comes to member i: what graphs behind it have read goes where their backwards are over."""
        if self.reached.get(i, _NONE_CAME) != _NONE_CAME:
            return
        if self.waits and graph_is_retained():
            self._warn_of_retained()
        first = i not in self.reached
        handed = self.seen.outputs[i].came.values() if self.seen is not None else ()
        self.reached[i] = bytes_that_came([Gradient.of(g) for g in gradients if g is not None], handed)
        if not first:
            return
        self.past.backward()
        for j in self.reached:
            ref = self.backwards[j]
            backward = ref() if ref is not None and j > i else None
            if backward is not None and not backward.retained and backward.store.spent:
                backward.store.clear()
                self.backwards[j] = None
        spared = self.spared[i]
        if spared is not None and not spared[1].let_go():
            self.steps.turn(spared[0], unsure=True)
        self.mark("reach", i)

    def _warn_of_retained(self) -> None:
        """Say, once for all graphs, that what they keep stays."""
        for ref in self.backwards:
            backward = ref() if ref is not None else None
            if backward is not None:
                backward.store.warned = True
        warn_unplanned(RETAINED)


_NONE_CAME = (0, 0)


def _preferred(found: tuple[GraphSequence, dict[int, int]]) -> tuple[bool, int, int]:
    """Sequences for which a plan fits, of these that of which fewest graphs were left out so far, the longest."""
    sequence, places = found
    return sequence.problem is not None, max(places) + 1 - len(places), -len(sequence.members)
