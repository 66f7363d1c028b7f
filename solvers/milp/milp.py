"""Integer programs over 0/1 columns, and one way to run them: HiGHS directly, or any PuLP solver by name."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable
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
    """The limit of a row of memory, half a unit above ``size`` bytes (in ``whole`` units if its sizes are).

    HiGHS's presolve has called a program infeasible whose solutions were just within. Who makes the program cuts off
    what oversteps a limit in bytes.
    """
    return (size // unit if whole else size / unit) + 0.5


@dataclass
class Program:
    """Minimise ``cost`` · x over 0/1 columns (continuous in [0, 1] where not ``integer``), rows between two limits."""

    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def column(self, cost: float = 0.0, integer: bool = True) -> int:
        """A new column."""
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, terms: Terms, lower: float, upper: float) -> None:
        """A new row; terms of one column are added up."""
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
    """``values``: the best solution found, if any; ``bound``: proven lower bound on the objective (``INFINITY`` if
    there provably is no solution)."""

    values: npt.NDArray[np.float64] | None
    bound: float
    optimal: bool


class Interrupted(KeyboardInterrupt):
    """Ctrl-C while a program was solved; ``outcome`` is what there was."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__()
        self.outcome = outcome


@dataclass(frozen=True, slots=True)
class Effort:
    """Which solver, and how long. ``gap`` is relative to the objective; ``seconds`` is wall time.

    ``settings``: options of HiGHS by name; other solvers have none.
    """

    name: str = "HiGHS"
    threads: int = 1
    gap: float = 1e-4
    seconds: float = 60.0
    settings: tuple[tuple[str, float], ...] = ()


def run(
    program: Program,
    effort: Effort,
    start: npt.NDArray[np.float64] | None = None,
    report: Callable[[float], None] | None = None,
) -> Outcome:
    """Solve ``program``; ``start`` is a known solution, ``report`` is told the bound now and then.

    Raises ``Interrupted`` after Ctrl-C.
    """
    if not program.cost:
        feasible = all(lo <= 0 <= up for lo, up in zip(program.lower, program.upper, strict=True))
        return Outcome(np.zeros(0) if feasible else None, 0.0 if feasible else INFINITY, True)
    if effort.name == "HiGHS":
        return _run_highs(program, effort, start, report)
    return _run_pulp(program, effort)


def _model(program: Program, effort: Effort) -> Any:
    """A solver of HiGHS that has been given ``program``."""
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
    solver = highspy.Highs()
    options = {
        "output_flag": False,
        "threads": effort.threads,
        "time_limit": effort.seconds,
        "mip_rel_gap": effort.gap,
    }
    for name, value in (*options.items(), *effort.settings):
        solver.setOptionValue(name, value)
    solver.passModel(lp)
    return solver


def _run_highs(
    program: Program,
    effort: Effort,
    start: npt.NDArray[np.float64] | None,
    report: Callable[[float], None] | None,
) -> Outcome:
    solver = _model(program, effort)
    if start is not None:
        solution = highs.load().HighsSolution()
        solution.col_value = start.tolist()
        solver.setSolution(solution)
    interrupt = _wait(solver, report)
    outcome = _outcome(solver, program)
    if interrupt is not None:
        raise Interrupted(outcome) from interrupt
    return outcome


def _outcome(solver: Any, program: Program) -> Outcome:
    highspy, status, info = highs.load(), solver.getModelStatus(), solver.getInfo()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Outcome(None, INFINITY, True)
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    values = np.array(solver.getSolution().col_value) if found else None
    bound = info.mip_dual_bound if any(program.integer) else info.objective_function_value
    optimal = status == highspy.HighsModelStatus.kOptimal
    return Outcome(values, max(0.0, bound) if np.isfinite(bound) else 0.0, optimal)


def _wait(solver: Any, report: Callable[[float], None] | None) -> KeyboardInterrupt | None:
    """Run HiGHS, in the main thread so that Ctrl-C is heard, which only that thread does; Ctrl-C if it came.

    Not by highspy's ``startSolve`` and ``wait``: Ctrl-C within leaves their lock, which all instances share, taken, and
    no program is ever solved again.
    """
    if threading.current_thread() is not threading.main_thread():
        solver.run()
        return None
    solver.HandleUserInterrupt = True
    if report:

        def tell(event: Any) -> None:
            report(max(0.0, event.data_out.mip_dual_bound))

        solver.cbMipLogging.subscribe(tell)
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
        solver.cancelSolve()  # a handler may raise something else, or Ctrl-C come at the start
    work.results()
    return interrupt


def _solve(solver: Any) -> None:
    solver.run()
    highs.load().Highs.resetGlobalScheduler(False)  # that of this thread, which ends


def _run_pulp(program: Program, effort: Effort) -> Outcome:
    """Any PuLP solver. PuLP hands back no dual bound, so that of a run cut short is 0."""
    import pulp

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
        # CBC as PuLP 3 ships it; the warning is about PuLP 4.
        warnings.filterwarnings("ignore", "PULP_CBC_CMD is deprecated", DeprecationWarning)
        solver = pulp.getSolver(
            effort.name, msg=False, timeLimit=effort.seconds, gapRel=effort.gap, threads=effort.threads
        )
    model.solve(solver)
    if model.sol_status == pulp.LpSolutionInfeasible:
        return Outcome(None, INFINITY, True)
    if model.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        return Outcome(None, 0.0, False)
    # PuLP calls a solution "optimal" that CBC found before its time limit; only sol_status tells them apart.
    optimal = model.sol_status == pulp.LpSolutionOptimal
    objective = float(pulp.value(model.objective) or 0.0)
    values = np.array([float(v.varValue or 0.0) for v in x])
    return Outcome(values, objective * (1 - effort.gap) if optimal else 0.0, optimal)
