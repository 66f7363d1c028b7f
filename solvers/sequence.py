"""Several graphs of one step under one budget: which of its schedules each of them runs.

In the forward, graph 1, ..., graph n run one after the other, with other code between them; in the backward, graph n,
..., graph 1. Graph i runs one of its choices, x_i. With k, r, f, b, l and t of a choice (see ``Choice``) and K_i the
sum of k(x_j) over j < i,

    minimise    t(x_1) + ... + t(x_n)
    such that   before_i + K_i + f(x_i) <= budget          (forward)
                after_i + K_i + k(x_i) + r(x_i) <= budget  (after)
                beside_i + K_i + b(x_i) <= budget          (backward)
                later_i + K_i + l(x_i) <= budget           (later)
                rest_i + K_i <= budget                     (rest)

for every i. ``before_i``, ``after_i``, ``beside_i``, ``later_i`` and ``rest_i`` (see ``Stage``) do not depend on the
choices.

K_i is all that the rows of graph i know of the graphs before it, so of two partial solutions the one with less kept and
less time is as good as the other in every completion: dynamic programming over partial solutions that no other
dominates is exact. Where there are more than ``MOST`` of these, an even selection is
followed: the result is then feasible, and perhaps not the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from solvers.errors import InfeasibleError
from solvers.pareto import evenly, front
from solvers.text import format_bytes

MOST = 4000
"""Partial solutions that are followed."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What one schedule of a graph takes.

    Bytes above what is there without the graph: ``kept`` from the end of its forward to the beginning of its backward,
    ``forward`` and ``backward`` at most while these run. ``later``: at most after the first operation of the backward,
    which has read the gradients that came. ``released``: not among ``kept``, outputs that are there at the end of the
    forward, and that the step lets go before its backward begins, where the graph needs them no more; stages count
    them as long as they are there. ``time``: nanoseconds of both.
    """

    kept: int
    forward: int
    backward: int
    time: int
    later: int = 0
    released: int = 0

    def without(self, released: int, unread: int) -> Choice:
        """The same where the step lets outputs of so many bytes go, that the graph needs no more: ``released`` before
        the backward of the step, ``unread`` (these among it) before that of the graph.
        """
        backward, later = self.backward - unread, self.later - unread
        return Choice(self.kept - released, self.forward, backward, self.time, later, released)


@dataclass(frozen=True, slots=True)
class Stage:
    """One graph of the sequence, and bytes beside what graphs keep.

    ``before``: when its forward begins. ``after``: the most from the end of its forward to the next graph's; of the
    last graph, to the beginning of the backward. ``beside``: when its backward begins. ``later``: the same, and the
    gradients that came where others read them, too. ``rest``: the most from the end of its backward to the beginning of
    the backward of the graph before it, or to the end of the step. They may be negative, where less is there than the
    choices count.
    """

    choices: tuple[Choice, ...]
    before: int = 0
    after: int = 0
    beside: int = 0
    later: int = 0
    rest: int = 0

    def backward(self, choice: Choice) -> int:
        """Bytes at the worst moment of this graph's backward, above what the graphs before it keep."""
        return max(self.beside + choice.backward, self.later + choice.later)

    def highest(self, choice: Choice) -> int:
        """Bytes at the worst moment of this graph, above what the graphs before it keep."""
        after = self.after + choice.kept + choice.released
        return max(self.before + choice.forward, after, self.backward(choice), self.rest)


def together(seen: Sequence[Sequence[Stage]], of: Callable[[list[int]], int]) -> tuple[Stage, ...]:
    """Several steps as one: each figure beside the choices is ``of`` those of all steps. The choices are the same, but
    for outputs that some of the steps let go; what only some do, stays.
    """
    return tuple(
        replace(
            stages[0],
            choices=tuple(map(_most, zip(*(stage.choices for stage in stages), strict=True))),
            **{name: of([getattr(stage, name) for stage in stages]) for name in _OBSERVED},
        )
        for stages in zip(*seen, strict=True)
    )


def _most(choices: Sequence[Choice]) -> Choice:
    """One choice in several steps: the one with the most of everything."""
    kept, end = max(c.kept for c in choices), max(c.kept + c.released for c in choices)
    backward, later = (max(getattr(c, name) for c in choices) for name in ("backward", "later"))
    return replace(choices[0], kept=kept, backward=backward, later=later, released=end - kept)


_OBSERVED = ("before", "after", "beside", "later", "rest")


def fastest(stages: Sequence[Stage]) -> tuple[int, ...]:
    """The choice of each stage that takes the least time."""
    return tuple(min(range(len(s.choices)), key=lambda k: (s.choices[k].time, s.choices[k].kept)) for s in stages)


def peak_of(stages: Sequence[Stage], chosen: Sequence[int]) -> int:
    """Bytes at the worst moment of a step that runs these choices."""
    kept, peak = 0, 0
    for stage, k in zip(stages, chosen, strict=True):
        peak = max(peak, kept + stage.highest(stage.choices[k]))
        kept += stage.choices[k].kept
    return peak


def overhead_of(stages: Sequence[Stage], chosen: Sequence[int]) -> float:
    """Time that runs again with these choices, as a fraction of the graphs' time without recomputation."""
    time = sum(stage.choices[k].time for stage, k in zip(stages, chosen, strict=True))
    least = sum(min(c.time for c in stage.choices) for stage in stages)
    return time / least - 1 if least else 0.0


@dataclass(frozen=True, slots=True)
class _Partial:
    kept: int
    time: int
    choice: int
    before: _Partial | None


def choose(stages: Sequence[Stage], budget: int) -> tuple[int, ...]:
    """The position of the choice of each stage, with the least time within ``budget`` bytes.

    Raises ``InfeasibleError``, whose ``min_budget`` is a budget that suffices, if there is none.
    """
    found = _cheapest(stages, budget)
    if found is None:
        least = least_budget(stages, budget)
        raise InfeasibleError(
            f"a budget of {format_bytes(budget)} is too small for this sequence of graphs: the least is "
            f"{format_bytes(least)} ({least} bytes)",
            least,
            "a sequence of graphs",
            None,
        )
    return found


def _cheapest(stages: Sequence[Stage], budget: int) -> tuple[int, ...] | None:
    partials: Sequence[_Partial] = [_Partial(0, 0, -1, None)]
    for stage in stages:
        choices = [(k, c, budget - stage.highest(c)) for k, c in enumerate(stage.choices)]
        reached = [
            _Partial(p.kept + c.kept, p.time + c.time, k, p)
            for p in partials
            for k, c, most in choices
            if p.kept <= most
        ]
        partials = evenly(front(reached, lambda p: (p.kept, p.time)), MOST)
        if not partials:
            return None
    last = min(partials, key=lambda p: (p.time, p.kept))
    chosen: list[int] = []
    while last.before is not None:
        chosen.append(last.choice)
        last = last.before
    return tuple(reversed(chosen))


def least_budget(stages: Sequence[Stage], above: int = 0) -> int:
    """The smallest budget, from ``above`` bytes on, that some choices fit: by bisection."""
    low, high = above - 1, max(1, above)
    while _cheapest(stages, high) is None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _cheapest(stages, middle) is not None else (middle, high)
    return high
