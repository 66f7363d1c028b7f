"""Integer programs over 0/1 columns, and ``run``, which solves them with HiGHS or with any PuLP solver by name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from solvers.errors import ProblemError
from solvers.milp import highs
from solvers.work import Work

INFINITY = float("inf")
Terms = Iterable[tuple[int, float]]


def limit_in_units(size: int, unit: int, whole: bool) -> float:
    """The limit of a row of memory in units: that of ``size`` bytes, plus half a unit.

    ``whole``: all sizes of the row are whole units. The half unit is there because HiGHS's presolve called a program
    infeasible whose solutions were just within the limit. So the caller must check solutions in bytes.
    """
    return (size // unit if whole else size / unit) + 0.5


@dataclass
class IntegerProgram:
    """Minimise ``cost`` · x, with each row between ``lower`` and ``upper``.

    Columns are 0/1 if ``integer``, else continuous in [0, 1]. The terms of row r are ``columns`` and ``values`` from
    ``starts[r]`` to ``starts[r + 1]``.
    """

    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0, integer: bool = True) -> int:
        """Add a column; its index."""
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Terms, lower: float, upper: float) -> None:
        """Add a row; terms of the same column are added up."""
        total: dict[int, float] = {}
        for column, value in terms:
            total[column] = total.get(column, 0.0) + value
        self.columns += total.keys()
        self.values += total.values()
        self.starts.append(len(self.columns))
        self.lower.append(lower)
        self.upper.append(upper)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a solver. ``values``: the best solution, or None if it has none.

    ``bound``: proven lower bound on the objective; ``INFINITY`` if it is proven that there is no solution. ``optimal``:
    whether the solver ended with a proof, up to the gap asked for. ``searched``: whether it ended by itself, with a
    proof or at a limit of its search that is none of time.
    """

    values: npt.NDArray[np.float64] | None
    bound: float
    optimal: bool
    searched: bool


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a program was solved; ``outcome`` is the result so far."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Effort:
    """Which solver runs, and for how long. ``gap``: relative to the objective. ``seconds``: wall time.

    ``settings``: options of HiGHS by name, which other solvers ignore.
    """

    name: str = "HiGHS"
    threads: int = 1
    gap: float = 1e-4
    seconds: float = 60.0
    settings: tuple[tuple[str, float], ...] = ()


def run(
    program: IntegerProgram,
    effort: Effort,
    start: npt.NDArray[np.float64] | None = None,
) -> Outcome:
    """Solve ``program``. ``start``: a known solution.

    Raises ``Interrupted`` after Ctrl-C, ``ProblemError`` if PuLP has no such solver, ``SolverError`` without HiGHS.
    """
    if not program.cost:
        feasible = all(lo <= 0 <= up for lo, up in zip(program.lower, program.upper, strict=True))
        return Outcome(np.zeros(0) if feasible else None, 0.0 if feasible else INFINITY, True, True)
    if effort.name == "HiGHS":
        return _run_highs(program, effort, start)
    return _run_pulp(program, effort)


