"""The staged integer program of one block, built once and solved for many limits on saved bytes and peak.

The class of schedules: the forward phase runs every node once. Stage ``s`` ends with the s-th backward ``b(s)`` in
backward order. Before it, nodes may run again that lead to what ``b(s)`` reads, each at most once in the stage and in
forward order. Groups of nodes with one of ``leaders`` run together. The optimum within this class is exact. Variables
exist only where they can be useful:

- ``R[s,i]`` in {0,1}: node i runs again in stage s; nodes of one group share it;
- ``P[s,d]`` in {0,1}: datum d is live at the start of stage s, so ``P[0,.]`` is what is saved;
- ``L[s,d,u]`` in {0,1}: d is live in stage s up to its reader u. Continuous variables would do, but integer ones give
  stronger cuts.

Constraints, by the names they have in the model::

    retain[s,d]   P[s+1,d] <= P[s,d] + R[s,owner(d)]
    once[s,d]     P[s,d] + R[s,owner(d)] <= 1               an older copy would be useless
    input[s,i,d]  R[s,i] <= P[s,d] + R[s,owner(d)]          d read by i
    need[s,d]     1 <= P[s,d] + R[s,owner(d)]               d read by b(s)
    use[s,i]      R[s,i] <= sum R[s,u] + sum P[s+1,d]       d made by i, u a reader of d; unless b(s) reads one
    live[s,d,u]   L[s,d,u] >= R[s,u]
    until[s,d,u]  L[s,d,u] >= L[s,d,next reader], or P[s+1,d] after the last one
    save          sum size(d) P[0,d] <= save                interface data not counted
    run[s,i]      sum size(d) live(s,d,i) + peak(i) R[s,i] <= peak - before(s)
    bwd[s]        sum size(d) live(s,d,b(s)) <= peak - peak(s)

``use`` excludes only schedules with useless runs; it makes the linear relaxation tighter. In a *fresh* model nothing is
live at the start of stage 0, not even the interface.

Source: a staged formulation of this project, after Checkmate (Jain et al., 2020).
"""

from __future__ import annotations

from solvers.block.block import BlockView, Solved, option
from solvers.block.useful import useful_nodes
from solvers.milp.memory_program import MemoryProgram
from solvers.milp.options import SolverOptions

Terms = list[tuple[int, int]]


def leaders(view: BlockView) -> tuple[int, ...]:
    """For each node of ``view``, the node that it always runs with; itself if it has no leader.

    Node i runs with its *leader* j if j (or its group) alone reads the data of i, neither a backward nor a later block
    reads them, and the data of j take no more bytes. Keeping the data of i for a later run of j is then no better than
    keeping the data of j. Attention's scale, mask and softmax run together, as do a projection, its dropout and the
    residual sum. Memory is still counted for each node.

    Without a limit on the peak, no optimum is lost. With one, schedules are excluded in which i runs in a stage for the
    use of j in a later stage.
    """
    kept = set().union(view.interface, *(stage.reads for stage in view.stages))
    readers: list[set[int]] = [set() for _ in view.sizes]
    for i, node in enumerate(view.nodes):
        for d in node.reads:
            readers[d].add(i)
    leader = list(range(len(view.nodes)))
    for i in reversed(range(len(view.nodes))):
        node = view.nodes[i]
        if not node.rerun or not node.makes or not kept.isdisjoint(node.makes):
            continue
        of_data = {leader[u] for d in node.makes for u in readers[d]}
        if len(of_data) == 1:
            (j,) = of_data
            passed = sum(view.sizes[d] for d in node.makes if readers[d])
            if view.nodes[j].rerun and sum(view.sizes[d] for d in view.nodes[j].makes) <= passed:
                leader[i] = j
    return tuple(leader)


