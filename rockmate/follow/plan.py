"""The plan of a followed step: what it keeps and runs again, operation by operation, and how it is found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rockmate.budget import show_bytes
from rockmate.errors import PlanError
from rockmate.planning.options import PlanOptions
from rockmate.planning.plan import ShownPlan
from rockmate.planning.plot import Place
from rockmate.planning.report import facts_of_call, fates
from rockmate.progress import Report, silent
from solvers import Bwd, Frontier, InfeasibleError, Problem, Run, Schedule, Step, Walk, keep_everything, walk
from solvers.chain.refine import refine
from solvers.solve import Request, solve
from solvers.whole.baselines import recompute_all, segments_of_forward
from solvers.whole.repair import repair, trim
from solvers.whole.stages import Reruns, schedule_step, staged_step, timeline
from solvers.whole.whole_graph import least_step

SECONDS = 2.0
"""How long a plan is looked for, unless ``time_limit`` says less."""

PATIENCE = 20.0
"""Seconds in which what nearly fits is mended: plans that are found otherwise run far more again."""

MOST_SEGMENTS = 64
"""Segments of a forward that are tried."""

PARTS = (1.0, 1 / 32, 1 / 256)
"""Parts of all bytes up to which data that several segments read are kept."""

ROUNDS = 12
"""Budgets that are tried to find the least."""


@dataclass(frozen=True, repr=False)
class FollowedPlan(ShownPlan):
    """What a step keeps and runs again whose forward is followed.

    ``budget``: bytes that one forward and its backward may allocate. ``call``: the call in a few words. ``places``: the
    user's source line of each node of ``problem``. ``walk``: the figures of ``schedule``. ``why`` the forward is not
    captured as one graph. ``lower_bound``: nanoseconds that a step takes at least, if that is proven.
    """

    budget: int
    call: tuple[str, ...]
    problem: Problem
    schedule: Schedule
    walk: Walk
    places: tuple[str, ...]
    why: str
    setup_seconds: dict[str, float]
    lower_bound: int | None = None

    @property
    def predicted_peak(self) -> int:
        """Bytes at the worst moment of a step."""
        return self.walk.peak

    @property
    def eager_peak(self) -> int:
        """Bytes that the step takes if nothing runs again."""
        return eager_peak_of(self.problem)

    @property
    def predicted_overhead(self) -> float:
        """Time that runs again, as a fraction of the step without recomputation."""
        return self.walk.overhead

    def problem_with_usual_loss(self) -> Problem:
        return self.problem

    def places_of_nodes(self) -> list[Place]:
        return [Place("", "", line) for line in self.places]

    def save(self, path: object) -> None:
        """Such plans cannot be saved: raises ``PlanError``."""
        raise PlanError(
            "the plan of a forward that is followed cannot be saved: it is of the operations that the model's Python "
            "calls. Give each process the budget: it finds the plan in its first steps, or before them with sample=. A "
            f"model that is one graph has plans that can be saved; this one is not ({self.why.rstrip('.')})"
        )

    def picture(self) -> Any:
        """What each block of operations keeps and runs again, as a ``graphviz.Digraph``."""
        import graphviz

        from rockmate.planning.picture import COLOURS  # imported where a picture is asked for

        title = f"plan: {show_bytes(self.predicted_peak)} of {show_bytes(self.budget)}, {self._overhead()} longer"
        graph = graphviz.Digraph(graph_attr={"label": title, "labelloc": "t"}, node_attr={"shape": "box"})
        data, all_fates = self.problem.data, fates(self.problem, self.schedule)
        for i, (node, fate) in enumerate(zip(self.problem.nodes, all_fates, strict=True)):
            if node.makes:
                size = show_bytes(sum(data[d].size for d in node.makes))
                label = "\n".join(text for text in (node.name, self.places[i], size) if text)
                graph.node(str(i), label, style="filled", fillcolor=COLOURS[fate.kind])
                for j in dict.fromkeys(data[d].owner for d in node.reads):
                    graph.edge(str(j), str(i))
        return graph

    def _facts(self) -> list[tuple[str, str]]:
        at = moment_of(self.problem, self.places, self.schedule[self.walk.peak_step])
        return [
            *facts_of_call(self.call),
            ("eager's peak", show_bytes(self.eager_peak)),
            ("budget", show_bytes(self.budget)),
            ("predicted peak", f"{show_bytes(self.predicted_peak)}, in {at}"),
            ("predicted overhead", f"{self._overhead()} more time"),
            ("operations", f"{len(self.problem.nodes)}; that run again: {self.recomputed}"),
            self._set_up(),
            ("followed, since", self.why or "asked for"),
        ]


def moment_of(problem: Problem, places: Sequence[str], step: Step) -> str:
    """When a step runs, in the user's words; ``places``: the source line of each node.

    Which operation a part of the backward is of is not known: it is told by what it reads.
    """
    if not isinstance(step, (Run, Bwd)):
        return "the loss, between forward and backward"
    index, what = step.node, "the forward of"
    if isinstance(step, Bwd):
        backward = problem.nodes[step.node].backward
        makers = [problem.data[d].owner for d in (backward.reads if backward else ())]
        if not makers:
            return "the backward"
        index, what = max(makers), "the backward that reads what is kept of"
    name = problem.nodes[index].name.rpartition("_")[0] or problem.nodes[index].name
    return f"{what} {name}" + (f" at {places[index]}" if places[index] else "")


@dataclass(frozen=True)
class Found:
    """A schedule within a budget. ``bound``: nanoseconds that a step takes at least."""

    schedule: Schedule
    walk: Walk
    bound: int


def eager_peak_of(problem: Problem) -> int:
    """Bytes of a step in which nothing runs again."""
    return walk(problem, keep_everything(problem)).peak


def find(problem: Problem, budget: int, options: PlanOptions, report: Report = silent) -> Found:
    """A schedule for ``budget`` bytes. Raises ``InfeasibleError``, which has the least budget, where none fits."""
    keep = keep_everything(problem)
    kept = walk(problem, keep)
    if kept.peak <= budget:
        return Found(keep, kept, kept.time)
    seconds = min(SECONDS, options.time_limit)
    if options.solver != "auto":
        solution = solve(_unlimited(problem), budget, options.solver, time_limit=seconds)
        start, schedule, bound = None, solution.schedule, solution.bound
    else:
        start = _segmented(problem, budget, options.time_limit, report)
        refined = refine(problem, start, Request(budget, seconds))
        schedule, bound = refined.schedule, refined.bound
    for found in (schedule, start):
        if found is not None and (walked := walk(problem, found)).peak <= budget:
            return Found(found, walked, bound)
    least = find_least(problem, report)
    if least.walk.peak <= budget:
        return least
    at = least.schedule[least.walk.peak_step]
    raise InfeasibleError("no schedule fits", least.walk.peak, str(at), at)


def _segmented(problem: Problem, budget: int, time_limit: float, report: Report) -> Schedule | None:
    """The fastest cut of the forward into segments that fits, without useless reruns; if none fits, the one of least
    memory, mended; None if that does not fit, either.
    """
    staged = staged_step(problem)
    cuts = _cuts(problem)
    found: Reruns | None = None
    if fitting := [(cost, runs) for peak, cost, runs in cuts if peak <= budget]:
        best = min(fitting, key=lambda x: x[0])[1]
        found = trim(staged, budget, best, _remaining(min(SECONDS / 4, time_limit), report))
    elif cuts and least_step(staged)[0] <= budget:
        least = min(cuts, key=lambda x: x[:2])[2]
        found = repair(staged, budget, least, _remaining(min(PATIENCE, time_limit), report))
    return None if found is None else schedule_step(problem, found)


@lru_cache(maxsize=1)  # a problem is solved for several budgets in a row
def _cuts(problem: Problem) -> tuple[tuple[int, int, Reruns], ...]:
    """(peak, nanoseconds of reruns, reruns) of the forward in few or many segments, with large data that several of
    them read kept, or run again in each.
    """
    staged = staged_step(problem)
    found: list[tuple[int, int, Reruns]] = []
    count = 2
    while count < min(staged.first, MOST_SEGMENTS):
        for runs in (segments_of_forward(staged, count, part) for part in PARTS):
            found.append((timeline(staged, runs).peak, staged.cost(runs), runs))
        count += max(1, count // 2)
    return tuple(found)


def _unlimited(problem: Problem) -> Problem:
    """For solvers that do not know of nodes that may run again at some moments only: these do not run again."""
    nodes = tuple(n if n.within is None else replace(n, rerun=False, within=None) for n in problem.nodes)
    return replace(problem, nodes=nodes)


def _remaining(seconds: float, report: Report) -> Callable[[], float]:
    """What says how many seconds are left from now on; each time it is asked, ``report`` is told how far that is."""
    began = time.perf_counter()

    def remaining() -> float:
        passed = time.perf_counter() - began
        report("solve", min(1.0, passed / max(seconds, 1e-9)))
        return seconds - passed

    return remaining


@lru_cache(maxsize=1)  # it is asked for again to say that no plan fits
def find_least(problem: Problem, report: Report = silent) -> Found:
    """The schedule of least memory that is found by bisection, with the fast heuristic. It may take very long: see
    ``fastest_of_least``. How long operations took does not count, which differs each time that a step is observed.
    """
    staged = staged_step(replace(problem, nodes=tuple(replace(n, time=n.peak) for n in problem.nodes)))
    remaining = _remaining(SECONDS, report)
    ways = [(timeline(staged, runs).peak, runs) for runs in (staged.none(), recompute_all(staged))]
    high, best = min((*ways, *((peak, runs) for peak, _, runs in _cuts(problem))), key=lambda way: way[0])
    low = least_step(staged)[0]
    for _ in range(ROUNDS):
        if low >= high or remaining() < 0:
            break
        guess = (low + high) // 2
        runs = repair(staged, guess, staged.none(), remaining)
        if runs is None:
            low = guess + 1
        else:
            best, high = runs, timeline(staged, runs).peak
    schedule = schedule_step(problem, best)
    walked = walk(problem, schedule)
    return Found(schedule, walked, problem.eager_time)


def fastest_of_least(problem: Problem, options: PlanOptions, report: Report = silent) -> Found:
    """The fastest schedule that is found for the least memory, which ``find_least`` finds."""
    least = find_least(problem, report)
    try:
        found = find(problem, least.walk.peak, options, report)
    except InfeasibleError:  # the bisection ended later the first time
        return least
    return min(found, least, key=lambda f: f.walk.time)


def frontier_of(
    problem: Problem, options: PlanOptions, known: Sequence[Found], report: Report = silent
) -> tuple[Frontier, Schedule]:
    """Time against memory, no slower than the ``known`` schedules, and the schedule of the least."""
    least = min(
        (fastest_of_least(problem, options, _within(report, 0)), *known), key=lambda f: (f.walk.peak, f.walk.time)
    )
    low, high = least.walk.peak, eager_peak_of(problem)
    points = [(low, least.walk.overhead)]
    for k in range(1, POINTS):
        budget = low + (high - low) * k // (POINTS - 1)
        found = find(problem, budget, options, _within(report, k))
        fitting = (f.walk.overhead for f in (found, *known) if f.walk.peak <= budget)
        points.append((budget, min(*fitting, points[-1][1])))
    return Frontier(low, high, tuple(points)), least.schedule


def _within(report: Report, k: int) -> Report:
    """What is told of the search for point ``k`` of a frontier, and tells ``report`` how far the whole is."""
    return lambda phase, part: report("frontier", (k + part) / POINTS)


POINTS = 8
"""Budgets of a frontier."""
