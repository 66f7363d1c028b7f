"""``solve(problem, budget)`` runs a solver by name; ``register`` adds a solver.

A *kind* of problem is a class with a judge (its walker) and a table of solvers by name. A solver is a function
``(problem, request) -> Answer``: it returns a schedule, if it has one, and what it has proven. Peak and cost of the
``Solution`` come from the judge, never from the solver.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple

from solvers.curve import Frontier
from solvers.errors import ProblemError, ScheduleError, SolverError
from solvers.schedule import Schedule
from solvers.text import format_bytes
from solvers.walker import Walk

Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True)
class Solution:
    """The answer of one solver to one problem and budget.

    ``status``:

    - ``"optimal"``: ``schedule`` fits, and no schedule of the solver's class costs less, up to the gap asked for;
    - ``"feasible"``: ``schedule`` fits; cheaper ones are not excluded (``gap`` says by how much at most);
    - ``"infeasible"``: proven that no schedule of the solver's class fits;
    - ``"unknown"``: no schedule was found in the time given, and none is excluded.

    ``reason`` says what the status rests on, and names the class. ``cost`` and ``bound`` are times of the whole step in
    the problem's unit (nanoseconds, unless a file has another); no schedule of the class costs less than ``bound``.
    ``peak`` is the walker's figure in bytes. ``seconds`` is wall time. ``solver`` is the name of the solver that found
    the schedule. ``cost``, ``peak`` and ``schedule`` are None if there is no schedule.
    """

    status: Status
    reason: str
    cost: int | None
    bound: int
    peak: int | None
    schedule: Schedule | None
    seconds: float
    solver: str

    @property
    def gap(self) -> float:
        """``(cost - bound) / cost``: 0 for a proven optimum, infinite without a schedule."""
        if self.cost is None:
            return float("inf")
        return (self.cost - self.bound) / self.cost if self.cost else 0.0


class Progress(NamedTuple):
    """A solver's report while it works: seconds since the start, best cost and bound so far, and what it is doing."""

    seconds: float
    cost: int | None
    bound: int
    doing: str


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of ``solve``, for a solver. A solver stops soon after ``remaining()`` is 0.

    ``budget``: bytes. ``time_limit``: seconds. ``gap``: relative gap at which a proof may stop. ``milp``: the PuLP name
    of the solver for integer programs. ``progress``: see ``solve``. ``started``: on the clock of ``time.perf_counter``.
    """

    budget: int
    time_limit: float = 60.0
    threads: int = 1
    gap: float = 1e-4
    milp: str = "HiGHS"
    progress: Callable[[Progress], None] | None = None
    started: float = field(default_factory=time.perf_counter)

    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def remaining(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.time_limit - self.seconds())

    def report(self, cost: int | None, bound: int, doing: str) -> None:
        """Call ``progress`` with the best ``cost`` (None if there is no schedule) and ``bound`` so far."""
        if self.progress:
            self.progress(Progress(self.seconds(), cost, bound, doing))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a solver returns: ``schedule`` (None if it has none) and ``bound``, a proven lower bound on the cost.

    ``infeasible``: why no schedule of the class fits, if that is proven. ``reason``: what the answer rests on.
    ``solver``: the name of the solver that found it, if it was another one.
    """

    schedule: Schedule | None
    bound: int = 0
    reason: str = ""
    infeasible: str = ""
    solver: str = ""


SolverFunction = Callable[[Any, Request], Answer]


@dataclass(frozen=True, slots=True)
class Kind:
    """A class of problems: its judge, its solvers by name, and ``least``, the cost without recomputation."""

    judge: Callable[[Any, Schedule], Walk]
    least: Callable[[Any], int]
    frontier: Callable[[Any, Request], Frontier] | None = None
    solvers: dict[str, SolverFunction] = field(default_factory=dict)


KINDS: dict[type, Kind] = {}
"""The kinds of problems by their classes; ``register`` adds solvers to them."""