class StagedModel:
    """The program of one block. ``solve`` may be called any number of times.

    ``merge=False``: no groups, so that any node may run in any stage that it leads to.
    """

    def __init__(self, view: BlockView, fresh: bool = False, merge: bool = True) -> None:
        self.view = view
        self.useful = useful_nodes(view)
        self.leader = leaders(view) if merge else tuple(range(len(view.nodes)))
        self.lp = MemoryProgram((*view.sizes, *(n.peak for n in view.nodes)), (n.time for n in view.nodes))
        self.R = self._runs()
        self.P = self._kept(fresh)
        self.L: dict[tuple[int, int, int], int] = {}
        self.left_out: dict[str, int] = {}
        for s in range(len(view.stages)):
            self._add_sources(s)
            self._add_liveness(s)
            self._add_use(s)
            self._add_memory(s)
        saved = self.useful[0][1] - view.interface if self.useful else set()
        self.lp.memory_row("save", [(self.P[0, d], view.sizes[d]) for d in sorted(saved) if (0, d) in self.P])

    def _runs(self) -> dict[tuple[int, int], int]:
        """The columns R. That of a group costs the time of all its nodes."""
        runs: dict[tuple[int, int], int] = {}
        time = [0] * len(self.view.nodes)
        for i, node in enumerate(self.view.nodes):
            time[self.leader[i]] += node.time
        for s, (nodes, _) in enumerate(self.useful):
            for i in nodes:
                if self.leader[i] == i:
                    runs[s, i] = self.lp.column(time[i])
            for i in nodes:
                runs[s, i] = runs[s, self.leader[i]]
        return runs

    def _kept(self, fresh: bool) -> dict[tuple[int, int], int]:
        """The columns P. If nothing can run in a stage, the same data are live at its start and end: one column."""
        kept: dict[tuple[int, int], int] = {}
        for s, (_, data) in enumerate(self.useful):
            same = s > 0 and not self.useful[s - 1][0]
            for d in sorted(data):
                owner = self.view.owners[d]
                if self.leader[owner] != owner:
                    continue
                if same and (s - 1, d) in kept:
                    kept[s, d] = kept[s - 1, d]
                elif not same and (s or not fresh):
                    kept[s, d] = self.lp.column()
        return kept

    def _available(self, s: int, d: int) -> list[int]:
        """The columns of which one is 1 if d is live in stage s."""
        return [c for c in (self.R.get((s, self.view.owners[d])), self.P.get((s, d))) if c is not None]

    def _add_sources(self, s: int) -> None:
        """Rows retain, once, input and need: what is live or read was kept or made."""
        view = self.view
        nodes, data = self.useful[s]
        for d in sorted(data) if nodes else ():
            if (s, d) in self.P:
                self.lp.at_most_one(f"once_{s}_{d}", self._available(s, d))
            if (s + 1, d) in self.P:
                self.lp.at_least(f"retain_{s}_{d}", self._available(s, d), [self.P[s + 1, d]])
        for i in nodes:
            for d in view.nodes[i].reads:
                available = self._available(s, d)
                if self.R[s, i] not in available:
                    self.lp.at_least(f"input_{s}_{i}_{d}", available, [self.R[s, i]])
        for d in sorted(view.stages[s].reads):
            self.lp.at_least(f"need_{s}_{d}", self._available(s, d), [], 1)

    def _add_liveness(self, s: int) -> None:
        """Rows live and until: a datum is live until its last reader in the stage, or until the next stage."""
        nodes, data = self.useful[s]
        for d in sorted(data - self.view.stages[s].reads):
            later = self.P.get((s + 1, d))
            for u in reversed([i for i in nodes if d in self.view.nodes[i].reads]):
                reader = self.R[s, u]
                if later is not None and later != reader:
                    until = self.lp.column()
                    self.lp.at_least(f"live_{s}_{d}_{u}", [until], [reader])
                    self.lp.at_least(f"until_{s}_{d}_{u}", [until], [later])
                    later = until
                else:
                    later = reader
                self.L[s, d, u] = later

    def _add_use(self, s: int) -> None:
        """Rows use: what runs again has a reader."""
        nodes, _ = self.useful[s]
        for i in nodes:
            makes = set(self.view.nodes[i].makes)
            if self.leader[i] != i or not makes.isdisjoint(self.view.stages[s].reads):
                continue
            users = {self.R[s, u] for u in nodes if not makes.isdisjoint(self.view.nodes[u].reads)}
            users |= {self.P[s + 1, d] for d in makes if (s + 1, d) in self.P}
            self.lp.at_least(f"use_{s}_{i}", sorted(users), [self.R[s, i]])

    def _live(self, s: int, k: int) -> tuple[Terms, int]:
        """Data live in stage s just before node k (k = n: the backward): (column, bytes) each, and constant bytes."""
        terms: Terms = []
        constant = 0
        nodes, data = self.useful[s]
        for d in sorted(data):
            owner, size = self.view.owners[d], self.view.sizes[d]
            readers = [u for u in nodes if u >= k and (s, d, u) in self.L]
            if owner == k:
                continue
            if owner > k:
                column = self.P.get((s, d))
            elif d in self.view.stages[s].reads:
                constant += size
                continue
            else:
                column = self.L[s, d, readers[0]] if readers else self.P.get((s + 1, d))
            if column is not None:
                terms.append((column, size))
        return terms, constant

    def _add_memory(self, s: int) -> None:
        """Rows run and bwd. ``left_out``: per row, the constant bytes to subtract from its limit."""
        stage = self.view.stages[s]
        for i in self.useful[s][0]:
            terms, constant = self._live(s, i)
            self.lp.memory_row(f"run_{s}_{i}", [*terms, (self.R[s, i], self.view.nodes[i].peak)])
            self.left_out[f"run_{s}_{i}"] = constant + stage.before
        terms, constant = self._live(s, len(self.view.nodes))
        self.lp.memory_row(f"bwd_{s}", terms)
        self.left_out[f"bwd_{s}"] = constant + stage.peak

    def solve(self, save: int, peak: int, options: SolverOptions) -> Solved | None:
        """The cheapest reruns with at most ``save`` and ``peak`` bytes; None if it is proven that there are none.

        Raises ``TimeoutError`` if the solver stops at its time limit without a solution.
        """
        limits = {"save": save, **{name: peak - left_out for name, left_out in self.left_out.items()}}
        found = self.lp.solve(limits, options)
        if found is None:
            return None
        runs = tuple(tuple(i for i in nodes if self.R[s, i] in found.ones) for s, (nodes, _) in enumerate(self.useful))
        return Solved(option(self.view, runs, found.optimal, found.bound), found.searched)
