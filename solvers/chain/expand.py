"""From the choices of the chain's table to an order of steps.

Nodes without counted data do not run again with their block: their data are always live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from solvers.block.block import counted
from solvers.chain.table import ChainTable
from solvers.problem import Problem
from solvers.schedule import Bwd, Loss, Run, Step

Choose = Callable[[int, int, int], tuple[int | None, int, int]]
"""(i, j, m) -> (option, i+1), or (None, k) to keep the input of i and go on from k, and what is left of m from there.

It is for blocks i..j with m slots beyond that input; in the first forward phase, which ends with the loss, j is their
number.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """For blocks i..j: ``option`` of block i = k-1, or None to pass blocks i..k-1. ``backward``: it is the turn of this
    block's backward, otherwise that of a forward. Where i is the number of blocks, the loss.
    """

    i: int
    j: int
    k: int
    option: int | None
    backward: bool = False


def choices(length: int, choose: Choose, m: int) -> Iterator[Choice]:
    """The choices for ``m`` slots, in the order of a step. Without recursion, since chains may be long."""
    todo: list[Choice | tuple[int, int, int]] = [(0, length, m)]
    while todo:
        item = todo.pop()
        if isinstance(item, Choice):
            yield item
            continue
        i, j, m = item
        if i == length == j:
            yield Choice(i, j, i, None)
        elif i <= j:
            option, k, left = choose(i, j, m)
            yield Choice(i, j, k, option)
            todo += [(i, k - 1, m) if option is None else Choice(i, j, k, option, backward=True), (k, j, left)]


def expand(problem: Problem, table: ChainTable, m: int) -> list[Step]:
    """The order of steps that the table chooses for ``m`` slots."""
    out: list[Step] = []
    count, nodes = table.costs.blocks, problem.nodes
    for c in choices(count, table.choice, m):
        if c.i == count:
            out.append(Loss())
            continue
        option = None if c.option is None else table.costs.options[c.i][c.option]
        span = range(problem.blocks[c.i].start, problem.blocks[c.k - 1].stop)
        if c.backward and option:
            for runs, node in zip(option.runs, (n for n in reversed(span) if nodes[n].backward), strict=True):
                out += [*(Run(span.start + i) for i in runs), Bwd(node)]
        elif c.j == count:
            out += map(Run, span)
        elif not (option and option.fresh and c.i == c.j):
            out += [Run(n) for n in span if any(counted(problem, d) for d in nodes[n].makes)]
    return out
