"""The calls of a model that are followed, since TorchDynamo captures no one graph of them that can be planned.

A call of a new kind is observed: what it keeps is decided as it takes place, within the budget as far as the sizes of
results tell. When its backward is over, the step is planned as a whole, breaks of the graph or not. Later calls of the
kind follow the plan as long as they compute the same; where one leaves it, the rest of that call is decided as it takes
place, and what it computes is planned when it comes again.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from rkgb.device.kind import Moment
from rkgb.sample import Call
from rkgb.trees import tensors_of
from rkgb.warn import warn_once
from rockmate.budget import Budget, show_bytes
from rockmate.calls.front import ANOTHER_BUDGET, Front
from rockmate.calls.look import Look
from rockmate.calls.reasons import LOOPS
from rockmate.calls.surroundings import INSTEAD, warn_unplanned
from rockmate.calls.whole_steps import FIRST, Turn
from rockmate.errors import BudgetWarning, InfeasibleBudgetError, InputError
from rockmate.follow.advice import ALONE, FEWER, KEEP, MOST_USES, PAD
from rockmate.follow.checkpoints import Unchecked
from rockmate.follow.following import following, lasting_of
from rockmate.follow.known import CallKind, CallKinds, Known, UseOfOutputs
from rockmate.follow.observed import Mark, Observed, pack_of, place_of_caller
from rockmate.follow.online import Online
from rockmate.follow.plan import FollowedPlan
from rockmate.follow.planned import Planned
from rockmate.follow.policy import Policy
from rockmate.follow.problem import problem_of
from rockmate.follow.record import Slot, form_of_op
from rockmate.follow.reruns import Reruns
from rockmate.follow.solving import FollowedWays, Solving
from rockmate.follow.tape import Tape
from rockmate.memory import StepBytes
from rockmate.planning.report import line_of_call
from rockmate.planning.ways import Ways
from rockmate.tell import MANY, costly, shapes_of
from solvers import Frontier
from solvers.calls import Way

MOST_KNOWN = 16
"""Ways in which one kind of call computes that are remembered."""

MOST_ALONE = 4
"""Kinds of calls with operations of their own that are planned at once; others when they have come often."""

KEPT = 4
"""Part of what the data of a step may take that is held at least where such steps get no plan for long."""


class Followed:
    """See the file's text. ``last``: of the last call."""

    def __init__(self, front: Front, why: str) -> None:
        """``why`` the calls are no one graph that can be planned."""
        self.front, self.kinds = front, CallKinds()
        self.last: Known | None = None
        self.solving = Solving(front, why, self.kinds)
        self._made, self._before = 0, tuple[str, ...]()  # plans that were told of, and the call of the last one
        self._said: set[str] = set()
        self._alone = MOST_ALONE * (LOOPS in why)  # kinds of calls whose operations no kind before had
        self._left = False  # the last call computed what no plan is known for
        self._shared: FollowedPlan | None = None  # of the last call, for its share of the step's budget
        self._unsaid: Known | None = None  # no plan fits a step that was observed

    @property
    def plan(self) -> FollowedPlan | None:
        """Of the last call; None if none fits, or there is none yet."""
        if self._left or self.last is None or self.last.problem is not None:
            return None
        return self._shared or self.last.plan

    def step_bytes(self) -> list[StepBytes]:
        """Of a step of the last plan; where the last call has none, of each plan."""
        if (plan := self.plan) is not None and self.last is not None:
            return [self.last.step_bytes(plan)]
        return [k.step_bytes(k.plan) for kind in self.kinds.values() for k in kind.known if k.plan]

    @property
    def plans(self) -> list[tuple[tuple[str, ...], FollowedPlan]]:
        """Each kind of call with its plans."""
        return [(kind.call, known.plan) for kind in self.kinds.values() for known in kind.known if known.plan]

    # ------------------------------------------------------------------------- calls

    def run(self, model: torch.nn.Module, call: Call) -> Any:
        """What the model returns; its own Python runs."""
        missing = self.front.bytes_of_missing_gradients()
        kind = self.kinds.of(call, model.training, self.front)
        device = self.front.device(call.tensors)
        policy, turn = self._policy(kind, missing, device)
        tape = Tape(device, policy, lasting_of(model, call))
        turn.followed_on(tape)
        unchecked, look = Unchecked(kind.parts, model, tape), None
        if isinstance(policy, Observed) and (look := policy.look) is not None:
            look.then = partial(self._learn, kind, turn, policy, tape.reruns)
        with self.front.terms.steps.forward_of(turn, look), following(tape, self.front.modes), unchecked:
            result = model._call_impl(*call.args, **call.kwargs)
        if look is not None:
            look.arrives = sum(t.nbytes for t in tensors_of(result) if t.grad_fn is not None)
        tape.begins = partial(self._begins, turn, look, kind, UseOfOutputs(tape))
        turn.held_by(tape)
        if unchecked.stay or unchecked.found:
            self.front.say_checkpoints(unchecked.stay)
        if unchecked.found:  # the next step runs without, and is the one to plan
            kind.news = True
            if look is not None:
                look.then = None
                kind.watch.saw()
        if turn.ways.rough:
            kept = tape.ledger.live  # what is held, and the results
            rough = Ways(self.front, tape.device, kind.call, Way(kept, kept, kept, 0), turn.ways.made)
            self.front.terms.steps.seen(turn, turn.key[0], rough)
        return result

    @staticmethod
    def _begins(turn: Turn, look: Look | None, kind: CallKind, use: UseOfOutputs, tape: Tape) -> None:
        turn.begin(look)
        kind.note_use(tape, use.now(tape))

    def _policy(self, kind: CallKind, missing: dict[str, int], device: torch.device) -> tuple[Policy, Turn]:
        """What decides in a call that begins now, and its turn in the step. ``missing``: bytes of the gradients of
        parameters that are not there.

        Raises ``InfeasibleBudgetError`` where no plan fits.
        """
        known = kind.next(frozenset(missing))
        policy: Policy
        self._shared, self._left = None, (late := self._comes_late(kind))
        if self._unsaid is not None:  # whatever comes next: a kind of call may come once only
            unsaid, self._unsaid = self._unsaid, None
            self._solve(unsaid)
        number = 0 if known is None else known.number
        took = partial(self.front.terms.steps.take, (id(kind), number), news=kind.is_new)
        if known is None:
            turn = took(ways=Ways(self.front, device, kind.call, Way(0, 0, 0, 0), sum(missing.values())))
            like = None if late else self._like(kind)
            if like is not None and (program := like.ran or like.program) is not None:
                policy = Planned(program, partial(self._otherwise, kind, like, turn), exactly=False)
            else:
                policy = self._online(kind, turn)
        else:
            known.uses += known.carried
            if known.carried and known.uses == MOST_USES:  # it comes often enough to be worth a plan of its own
                known.carried, known.budget = False, -1
            self._solve(known)
            kind.came(known)
            self.last = known
            turn = took(ways=self._ways(known))
            self._shared, known.ran = known.ways.placed(turn.way)
            policy = Planned(known.ran, partial(self._otherwise, kind, known, turn), among=len(kind.known))
        seen = known is not None and not known.rehearsed and not kind.news
        look = None if seen or late else kind.watch.look(device, bool(kind.known))
        return policy if look is None else Observed(look, policy, missing), turn

    def _ways(self, known: Known) -> FollowedWays:
        """In which ways a call that computes as ``known`` can share the budget of its step."""
        if known.ways is None or known.ways.plan is not known.plan:
            known.ways = FollowedWays(known, self.front, self.front.terms.options)
        ways: FollowedWays = known.ways
        return ways

    def _comes_late(self, kind: CallKind) -> bool:
        """Whether a call that begins now is of a kind that is not worth a plan yet, since kinds have little in common:
        to observe and to plan a step takes longer than many steps. One is observed, which tells what backwards take.
        """
        observed = sum(bool(other.known) for other in self.kinds.values())
        apart = observed > 0 and self._alone >= MOST_ALONE and 2 * self._alone > observed
        if kind.known or self.front.rehearses or not apart:
            return False
        kind.unplanned += 1
        if kind.unplanned >= MOST_USES:
            return False
        warn_once(f"{self.front.name}: {ALONE}", BudgetWarning)
        return True

    def _like(self, kind: CallKind) -> Known | None:
        """What was seen of calls of other sizes, of which the plan takes least memory for what it is of."""
        if kind.known or kind.watch.looks:
            return None
        found = [known for other in self.kinds.values() for known in other.known if known.plan and not known.problem]
        return min(found, key=lambda k: k.plan.predicted_peak / max(1, k.eager_peak) if k.plan else 1.0, default=None)

    def _online(self, kind: CallKind, turn: Turn, left: bool = False) -> Online:
        """What decides in the call of ``turn``, which has no plan. ``left``: see ``Online``."""
        terms = self.front.terms
        budget = terms.bytes_known(turn.ways.device)
        if budget is None:
            assert isinstance(terms.budget, Budget) and terms.budget.share is not None
            return Online(None, FIRST * float(terms.budget.share), left)
        limit = int(FIRST * max(0, budget - sum(self.front.bytes_of_missing_gradients().values())))
        known = kind.known or [k for other in self.kinds.values() for k in other.known if kind.unplanned]
        if known:  # of others, if it is not worth a plan yet
            below = max(budget - max(k.backward_peak for k in known), budget // 8)
            limit = below if kind.known else min(limit, below)
        kept = limit // KEPT if kind.unplanned else 0
        return Online(limit, left=left, kept=kept, turns=terms.steps.turns, own=turn)

    def _otherwise(self, kind: CallKind, known: Known, turn: Turn, tape: Tape, index: int, slot: Slot | None) -> Policy:
        """The call of ``turn`` computes something else than ``known`` from operation ``index`` on, or saves something
        else.
        """
        assert known.program is not None
        turn.ways = Ways(self.front, tape.device, kind.call, turn.way, turn.ways.made)  # unless another takes over
        turn.key = (id(kind), kind.numbered), turn.key[1]
        forms = [*known.seen.forms[:index], *(form_of_op(op) for op in tape.ops[index : index + 1])]
        packs = known.seen.packs[: tape.slots if slot is None else slot.number]
        packs += [] if slot is None else [pack_of(tape, slot)]
        over = len(tape.ops) <= index and slot is None
        for other in () if over and not self.front.terms.steps.are_planned else kind.known:
            if other is known or other.program is None:
                continue
            ends = (None, None) if over else (len(forms), len(packs))
            same = other.seen.forms[: ends[0]] == forms and other.seen.packs[: ends[1]] == packs
            if same and not any(other.program.exceeds(tape, k) for k in range(len(forms))):
                kind.came(other)
                kind.news |= other.rehearsed
                self.solving.solve(other)  # the budget may be another one by now
                self._unsaid = None if other.problem is None else other
                way = self.front.terms.steps.way_seen(turn, (id(kind), other.number), self._ways(other))
                self.last, (self._shared, program) = other, other.ways.placed(way)
                planned = Planned(program, partial(self._otherwise, kind, other, turn), among=len(kind.known))
                if planned.take_over(tape):
                    return planned
                warn_unplanned(INSTEAD)
                return self._online(kind, turn, left=True)
        kind.news = len(kind.known) < MOST_KNOWN
        self._left = True
        self._say(
            f"from {place_of_caller() or 'some operation'} on, forward computes something else than was planned for. "
            "The rest of such a step is decided as it takes place, within the budget as far as sizes tell, until one "
            "was observed"
        )
        return self._online(kind, turn, left=True)

    # ------------------------------------------------------------------------- plans

    def _learn(self, kind: CallKind, turn: Turn, observed: Observed, reruns: Reruns, moments: list[Moment]) -> None:
        """A step was observed: plan such steps."""
        kind.watch.saw()
        seen, missing = observed.seen, frozenset(observed.missing)
        if len(moments) != len(seen.marks) + 1 or not seen.sizes:
            return
        seen.marks.append(Mark("over", 0, reruns.ledger.live, time.perf_counter_ns()))
        for mark, moment in zip(seen.marks, moments, strict=True):
            mark.moment = moment
        began = time.perf_counter()
        found = problem_of(reruns.ops, reruns.data, seen)
        same, others = kind.known_of(seen, missing)
        number = same[0].number if same else kind.numbered
        kind.numbered = max(kind.numbered, number + 1)
        came = [k for k in same if k.used and not k.rehearsed]  # in a step, at this place
        if any(k.covers(seen) for k in came):
            return observed.forget()
        before = next((k for k in came if k.seen.sizes == seen.sizes), None)
        if before is not None:
            found = found.with_worst_of(before.found)
        seconds = time.perf_counter() - began
        made, device = sum(observed.missing.values()), turn.ways.device
        known = Known(number, kind.call, found, seen, missing, made, seconds, self.front.rehearses, device)
        known.waits = observed.waits(reruns.data)
        known.used = {use for use in (seen.use,) if use is not None} | (before.used if before else set())
        known.inherit(same)
        rehearsed = next((k for k in kind.known if k.rehearsed), None)
        self._left = False
        wanted = not came or seen.use in kind.unsure
        kind.unsure -= known.used
        if not kind.known:
            others_of_kinds = (k for other in self.kinds.values() for k in other.known)
            self._alone += all(k.seen.forms != seen.forms for k in others_of_kinds)
        if wanted:  # else it is the other way that is to be seen, which may come next
            kind.news = self.front.rehearses or bool(kind.unsure)
        kind.known = [known, *others][:MOST_KNOWN]
        self.kinds.learn(kind, known)
        observed.forget()
        if rehearsed is not None and not self.front.rehearses:
            self.solving.settle_anew(rehearsed)
        self.solving.solve(known)
        self.last, self._shared = known, None
        self._unsaid = None if known.problem is None else known
        if known.problem is None:  # what the step takes with such plans is known when it is over
            self.front.terms.steps.learned(turn, (id(kind), number), self._ways(known))
        if known.plan is not None and known.problem is None and not known.carried and not self.front.rehearses:
            self._say_plan(known.plan, max(moment.peak for moment in moments))

    def _say_plan(self, plan: FollowedPlan, took: int) -> None:
        """Say that ``plan`` was made of a step that ``took`` so many bytes."""
        self._made += 1
        other_shapes, self._before = shapes_of(self._before) != shapes_of(plan.call), plan.call
        self._say(
            f"planned a followed step for {line_of_call(plan.call)} in {sum(plan.setup_seconds.values()):.1f} s: "
            f"predicted peak {show_bytes(plan.predicted_peak)}, budget {show_bytes(plan.budget)}, "
            f"{100 * plan.predicted_overhead:.1f} % more time{costly(plan.predicted_overhead)}"
            + (f"; the step that was observed took {show_bytes(took)}" if took > plan.budget else "")
            + (f". This is plan {self._made}: {FEWER}. {PAD if other_shapes else KEEP}" if self._made >= MANY else "")
        )

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.front.log.info("%s: %s", self.front.name, line)

    def _solve(self, known: Known) -> None:
        """Plan ``known``. Raises ``InfeasibleBudgetError`` where no plan fits, unless it may be that more calls share a
        step of which the budget is a share.
        """
        before, began = known.plan, time.perf_counter()
        self.solving.solve(known)
        if known.problem is not None and not self.front.terms.supposes_one_call:
            raise InfeasibleBudgetError(*known.problem)
        if before is not None and known.plan is not None and known.plan is not before:
            why = ANOTHER_BUDGET if known.plan.budget != before.budget else "such calls, which came often"
            self.front.tell_anew(known.plan, time.perf_counter() - began, why)

    def set_budget(self, budget: Budget) -> None:
        """Plan for another budget. Raises ``InfeasibleBudgetError`` where no plan of the last kind of step fits it."""
        terms = self.front.terms
        before = terms.budget, terms.settled
        terms.budget, self._shared = budget, None
        if self.last is None:
            return
        try:
            self._solve(self.last)
        except InfeasibleBudgetError:
            terms.budget, terms.settled = before
            self.solving.solve(self.last)
            raise

    def frontier(self) -> Frontier:
        """Time against memory for the last kind of call."""
        if self.last is None:
            raise InputError("no step was planned yet: run a forward and its backward before you ask for the frontier")
        return self.solving.frontier(self.last)
