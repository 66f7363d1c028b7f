"""Dropout's masks, drawn in the forward as eager mode draws them wherever the bits are not kept and there is memory.

In the graphs a mask is made of bits (see ``rkgb.probe.decompose``), for a plan to keep these alone. Eager mode draws
the numbers of the mask at once. That is a pass over them less; but for the moment of the draw the numbers lie beside
what drawing takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from rkgb.graphs import Ref, S_graph
from rkgb.probe.decompose import DRAWN, MASK
from rockmate.run.program import NodeCode, Program
from solvers import Problem, Schedule
from solvers.schedule import Loss, Run


def draw_whole(program: Program, problem: Problem, schedule: Schedule, levels: Sequence[int]) -> Program:
    """``program``, in whose forward masks of which nobody keeps bits are drawn whole, within the peak of ``levels``.

    ``levels``: bytes, those of the schedule's walk. Second runs stay as they were: they make a mask of its bits.
    """
    peak = max(levels, default=0)
    at = {step.node: k for k, step in enumerate(schedule[: schedule.index(Loss())]) if isinstance(step, Run)}
    nodes = list(program.nodes)
    for i, j in itertools.pairwise(range(len(nodes))):
        drawn = _makes_mask(program.s, i, j) and not nodes[i].made
        if drawn and _needed(problem, levels, at[i], at[j], i, j) <= peak:
            nodes[i], nodes[j] = _whole(nodes[i], nodes[j])
    return replace(program, nodes=tuple(nodes))


def _makes_mask(s: S_graph, i: int, j: int) -> bool:
    """Whether node i draws bits, and node j makes a mask of them."""
    return _names(s, i) == DRAWN and _names(s, j) == MASK and s.nodes[j].reads == s.nodes[i].makes


def _names(s: S_graph, i: int) -> tuple[str, ...]:
    return tuple(s.d.nodes[op].name for op in s.nodes[i].ops)


def _needed(problem: Problem, levels: Sequence[int], first: int, then: int, i: int, j: int) -> int:
    """Bytes from the draw (step ``first``) to the mask (step ``then``), whose memory is there all the while."""
    bits, mask = (sum(problem.data[d].size for d in problem.nodes[n].makes) for n in (i, j))
    drawing = problem.nodes[i].peak - bits
    before = levels[first] - problem.nodes[i].peak
    return max(before + mask + drawing, *(mask + level for level in levels[first + 1 : then]), 0)


def _whole(bits: NodeCode, mask: NodeCode) -> tuple[NodeCode, NodeCode]:
    """Both with other operations in the forward, and no bits."""
    (empty, draw), (cast, divide) = bits.first.ops, mask.first.ops
    ops = (
        replace(empty, kwargs=empty.kwargs | cast.kwargs, outputs=cast.outputs),
        replace(draw, args=(Ref(cast.outputs[0]), *draw.args[1:]), outputs=cast.outputs),
    )
    dead = (*mask.first.dead_values, *cast.outputs)  # what was drawn is read by the mask's node alone
    first = replace(mask.first, ops=(divide,), dead_values=dead)
    return replace(bits, first=replace(bits.first, ops=ops)), replace(mask, first=first)