def _model(program: IntegerProgram, effort: Effort) -> Any:
    """HiGHS with ``program`` and the options of ``effort``."""
    highspy = highs.load()
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(program.cost), len(program.lower)
    lp.col_cost_ = np.array(program.cost)
    lp.col_lower_, lp.col_upper_ = np.zeros(lp.num_col_), np.ones(lp.num_col_)
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[flag] for flag in program.integer]
    lp.row_lower_, lp.row_upper_ = np.array(program.lower), np.array(program.upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(program.starts, np.int32)
    lp.a_matrix_.index_ = np.array(program.columns, np.int32)
    lp.a_matrix_.value_ = np.array(program.values)
    solver = highs.quiet()()
    options = {
        "threads": effort.threads,
        "time_limit": effort.seconds,
        "mip_rel_gap": effort.gap,
    }
    for name, value in (*options.items(), *effort.settings):
        solver.setOptionValue(name, value)
    solver.passModel(lp)
    return solver


def _run_highs(
    program: IntegerProgram,
    effort: Effort,
    start: npt.NDArray[np.float64] | None,
) -> Outcome:
    solver = _model(program, effort)
    if start is not None:
        solution = highs.load().HighsSolution()
        solution.col_value = start.tolist()
        solver.setSolution(solution)
    interrupt = _wait(solver)
    outcome = _outcome(solver, program)
    if interrupt is not None:
        raise Interrupted(outcome) from interrupt
    return outcome


def _outcome(solver: Any, program: IntegerProgram) -> Outcome:
    highspy, status, info = highs.load(), solver.getModelStatus(), solver.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Outcome(None, INFINITY, True, True)
    feasible = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(solver.getSolution().col_value) if feasible else None
    bound = info.mip_dual_bound if any(program.integer) else info.objective_function_value
    optimal = status == highspy.HighsModelStatus.kOptimal
    searched = optimal or status == highspy.HighsModelStatus.kSolutionLimit
    return Outcome(values, max(0.0, bound) if np.isfinite(bound) else 0.0, optimal, searched)


def _wait(solver: Any) -> KeyboardInterrupt | None:
    """Run HiGHS in a thread while the main thread waits for Ctrl-C; return the Ctrl-C that came, if any.

    Called from another thread, which gets no signals, it runs HiGHS there. It does not use highspy's ``startSolve`` and
    ``wait``: Ctrl-C within them leaves the lock of all instances acquired, and no program can be solved again.
    """
    if threading.current_thread() is not threading.main_thread():
        solver.run()
        return None
    solver.HandleUserInterrupt = True
    work = Work([lambda: _solve(solver)])
    interrupt: KeyboardInterrupt | None = None
    ended = False
    try:
        work.start()
        while not ended:
            try:
                ended = work.look()
            except KeyboardInterrupt as error:
                interrupt = error
                solver.cancelSolve()
    finally:
        solver.cancelSolve()  # the handler of SIGINT may raise another error; Ctrl-C may come while the thread starts
    work.results()
    return interrupt


def _solve(solver: Any) -> None:
    solver.run()
    highs.load().Highs.resetGlobalScheduler(False)  # this thread's scheduler, since the thread ends


def _run_pulp(program: IntegerProgram, effort: Effort) -> Outcome:
    """Run any PuLP solver. PuLP returns no dual bound, so the bound is 0 unless the solution is optimal."""
    import pulp  # here, since few ask for another solver than HiGHS

    available = pulp.listSolvers(onlyAvailable=True)
    if effort.name not in available:
        raise ProblemError(f"milp={effort.name!r} is not available; PuLP finds: {', '.join(available)}")
    model = pulp.LpProblem("program", pulp.LpMinimize)
    kinds = (pulp.LpContinuous, pulp.LpInteger)
    x = [model.add_variable(f"x{k}", 0, 1, kinds[flag]) for k, flag in enumerate(program.integer)]
    model += pulp.lpSum(c * v for c, v in zip(program.cost, x, strict=True))
    for k, (lo, up) in enumerate(zip(program.lower, program.upper, strict=True)):
        span = range(program.starts[k], program.starts[k + 1])
        total = pulp.lpSum(program.values[at] * x[program.columns[at]] for at in span)
        if lo > -INFINITY:
            model += total >= lo
        if up < INFINITY:
            model += total <= up
    with warnings.catch_warnings():
        # PuLP 3 ships CBC; the warning is about PuLP 4.
        warnings.filterwarnings("ignore", "PULP_CBC_CMD is deprecated", DeprecationWarning)
        solver = pulp.getSolver(
            effort.name, msg=False, timeLimit=effort.seconds, gapRel=effort.gap, threads=effort.threads
        )
    model.solve(solver)
    if model.sol_status == pulp.LpSolutionInfeasible:
        return Outcome(None, INFINITY, True, True)
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Outcome(None, 0.0, False, False)
    # ``status`` is "optimal" for every solution of CBC, proven or not; ``sol_status`` tells them apart.
    optimal = model.sol_status == pulp.LpSolutionOptimal
    objective = float(pulp.value(model.objective) or 0.0)
    values = np.array([float(v.varValue or 0.0) for v in x])
    return Outcome(values, objective * (1 - effort.gap) if optimal else 0.0, optimal, optimal)
