"""From the choices of the chain's table to an order of steps.

Nodes without counted data do not run again with their block: their data are always live.
"""

from __future__ import annotations

from solvers.block.block import counted
from solvers.block.ilp import Option
from solvers.chain.table import ChainTable
from solvers.problem import Problem
from solvers.schedule import Bwd, Loss, Run, Step


def expand(problem: Problem, table: ChainTable, m: int) -> list[Step]:
    """The order of steps that the table chooses for ``m`` slots."""
    out: list[Step] = []
    _expand_top(problem, table, m, out)
    return out


def _expand_top(problem: Problem, table: ChainTable, m: int, out: list[Step]) -> None:
    later: list[tuple[int, int, int, int | None]] = []
    i = 0
    while i < table.costs.blocks:
        option, k, left = table.top_choice(i, m)
        out += [Run(n) for n in range(problem.blocks[i].start, problem.blocks[k - 1].stop)]
        later.append((i, k - 1, m, option))
        i, m = k, left
    out.append(Loss())
    for first, last, memory, option in reversed(later):
        if option is None:
            _expand_inner(problem, table, first, last, memory, out)
        else:
            _expand_backward(problem, first, table.costs.options[first][option], out)


def _expand_inner(problem: Problem, table: ChainTable, first: int, last: int, memory: int, out: list[Step]) -> None:
    """Append reruns and backwards of blocks ``first`` to ``last``. Without recursion, since chains may be long."""
    todo: list[tuple[int, int, int] | tuple[int, Option]] = [(first, last, memory)]
    while todo:
        item = todo.pop()
        if len(item) == 2:
            _expand_backward(problem, *item, out)
            continue
        i, j, m = item
        choice, k, left = table.inner_choice(i, j, m)
        option = None if choice is None else table.costs.options[i][choice]
        if not (option and option.fresh and i == j):
            span = range(problem.blocks[i].start, problem.blocks[k - 1].stop)
            out += [Run(n) for n in span if any(counted(problem, d) for d in problem.nodes[n].makes)]
        todo.append((i, option) if option else (i, k - 1, m))
        if k <= j:
            todo.append((k, j, left))


def _expand_backward(problem: Problem, block: int, option: Option, out: list[Step]) -> None:
    start, stop = problem.blocks[block].start, problem.blocks[block].stop
    backwards = [n for n in reversed(range(start, stop)) if problem.nodes[n].backward]
    for runs, node in zip(option.runs, backwards, strict=True):
        out += [Run(start + i) for i in runs]
        out.append(Bwd(node))
