"""The integer program of a block without a limit on its peak: which data to save, so that reruns take least time.

Without that limit, a node runs again at most once, right before its data are first read, and they stay. So the program
has one variable for each node and one for each datum. It is a knapsack with precedence:

- ``R[i]`` in {0,1}: node i runs again;
- ``P[d]`` in {0,1}: datum d is kept from the forward phase.

With rows by their names::

    minimise       sum time(i) R[i]
    need[d]        1 <= P[d] + R[owner(d)]             d read by a backward
    input[i,d]     R[i] <= P[d] + R[owner(d)]          d read by i
    save           sum size(d) P[d] <= save            interface data not counted: the chain stores them

Its optimum is that of ``solvers.block.ilp_model`` without a limit on the peak. It has a twentieth of the variables.
"""

from __future__ import annotations

from solvers.block.block import BlockView, Solved, option
from solvers.block.useful import ancestors, late_runs
from solvers.milp.memory_program import MemoryProgram
from solvers.milp.options import SolverOptions


class ClosureModel:
    """The program of one block. ``solve`` may be called any number of times."""

    def __init__(self, view: BlockView) -> None:
        self.view = view
        self.lp = MemoryProgram(view.sizes, (n.time for n in view.nodes))
        read = set().union(*(stage.reads for stage in view.stages))
        nodes, data = ancestors(view, len(view.nodes) - 1, set(read))
        self.R = {i: self.lp.column(view.nodes[i].time) for i in nodes}
        self.P = {d: self.lp.column() for d in sorted(data)}
        for d in sorted(read):
            self.lp.at_least(f"need_{d}", [self.P[d], self.R[view.owners[d]]], [], 1)
        for i in nodes:
            for d in view.nodes[i].reads:
                self.lp.at_least(f"input_{i}_{d}", [self.P[d], self.R[view.owners[d]]], [self.R[i]])
        self.lp.memory_row("save", [(self.P[d], view.sizes[d]) for d in sorted(data - view.interface)])

    def solve(self, save: int, options: SolverOptions) -> Solved:
        """The cheapest reruns with at most ``save`` bytes saved; ``TimeoutError`` if the solver finds none in time."""
        found = self.lp.solve({"save": save}, options)
        assert found is not None, "running everything again needs no bytes saved"
        chosen = {i for i, column in self.R.items() if column in found.ones}
        runs = late_runs(self.view, chosen)
        return Solved(option(self.view, runs, found.optimal, found.bound), found.searched)
