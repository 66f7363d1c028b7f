"""Integer programs over 0/1 columns, and ``run``, which solves them with HiGHS or with any PuLP solver by name.

HiGHS is loaded when the first program is solved. Without it, everything that solves no program works.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from solvers.errors import ProblemError, SolverError
from solvers.milp.options import SolverOptions
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

    def truncate(self, rows: int, terms: int) -> None:
        """Remove the rows and terms behind the first so many."""
        del self.starts[rows + 1 :], self.lower[rows:], self.upper[rows:]
        del self.columns[terms:], self.values[terms:]


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


def run(
    program: IntegerProgram,
    options: SolverOptions,
    start: npt.NDArray[np.float64] | None = None,
    settings: tuple[tuple[str, float], ...] = (),
) -> Outcome:
    """Solve ``program``. HiGHS takes a known solution as ``start``, and ``settings``, which are options by name.

    Raises ``Interrupted`` after Ctrl-C, ``ProblemError`` if PuLP has no such solver, ``SolverError`` without HiGHS.
    """
    if not program.cost:
        feasible = all(lo <= 0 <= up for lo, up in zip(program.lower, program.upper, strict=True))
        return Outcome(np.zeros(0) if feasible else None, 0.0 if feasible else INFINITY, True, True)
    if options.name != "HiGHS":
        return _run_pulp(program, options)
    solver = _highs()()
    limits = ("threads", options.threads), ("time_limit", options.time_limit), ("mip_rel_gap", options.gap)
    for name, value in (*limits, *settings):
        solver.setOptionValue(name, value)
    solver.passModel(_model(program))
    if start is not None:
        solution = _highspy().HighsSolution()
        solution.col_value = start.tolist()
        solver.setSolution(solution)
    interrupt = _wait(solver)
    outcome = _outcome(solver, program)
    if interrupt is not None:
        raise Interrupted(outcome) from interrupt
    return outcome


def _highspy() -> Any:
    """The package ``highspy``; ``SolverError`` if it is not installed.

    Imported here because most runs need no solver: their plans are saved, or nothing has to be recomputed.
    """
    try:
        import highspy
    except ImportError as error:
        raise SolverError(
            "HiGHS is not installed: pip install highspy, or name another solver that PuLP has. "
            "Saved plans, and budgets with which nothing is recomputed, need no solver."
        ) from error
    return highspy


@cache
def _highs() -> Any:
    """The class ``highspy.Highs``, whose instances print nothing: from 1.16 on, it says its name when one is made."""
    highspy = _highspy()

    class Quiet(highspy.Highs):  # type: ignore[misc, name-defined]
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    return Quiet


def _model(program: IntegerProgram) -> Any:
    """``program`` as HiGHS takes it."""
    highspy = _highspy()
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
    return lp


def _outcome(solver: Any, program: IntegerProgram) -> Outcome:
    highspy, status, info = _highspy(), solver.getModelStatus(), solver.getInfo()
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
    _highspy().Highs.resetGlobalScheduler(False)  # this thread's scheduler, since the thread ends


def _run_pulp(program: IntegerProgram, options: SolverOptions) -> Outcome:
    """Run any PuLP solver. PuLP returns no dual bound, so the bound is 0 unless the solution is optimal."""
    import pulp  # here, since few ask for another solver than HiGHS

    available = pulp.listSolvers(onlyAvailable=True)
    if options.name not in available:
        raise ProblemError(f"milp={options.name!r} is not available; PuLP finds: {', '.join(available)}")
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
            options.name, msg=False, timeLimit=options.time_limit, gapRel=options.gap, threads=options.threads
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
    return Outcome(values, objective * (1 - options.gap) if optimal else 0.0, optimal, optimal)