def register(problem: type, name: str) -> Callable[[SolverFunction], SolverFunction]:
    """Decorator: let ``solve`` run a function as the solver ``name`` of the class ``problem``; each has an ``auto``."""

    kind = _kind(problem)
    if not isinstance(name, str) or not name:
        raise ProblemError(f"name={name!r}: give the solver's name, as text")

    def add(function: SolverFunction) -> SolverFunction:
        if not callable(function):
            raise ProblemError(f"{name}: a {type(function).__name__} is no solver: give (problem, request) -> Answer")
        if name in kind.solvers and is_ours(kind.solvers[name]) and not is_ours(function):
            raise ProblemError(f"{name!r} is the name of a solver of this package: give another one")
        kind.solvers[name] = function
        return function

    return add


def is_ours(function: SolverFunction) -> bool:
    """Whether a solver is one of this package."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]


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

    Ctrl-C while a solver improves its schedule returns the best so far. If no schedule fits, the ``Solution`` has none,
    and its status is "infeasible" or "unknown".

    Args:
        problem: A ``Problem``, or another kind that has solvers.
        budget: Bytes.
        solver: One of ``solver_names(problem)``.
        time_limit: Seconds.
        threads: Of the solver for integer programs.
        gap: The relative gap at which a solution counts as optimal.
        milp: The PuLP name of the solver for integer programs.
        progress: Called with a ``Progress`` from time to time.

    Raises:
        ProblemError: The problem or an argument is not valid.
        SolverError: The solver has a defect.
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
    """``answer`` as a ``Solution``, with the walker's figures."""
    if not isinstance(answer, Answer):
        raise SolverError(f"{name} returned a {type(answer).__name__}: a solver returns Answer(schedule, bound)")
    if isinstance(answer.bound, bool) or not isinstance(answer.bound, Real):
        raise SolverError(f"{name} returned the bound {answer.bound!r}: give nanoseconds, or 0 if nothing is proven")
    bound = max(answer.bound, kind.least(problem))
    source = answer.solver or name
    if answer.schedule is None:
        status: Status = "infeasible" if answer.infeasible else "unknown"
        reason = (
            answer.infeasible
            or answer.reason
            or f"{source} found no schedule, in {request.seconds():.3g} of {request.time_limit:g} s"
        )
        return Solution(status, reason, None, bound, None, None, request.seconds(), source)
    try:
        walked = kind.judge(problem, answer.schedule)
    except ScheduleError as error:
        raise SolverError(
            f"{source} made a schedule that the walker rejects, a defect of the solver: {error}"
        ) from error
    if walked.peak > request.budget:
        what = f"the schedule of {source} needs {format_bytes(walked.peak)} ({walked.peak} bytes)"
        reason = answer.reason or f"{what}, more than the budget of {request.budget} bytes"
        return Solution("unknown", reason, None, bound, None, None, request.seconds(), source)
    if bound > walked.time:
        raise SolverError(f"{source} claims the bound {bound} above the cost {walked.time}, a defect of the solver")
    status = "optimal" if walked.time - bound <= request.gap * walked.time else "feasible"
    reason = answer.reason or (
        "it costs no more than running everything once" if walked.time == kind.least(problem) else ""
    )
    return Solution(status, reason, walked.time, bound, walked.peak, answer.schedule, request.seconds(), source)


def frontier(problem: Any, *, time_limit: float = 60.0, threads: int = 1, gap: float = 1e-4) -> Frontier:
    """The curve of time against memory of ``problem``, computed within ``time_limit`` seconds.

    ``threads`` and ``gap`` are those of ``solve``. Raises ``ProblemError`` as ``solve`` does.
    """
    kind = _kind(problem)
    _check(0, time_limit, threads, gap)
    if kind.frontier is None:
        raise ProblemError(f"no frontier for a {type(problem).__name__}")
    problem.verify()
    return kind.frontier(problem, Request(0, time_limit, threads, gap))
