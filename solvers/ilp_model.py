"""The staged integer program of one block, built once and solved for many (save, peak).

The forward phase runs every node once. Stage ``s`` ends with the s-th backward ``b(s)`` in backward
order, before which nodes may run again, each at most once per stage and in forward order, and only if
they lead to what ``b(s)`` reads. That is the class of schedules in which the optimum is exact.
Variables (each exists only where it can be useful):

- ``R[s,i]`` in {0,1}: node i runs again in stage s;
- ``P[s,d]`` in {0,1}: datum d is live at the start of stage s, so ``P[0,.]`` is what is saved;
- ``L[s,d,u]`` in {0,1}: d is live in stage s up to its reader u. Continuous would do, but integer
  rows give stronger cuts.

Constraints, by the names they have in the model::

    retain[s,d]   P[s+1,d] <= P[s,d] + R[s,owner(d)]
    once[s,d]     P[s,d] + R[s,owner(d)] <= 1               an old copy would be of no use
    input[s,i,d]  R[s,i] <= P[s,d] + R[s,owner(d)]          d read by i
    need[s,d]     1 <= P[s,d] + R[s,owner(d)]               d read by b(s)
    live[s,d,u]   L[s,d,u] >= R[s,u]
    until[s,d,u]  L[s,d,u] >= L[s,d,next reader], or P[s+1,d] after the last one
    save          sum size(d) P[0,d] <= save                interface data not counted
    run[s,i]      sum size(d) live(s,d,i) + peak(i) R[s,i] <= peak - before(s)
    bwd[s]        sum size(d) live(s,d,b(s)) <= peak - peak(s)

Source: staged formulation of this project (``DESIGN`` section 5), after Checkmate (Jain et al., 2020).
In a *fresh* model nothing at all is live at stage 0, not even the interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import pulp

from solvers.block import BlockView, Figures, figures
from solvers.contract import Contraction, contract
from solvers.highs import highspy

HIGHS_SETTINGS: dict[str, Any] = {"mip_heuristic_effort": 0.0, "mip_pscost_minreliable": 1}
"""Measured on transformer layers: these programs need cuts and branching, heuristics do not pay."""

MAX_UNITS = 10**6
"""Largest sum of sizes in units; larger ones make rows fractions of a coarser unit."""

MAX_CUTS = 50
"""Solves for one point before it is given up; one is the rule."""

Term = tuple[pulp.LpVariable, int]


@dataclass(frozen=True, slots=True)
class Solved:
    """The best found for one (save, peak): its figures, a lower bound on time (ns), proven optimal or not."""

    figures: Figures
    bound: float
    optimal: bool


@dataclass(frozen=True, slots=True)
class SolverOptions:
    """``name``: a PuLP solver name. ``gap``: relative gap to stop at. ``time_limit``: seconds per solve."""

    name: str = "HiGHS"
    gap: float = 1e-3
    time_limit: float = 10.0


def useful_nodes(view: BlockView) -> list[tuple[list[int], set[int]]]:
    """Per stage: nodes whose rerun leads to what its backward reads, and data that can serve it or a later one."""
    result: list[tuple[list[int], set[int]]] = []
    for s, stage in enumerate(view.stages):
        nodes, _ = _makers(view, stage.node, set(stage.reads))
        _, data = _makers(view, stage.node, set().union(*(later.reads for later in view.stages[s:])))
        result.append((nodes, data))
    return result


def _makers(view: BlockView, last: int, data: set[int]) -> tuple[list[int], set[int]]:
    """The nodes up to ``last`` that ``data`` are made by, directly or not, and all that they read and make of it."""
    nodes = []
    for i in range(last, -1, -1):
        if not data.isdisjoint(view.nodes[i].makes):
            nodes.append(i)
            data.update(view.nodes[i].reads)
    return nodes[::-1], data


def _unit(view: BlockView) -> int:
    """Bytes per unit of the model: the common divisor, for integer rows, unless numbers would be too large.

    With numbers up to MAX_UNITS, one byte of a terabyte is still as large as the solver's tolerance.
    """
    total = sum(view.sizes)
    divisor = gcd(*view.sizes, *(n.peak for n in view.nodes)) or 1
    return max(divisor, -(-total // MAX_UNITS))


class StagedModel:
    """The program of one block. ``solve`` may be called any number of times.

    ``merge``: solve the contracted block, which is much faster. Its optimum is exact where the peak is
    not limited; with a limit it may miss a cheaper way, since a merged node holds its inputs to its end,
    and what it finds is not called optimal.
    """

    def __init__(self, view: BlockView, fresh: bool, options: SolverOptions, merge: bool = False) -> None:
        self.original, self.merge = view, merge
        self.contraction = contract(view) if merge else Contraction.trivial(view)
        self.view = view = self.contraction.view
        self.options = options
        self.useful = useful_nodes(view)
        self.unit = _unit(view)
        self._whole = all(size % self.unit == 0 for size in (*view.sizes, *(n.peak for n in view.nodes)))
        self.time_unit = max(1.0, sum(n.time for n in view.nodes) / 1000)
        self.lp = pulp.LpProblem("block", pulp.LpMinimize)
        stages = list(enumerate(self.useful))
        self.R = {(s, i): self._binary(f"R_{s}_{i}") for s, (nodes, _) in stages for i in nodes}
        self.P = self._kept(fresh)
        self.L: dict[tuple[int, int, int], pulp.LpVariable] = {}
        self.rows: dict[str, Any] = {}
        self.cuts: list[tuple[str, int, int]] = []  # name, row in HiGHS, number of variables
        self.memory_rows: list[tuple[str, int]] = []
        self.exact: dict[str, dict[pulp.LpVariable, int]] = {}
        self.lp += pulp.lpSum(view.nodes[i].time / self.time_unit * r for (_, i), r in self.R.items())
        for s in range(len(view.stages)):
            self._add_sources(s)
            self._add_liveness(s)
            self._add_memory(s)
        saved = [(self.P[0, d], view.sizes[d]) for d in self.useful[0][1] - view.interface] if not fresh else []
        self._add_bytes("save", saved)
        self._highs: Any = None

    def _kept(self, fresh: bool) -> dict[tuple[int, int], pulp.LpVariable]:
        """P. Where nothing runs in a stage, what is live at its start and end is the same: one variable."""
        kept: dict[tuple[int, int], pulp.LpVariable] = {}
        for s, (_, data) in enumerate(self.useful):
            same = s > 0 and not self.useful[s - 1][0]
            for d in sorted(data):
                if same and (s - 1, d) in kept:
                    kept[s, d] = kept[s - 1, d]
                elif not same and (s or not fresh):
                    kept[s, d] = self._binary(f"P_{s}_{d}")
        return kept

    def _binary(self, name: str) -> pulp.LpVariable:
        return self.lp.add_variable(name, cat=pulp.LpBinary)

    def _add(self, name: str, row: Any) -> None:
        self.rows[name] = row
        self.lp.addConstraint(row, name)

    def _add_bytes(self, name: str, terms: list[Term]) -> None:
        """A row on memory; its limit is set at each solve. ``exact`` keeps it in bytes."""
        sizes: dict[pulp.LpVariable, int] = {}
        for variable, size in terms:
            sizes[variable] = sizes.get(variable, 0) + size
        self.exact[name] = sizes
        scaled = pulp.LpAffineExpression({variable: size / self.unit for variable, size in sizes.items()})
        self._add(name, scaled <= 0)

    def _limit(self, size: int) -> float:
        """``size`` as a right-hand side: whole units when all coefficients are."""
        return size // self.unit if self._whole else size / self.unit

    def _add_sources(self, s: int) -> None:
        """Rows retain, once, input and need: data come from somewhere."""
        view, stage = self.view, self.view.stages[s]
        nodes, data = self.useful[s]
        available = {d: self.R.get((s, view.owners[d]), 0) + self.P.get((s, d), 0) for d in data}
        for d in sorted(data):
            if (s, d) in self.P and nodes:
                self._add(f"once_{s}_{d}", available[d] <= 1)
            if (s + 1, d) in self.P and nodes:
                self._add(f"retain_{s}_{d}", self.P[s + 1, d] <= available[d])
        for i in nodes:
            for d in view.nodes[i].reads:
                self._add(f"input_{s}_{i}_{d}", self.R[s, i] <= available[d])
        for d in sorted(stage.reads):
            self._add(f"need_{s}_{d}", available[d] >= 1)

    def _add_liveness(self, s: int) -> None:
        """Rows live and until: a datum stays until its last reader in the stage, or into the next stage."""
        nodes, data = self.useful[s]
        for d in sorted(data - self.view.stages[s].reads):
            later = self.P.get((s + 1, d))
            for u in reversed([i for i in nodes if d in self.view.nodes[i].reads]):
                if later is None:
                    later = self.L[s, d, u] = self.R[s, u]
                    continue
                until = self._binary(f"L_{s}_{d}_{u}")
                self._add(f"live_{s}_{d}_{u}", until >= self.R[s, u])
                self._add(f"until_{s}_{d}_{u}", until >= later)
                later = self.L[s, d, u] = until

    def _live(self, s: int, k: int) -> tuple[list[Term], int]:
        """Data live in stage s just before node k (node count: before the backward): terms, and constant bytes."""
        terms: list[Term] = []
        constant = 0
        nodes, data = self.useful[s]
        for d in sorted(data):
            owner, size = self.view.owners[d], self.view.sizes[d]
            readers = [u for u in nodes if u >= k and (s, d, u) in self.L]
            if owner == k:
                continue
            if owner > k:
                variable = self.P.get((s, d))
            elif d in self.view.stages[s].reads:
                constant += size
                continue
            else:
                variable = self.L[s, d, readers[0]] if readers else self.P.get((s + 1, d))
            if variable is not None:
                terms.append((variable, size))
        return terms, constant

    def _add_memory(self, s: int) -> None:
        """Rows run and bwd; ``memory_rows`` holds what each leaves out of its right-hand side."""
        stage = self.view.stages[s]
        for i in self.useful[s][0]:
            terms, constant = self._live(s, i)
            terms.append((self.R[s, i], self.view.nodes[i].peak))
            self._add_bytes(f"run_{s}_{i}", terms)
            self.memory_rows.append((f"run_{s}_{i}", constant + stage.before))
        terms, constant = self._live(s, len(self.view.nodes))
        self._add_bytes(f"bwd_{s}", terms)
        self.memory_rows.append((f"bwd_{s}", constant + stage.peak))

    def solve(self, save: int, peak: int | None) -> Solved | None:
        """The cheapest reruns with at most ``save`` and ``peak`` bytes; None if there provably are none.

        ``peak=None``: no limit. The solver works in floating point, so what it returns is checked in bytes.
        Where it overstepped a row, the variables at 1 that overstep it together are forbidden together (a
        cover cut, valid for these limits), and it solves again. ``TimeoutError`` if
        it stops at its limit without a solution.
        """
        free = (
            sum(self.view.sizes)
            + sum(n.peak for n in self.view.nodes)
            + max((s.peak for s in self.view.stages), default=0)
        )
        exact = peak is None or not self.merge
        peak = free if peak is None else peak
        if not self.R:
            found = figures(self.original, ((),) * len(self.view.stages))
            return Solved(found, 0.0, True) if found.backward_peak <= peak else None
        limits = {"save": save, **{name: peak - left_out for name, left_out in self.memory_rows}}
        try:
            for _ in range(MAX_CUTS):
                answer = self._optimise(limits)
                if answer is None:
                    return None
                values, bound, optimal = answer
                over = self._overstepped(values, limits)
                if not over:
                    return self._solved(values, bound, optimal and exact, save, peak)
                for cover in over:
                    self._forbid(cover)
        finally:
            self._forget_cuts()
        raise TimeoutError("no solution passed the check in bytes")

    def _overstepped(self, values: dict[str, float], limits: dict[str, int]) -> list[list[pulp.LpVariable]]:
        found = []
        for name, limit in limits.items():
            taken = [v for v in self.exact[name] if values[v.name] > 0.5]
            if taken and sum(self.exact[name][v] for v in taken) > limit:
                found.append(taken)
        return found

    def _solved(self, values: dict[str, float], bound: float, optimal: bool, save: int, peak: int) -> Solved:
        runs = tuple(
            tuple(i for i in nodes if values[self.R[s, i].name] > 0.5) for s, (nodes, _) in enumerate(self.useful)
        )
        found = figures(self.original, self.contraction.expand(runs))
        if found.save > save or found.backward_peak > peak:
            raise TimeoutError("the solution does not fit when its merged nodes are told apart")
        return Solved(found, min(bound * self.time_unit, found.time), optimal)

    def _forbid(self, cover: list[pulp.LpVariable]) -> None:
        name = f"cut_{len(self.rows)}"
        self._add(name, pulp.lpSum(cover) <= len(cover) - 1)
        row = -1
        if self._highs is not None:
            columns = [v.index for v in cover]
            self._highs.addRow(-highspy.kHighsInf, len(cover) - 1, len(cover), columns, [1.0] * len(cover))
            row = self._highs.getNumRow() - 1
        self.cuts.append((name, row, len(cover)))

    def _forget_cuts(self) -> None:
        """The cuts hold for one set of limits only: make them say nothing."""
        for name, row, size in self.cuts:
            self.rows[name].changeRHS(size)
            if self._highs is not None:
                self._highs.changeRowBounds(row, -highspy.kHighsInf, size)
        self.cuts.clear()

    def _optimise(self, limits: dict[str, int]) -> tuple[dict[str, float], float, bool] | None:
        scaled = {name: self._limit(limit) for name, limit in limits.items()}
        return self._run_highs(scaled) if self.options.name == "HiGHS" else self._run_other(scaled)

    def _run_other(self, limits: dict[str, float]) -> tuple[dict[str, float], float, bool] | None:
        """Any PuLP solver: the model is handed over anew at every solve."""
        for name, limit in limits.items():
            self.rows[name].changeRHS(limit)
        solver = pulp.getSolver(
            self.options.name, msg=False, timeLimit=self.options.time_limit, gapRel=self.options.gap
        )
        self.lp.solve(solver)
        if self.lp.sol_status == pulp.LpSolutionInfeasible:
            return None
        if self.lp.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
            raise TimeoutError(f"{self.options.name} found no solution in {self.options.time_limit} s")
        optimal = self.lp.sol_status == pulp.LpSolutionOptimal
        values = {v.name: float(v.varValue or 0) for v in self.lp.variables()}
        objective = float(pulp.value(self.lp.objective) or 0)
        return values, objective * (1 - self.options.gap) if optimal else 0.0, optimal

    def _run_highs(self, limits: dict[str, float]) -> tuple[dict[str, float], float, bool] | None:
        """HiGHS, kept between solves: PuLP builds its model once, then only right-hand sides change."""
        unbounded = -highspy.kHighsInf
        if self._highs is None:
            solver = pulp.HiGHS(
                msg=False, threads=1, timeLimit=self.options.time_limit, gapRel=self.options.gap, **HIGHS_SETTINGS
            )
            solver.createAndConfigureSolver(self.lp)
            solver.buildSolverModel(self.lp)
            self._highs = self.lp.solverModel
        highs = self._highs
        for name, limit in limits.items():
            highs.changeRowBounds(self.rows[name].index, unbounded, limit)
        highs.run()
        status, info = highs.getModelStatus(), highs.getInfo()
        if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
            return None
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            raise TimeoutError(f"HiGHS found no solution in {self.options.time_limit} s")
        values = highs.getSolution().col_value
        named = {v.name: values[v.index] for v in self.lp.variables()}
        return named, info.mip_dual_bound, status == highspy.HighsModelStatus.kOptimal
