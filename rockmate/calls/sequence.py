"""The graphs of one step, in the order in which they run, and the schedule of each."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rockmate.calls.member import Member
from rockmate.calls.shared import SharedStages
from rockmate.planning.step import StepPlan
from solvers.sequence import Choice, Stage, choose, fastest, least_budget, peak_of, together

_NOTHING = Choice(0, 0, 0, 0)


@dataclass(eq=False)
class GraphSequence:
    """The graphs of one step.

    ``stages`` have the choices ``options[i]`` of member i, of which ``chosen[i]`` is run. ``small``: how many graphs
    run as they are. ``roots``: outputs of each member that get gradients from outside of it; ``unread``: those, by
    their data, that were let go before its backward. ``seen``: the stages as they were in each step that was observed.
    ``varies``: graphs ran at other sizes than those of ``members``, the largest that came, so a step of all these
    members may never come. ``peak``: the most bytes that the last observed step took. ``shared``: what other ranks have
    seen, if there are any. ``gaps``: how many nodes code before a member, or behind the last, added to autograd's
    graph. ``unsure``: a step differed from those that were observed, so all outputs are counted, and their gradients;
    ``odd``: how often that was so. ``doubtful``: the step of ``seen`` captured, and may have kept more by that.
    ``missing``: parameters whose gradients these steps made. ``problem``: why no plan fits, and what would, in bytes.
    """

    members: tuple[Member, ...]
    stages: tuple[Stage, ...]
    options: tuple[tuple[int, ...], ...]
    chosen: tuple[int, ...]
    budget: int
    small: int
    roots: tuple[frozenset[int], ...]
    unread: tuple[frozenset[int], ...]
    seen: list[tuple[Stage, ...]]
    varies: bool = False
    peak: int = 0
    shared: SharedStages | None = None
    gaps: set[tuple[int, int]] = field(default_factory=set)
    unsure: bool = False
    odd: int = 0
    doubtful: bool = False
    missing: frozenset[str] = frozenset()
    problem: tuple[str, int] | None = None

    def place(self, member: Member, start: int) -> int | None:
        """Where ``member`` comes next."""
        return next((k for k in range(start, len(self.members)) if self.members[k] is member.base), None)

    def choose(self, budget: int, done: dict[int, int] | None = None, at: int = 0) -> tuple[int, ...]:
        """A choice for each member; before place ``at``, members of ``done`` have made theirs and others are left out.

        Raises ``InfeasibleError``.
        """
        stages, options = list(self._counted), list(self.options)
        for k in range(at):
            made = (done or {}).get(k)
            one = _NOTHING if made is None else self._choice(stages[k], k, made)
            options[k] = () if made is None else (made,)
            stages[k] = replace(stages[k], choices=(one,))
        found = choose(stages, budget)
        return tuple(of[k] if of else -1 for of, k in zip(options, found, strict=True))

    def least_asked_for(self, budget: int) -> int:
        """The smallest budget, from ``budget`` bytes on, that suffices a model that is attached with it: graphs that
        are small beside it run as they are then.
        """
        while True:
            stages = [
                replace(stage, choices=(stage.choices[k],)) if member.small_from <= budget else stage
                for stage, member, k in zip(self._counted, self.members, fastest(self._counted), strict=True)
            ]
            before, budget = budget, least_budget(stages, budget)
            if budget == before:
                return budget

    @property
    def leaves_roots_out(self) -> bool:
        """Whether the plan counts on outputs that get no gradient from outside of their graph."""
        return any(of < set(m.planner.graphs.K.usage.roots) for m, of in zip(self.members, self.roots, strict=True))

    @property
    def _counted(self) -> tuple[Stage, ...]:
        return self.whole_stages if self.unsure else self.stages

    @property
    def whole_stages(self) -> tuple[Stage, ...]:
        """The stages as if the step held all outputs and gave each a gradient."""
        parts = zip(self.stages, self.members, self.options, strict=True)
        return tuple(replace(stage, choices=tuple(m.choices[k] for k in of)) for stage, m, of in parts)

    def _choice(self, stage: Stage, k: int, made: int) -> Choice:
        """What choice ``made`` of member k, whose ``stage`` this is, is to the step; one that it has not: to any."""
        known = dict(zip(self.options[k], stage.choices, strict=True))
        return known.get(made, self.members[k].choices[made])

    @property
    def eager_peak(self) -> int:
        """Bytes of a step in which nothing runs again."""
        return peak_of(self.stages, fastest(self.stages))

    def kept(self, done: dict[int, int]) -> int:
        """Bytes that a step keeps from its forward to its backward, of which members of ``done`` have made choices."""
        stages, last = self._counted, self.stages[-1]
        between = max(0, min(last.after, last.beside))
        return between + sum(self._choice(stages[k], k, made).kept for k, made in done.items())

    @property
    def predicted_peak(self) -> int:
        """Bytes of a step in which each member runs what is chosen for it."""
        return peak_of(self.stages, tuple(of.index(k) for of, k in zip(self.options, self.chosen, strict=True)))

    @property
    def plan(self) -> StepPlan:
        """The plan of such steps."""
        return StepPlan(
            self.budget,
            tuple(", ".join(m.call) for m in self.members),
            tuple(m.plan(k, self.budget, of) for m, k, of in zip(self.members, self.chosen, self.roots, strict=True)),
            self.stages,
            tuple(of.index(k) for of, k in zip(self.options, self.chosen, strict=True)),
            self.small,
        )


def bounds_of(seen: list[tuple[Stage, ...]], varies: bool) -> tuple[Stage, ...]:
    """Stages with the most that the code between graphs took in some steps; where sizes vary from step to step, with as
    much more as these steps differ. Else they differ by the choices that ran.
    """
    return together(seen, lambda values: (1 + varies) * max(values) - varies * min(values))
