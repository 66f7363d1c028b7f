"""One way to ask any solver: ``solve(problem, budget)``; and how a solver is made known.

A *kind* of problem is a class with a judge (its walker) and a table of solvers by name. A solver is a function
``(problem, request) -> Answer``: it returns a schedule, if it has one, and what it has proven. What the
``Solution`` says of peak and cost comes from the judge, never from the solver.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

from solvers.errors import ProblemError, ScheduleError, SolverError
from solvers.schedule import Schedule
from solvers.solution import Frontier, Solution, Status
from solvers.text import format_bytes


class Progress(NamedTuple):
    """What a solver reports while it works: seconds since the start, best cost and bound so far, and what it does."""

    seconds: float
    cost: int | None
    bound: int
    doing: str


@dataclass(frozen=True, slots=True)
class Request:
    """What ``solve`` was asked for; a solver reads it, and looks at ``remaining()`` as it works.

    ``budget``: bytes. ``time_limit``: seconds. ``gap``: relative gap at which a proof may stop. ``milp``: the name
    of a PuLP solver for those that use integer programs. ``started`` is on the clock of ``time.perf_counter``.
    """

    budget: int
    time_limit: float = 60.0
    threads: int = 1
    gap: float = 1e-4
    milp: str = "HiGHS"
    progress: Callable[[Progress], None] | None = None
    started: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self.started

    def remaining(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.time_limit - self.seconds())

    def report(self, cost: int | None, bound: int, doing: str) -> None:
        """Tell whoever asked for progress."""
        if self.progress:
            self.progress(Progress(self.seconds(), cost, bound, doing))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver has: ``schedule`` (None if none), and ``bound``, a proven lower bound on the cost.

    ``infeasible``: why no schedule of the class fits, where that is proven. ``reason``: what the answer rests on.
    ``solver``: who found it, where one solver calls others.
    """

    schedule: Schedule | None
    bound: int = 0
    reason: str = ""
    infeasible: str = ""
    solver: str = ""


class Judged(NamedTuple):
    """What a walker says of a schedule: peak bytes and cost."""

    peak: int
    cost: int


SolverFunction = Callable[[Any, Request], Answer]


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of problems. ``least`` is the cost without recomputation, a bound for every solver."""

    judge: Callable[[Any, Schedule], Judged]
    least: Callable[[Any], int]
    frontier: Callable[[Any, Request], Frontier] | None = None
    solvers: dict[str, SolverFunction] = field(default_factory=dict)


KINDS: dict[type, Kind] = {}
"""Every known class of problems; ``register`` adds solvers to it."""


def register(problem: type, name: str) -> Callable[[SolverFunction], SolverFunction]:
    """Decorator: make a solver of ``problem`` known as ``name``; every kind has one named ``auto``."""

    kind = _kind(problem)

    def known(function: SolverFunction) -> SolverFunction:
        kind.solvers[name] = function
        return function

    return known


def solver_names(problem: object) -> tuple[str, ...]:
    """The names that ``solve`` takes for this problem (or class of problems)."""
    return tuple(sorted(_kind(problem).solvers))


def _kind(problem: object) -> Kind:
    cls = problem if isinstance(problem, type) else type(problem)
    if cls not in KINDS:
        names = ", ".join(sorted(k.__name__ for k in KINDS))
        raise ProblemError(f"no solver for a {cls.__name__}; a problem is one of: {names}")
    return KINDS[cls]


def _check(budget: object, time_limit: float, threads: int, gap: float) -> None:
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise ProblemError(f"budget={budget!r}: give whole bytes as an int")
    if budget < 0:
        raise ProblemError(f"budget={budget}: bytes cannot be negative")
    if not isinstance(time_limit, Real) or not time_limit > 0:
        raise ProblemError(f"time_limit={time_limit!r}: give a positive number of seconds")
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ProblemError(f"threads={threads!r}: give a whole number from 1")
    if not isinstance(gap, Real) or not 0 <= gap < 1:
        raise ProblemError(f"gap={gap!r}: give a fraction from 0 up to 1, such as 1e-4")


def solve(
    problem: Any,
    budget: int,
    solver: str = "auto",
    *,
    time_limit: float = 60.0,
    threads: int = 1,
    gap: float = 1e-4,
    milp: str = "HiGHS",
    progress: Callable[[Progress], None] | None = None,
) -> Solution:
    """The cheapest schedule that ``solver`` finds for ``problem`` within ``budget`` bytes, verified by the walker.

    ``solver_names(problem)`` lists the solvers; ``time_limit`` is in seconds; ``gap`` is the relative gap at which a
    solution counts as optimal; ``milp`` names a PuLP solver for the integer programs; ``progress`` is called
    now and then. Ctrl-C while a solver improves its schedule returns the best so far. ``ProblemError`` for
    arguments that make no sense; what cannot be met is a ``Solution`` of status ``"infeasible"``.
    """
    kind = _kind(problem)
    _check(budget, time_limit, threads, gap)
    if solver not in kind.solvers:
        known = ", ".join(solver_names(problem))
        raise ProblemError(f"solver={solver!r} is not known for a {type(problem).__name__}; choose one of: {known}")
    problem.verify()
    request = Request(budget, time_limit, threads, gap, milp, progress)
    return _judged(problem, kind, solver, request, kind.solvers[solver](problem, request))


def _judged(problem: Any, kind: Kind, name: str, request: Request, answer: Answer) -> Solution:
    """The solution that ``answer`` amounts to, by the walker's figures."""
    if not isinstance(answer, Answer):
        raise SolverError(f"{name} returned a {type(answer).__name__}: a solver returns Answer(schedule, bound)")
    bound = max(answer.bound, kind.least(problem))
    source = answer.solver or name
    if answer.schedule is None:
        status: Status = "infeasible" if answer.infeasible else "unknown"
        reason = answer.infeasible or answer.reason or f"{source} found no schedule in {request.time_limit:g} s"
        return Solution(status, reason, None, bound, None, None, request.seconds(), source)
    try:
        judged = kind.judge(problem, answer.schedule)
    except ScheduleError as error:
        raise SolverError(
            f"{source} made a schedule that the walker rejects, a defect of the solver: {error}"
        ) from error
    if judged.peak > request.budget:
        what = f"the schedule of {source} needs {format_bytes(judged.peak)} ({judged.peak} bytes)"
        reason = answer.reason or f"{what}, more than the budget of {request.budget} bytes"
        return Solution("unknown", reason, None, bound, None, None, request.seconds(), source)
    if bound > judged.cost:
        raise SolverError(f"{source} claims the bound {bound} above the cost {judged.cost}, a defect of the solver")
    status = "optimal" if judged.cost - bound <= request.gap * judged.cost else "feasible"
    reason = answer.reason or (
        "it costs no more than running everything once" if judged.cost == kind.least(problem) else ""
    )
    return Solution(status, reason, judged.cost, bound, judged.peak, answer.schedule, request.seconds(), source)


def frontier(problem: Any, *, time_limit: float = 60.0, threads: int = 1, gap: float = 1e-4) -> Frontier:
    """The whole time-against-memory curve of ``problem``; monotone. ``Frontier`` says what is exact."""
    kind = _kind(problem)
    _check(0, time_limit, threads, gap)
    if kind.frontier is None:
        raise ProblemError(f"no frontier for a {type(problem).__name__}")
    problem.verify()
    return kind.frontier(problem, Request(0, time_limit, threads, gap))
