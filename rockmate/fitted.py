"""Steps at sizes that never ran, fitted to steps that were measured at a few small sizes.

Each figure of each operation is fitted alone: the bytes of a result, the peak of a kernel. Such a figure is nearly
always affine in the size, or quadratic (attention over a length). The peak of a step is no such function, since it is
the largest of many sums; it is computed from the fitted figures as from measured ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from math import ceil

import torch

from rkgb.cost.convolutions import convolution_kernels
from rkgb.graphs import D_graph
from rkgb.probe.skeleton import skeleton
from rockmate.follow.known import Known
from rockmate.follow.plan import eager_peak_of, find_least, moment_of
from rockmate.planning.planner import Planner
from rockmate.progress import Report, part_of
from solvers import Backward, Bwd, ChainPlanner, Loss, Node, Problem, Run, Schedule, Step

FEWEST = 3
"""The fewest sizes at which a step must be measured. Two points always lie on a line, so they cannot confirm one."""

POWERS = (1, 2, 3, 4)
"""Powers of the size that figures may grow with: images grow with its square, attention over their patches with its
fourth power."""


def fitted(sizes: Sequence[int], seen: Sequence[int], now: int, growth: Fraction) -> tuple[int, bool]:
    """(the figure at the size ``now``, whether a function gives it), from the figures ``seen`` at rising ``sizes``.

    First a line through the last three points is tried, over the size or a power of it. Earlier points may lie off the
    line: a figure is often the larger of two, and another one was larger at small sizes. Then a parabola through all
    points. Otherwise the figure is estimated: between two sizes it is interpolated; beyond them it is the last figure
    times ``growth``, by which the values around it grow, or along the last slope if that gives more.
    """
    if now in sizes:
        return seen[sizes.index(now)], True
    whole = seen[-FEWEST:] if now > sizes[-1] else seen
    for power in POWERS:
        at = [x**power for x in sizes[-len(whole) :]]
        slope = Fraction(whole[-1] - whole[0], at[-1] - at[0])
        if all(whole[0] + slope * (x - at[0]) == y for x, y in zip(at, whole, strict=True)):
            return max(0, ceil(whole[0] + slope * (now**power - at[0]))), True
    slopes = [Fraction(b - a, y - x) for x, y, a, b in zip(sizes, sizes[1:], seen, seen[1:], strict=False)]
    bends = [(b - a) / (y - x) for x, y, a, b in zip(sizes, sizes[2:], slopes, slopes[1:], strict=False)]
    if len(bends) > 1 and len(set(bends)) == 1:
        return max(0, ceil(seen[-1] + (now - sizes[-1]) * (slopes[-1] + bends[-1] * (now - sizes[-2])))), True
    if now < sizes[-1]:  # between two points
        k = max(0, sum(x < now for x in sizes) - 1)
        return ceil(seen[k] + slopes[k] * (now - sizes[k])), False
    return ceil(max(seen[-1] * growth, seen[-1] + slopes[-1] * (now - sizes[-1]))), False


@dataclass(frozen=True, eq=False)
class Point:
    """A step of one ``size``, measured; memory in bytes.

    ``usual``: the ``problem`` with the loss that predictions are for. ``reserved``: taken off each budget; ``beside``:
    added to each prediction. ``form``: equal where figures are functions of the size. ``name_of``: a step of a
    schedule. ``least``: the smallest budget of a plan of a problem of this form, and its schedule. ``d``: the graph;
    None of what is followed.
    """

    size: int
    problem: Problem
    usual: Problem
    reserved: int
    beside: int
    form: tuple[object, ...]
    device: torch.device
    name_of: Callable[[Step], str]
    least: Callable[[Problem, Report], tuple[int, Schedule]]
    d: D_graph | None = None


def point_of(size: int, measured: Planner | Known) -> Point:
    """A size that was measured: a captured graph, or a followed step."""
    if isinstance(measured, Known):
        return _of_followed(size, measured)
    graphs, problem = measured.graphs, measured.problem
    return Point(
        size,
        problem,
        measured.usual_problem,
        measured.reserved,
        measured.beside_predicted,
        (skeleton(graphs.S), problem.form),
        measured.device,
        lambda step: problem.nodes[step.node].name if isinstance(step, (Run, Bwd)) else "loss",
        _least_of_chain,
        graphs.D,
    )


def _of_followed(size: int, known: Known) -> Point:
    found, places = known.found, known.places
    problem = found.problem

    def name_of(step: Step) -> str:
        return moment_of(problem, places, step)

    def least(problem: Problem, report: Report) -> tuple[int, Schedule]:
        least = find_least(problem)
        return least.walk.peak, least.schedule

    return Point(size, problem, problem, 0, 0, found.form, known.device, name_of, least)


def _least_of_chain(problem: Problem, report: Report) -> tuple[int, Schedule]:
    chain = ChainPlanner(problem, report=lambda doing, part: report(f"solve {doing}", part))
    least = chain.frontier().min_budget
    return least, chain.solve(least).schedule


class FittedStep:
    """A step of any ``size``, from ``points`` of rising sizes and equal forms; memory in bytes."""

    def __init__(self, size: int, points: Sequence[Point], report: Report) -> None:
        self.size, self.points, self.report = size, points, part_of(report, f"size {size}")
        self.device = points[-1].device
        self.problem, moments = problem_at(size, self._sizes, [p.problem for p in points])
        self.rough = tuple(dict.fromkeys(map(points[-1].name_of, moments)))

    @property
    def _sizes(self) -> list[int]:
        return [p.size for p in self.points]

    def _fitted(self, seen: Sequence[int]) -> int:
        return fitted(self._sizes, seen, self.size, Fraction(self.size, self._sizes[-1]))[0]

    @cached_property
    def reserved(self) -> int:
        return self._fitted([p.reserved for p in self.points])

    @cached_property
    def eager_peak(self) -> int:
        """The budget from which nothing runs again."""
        return eager_peak_of(self.problem) + self.reserved

    @cached_property
    def peak(self) -> int:
        """What a step takes that runs nothing again."""
        usual, _ = problem_at(self.size, self._sizes, [p.usual for p in self.points])
        return eager_peak_of(usual) + self._fitted([p.beside for p in self.points])

    @cached_property
    def least(self) -> tuple[int, Schedule]:
        """The smallest budget of a plan, and its schedule: what planning such a call says, too."""
        least, schedule = self.points[-1].least(self.problem, self.report)
        return least + self.reserved, schedule

    @cached_property
    def kernels(self) -> dict[str, str]:
        """Those of convolutions, by the names of their results; of what is followed, they are not known."""
        graphs = [p.d for p in self.points if p.d is not None]
        return convolution_kernels(graphs, self._fitted) if graphs else {}


def problem_at(size: int, sizes: Sequence[int], problems: Sequence[Problem]) -> tuple[Problem, tuple[Step, ...]]:
    """The problem of a step of ``size``, and the moments that follow no function of the size (see ``fitted``)."""
    last, rough, one = problems[-1], dict[Step, None](), Fraction(1)

    def at(step: Step, growth: Fraction, seen: Sequence[int]) -> int:
        found, exact = fitted(sizes, seen, size, growth)
        if not exact:
            rough[step] = None
        return found

    def time_at(growth: Fraction, seen: Sequence[int]) -> int:
        found, exact = fitted(sizes, seen, size, growth)
        return found if exact else int(seen[-1] * growth)

    def backward_at(i: int, growth: Fraction) -> Backward | None:
        backs = [back for p in problems if (back := p.nodes[i].backward) is not None]
        if not backs:
            return None
        before = at(Bwd(i), growth, [back.before for back in backs])
        after = at(Bwd(i), growth, [back.after for back in backs])
        least = max(before, after)
        peak, exact = fitted(sizes, [back.peak for back in backs], size, growth)
        beside = [back.peak - max(back.before, back.after) for back in backs]
        peak = max(least, peak) if exact else least + at(Bwd(i), growth, beside)
        time = time_at(growth, [back.time for back in backs])
        return replace(backs[-1], time=time, before=before, peak=peak, after=after)

    def node_at(i: int, node: Node) -> Node:
        back = node.backward
        growth = max((ratios[d] for d in (*node.reads, *node.makes, *(back.reads if back else ()))), default=one)
        made = sum(data[d].size for d in node.makes)
        peak = max(made, at(Run(i), growth, [p.nodes[i].peak for p in problems]))
        time = time_at(growth, [p.nodes[i].time for p in problems])
        warm = [p.nodes[i].least_time for p in problems]
        warm_time = None if node.warm is None else min(time, time_at(growth, warm))
        return replace(node, time=time, warm=warm_time, peak=peak, backward=backward_at(i, growth))

    bytes_of = [[p.data[k].size for p in problems] for k in range(len(last.data))]
    data = tuple(replace(d, size=at(Run(d.owner), one, bytes_of[k])) for k, d in enumerate(last.data))
    ratios = [Fraction(now.size, max(1, was.size)) for now, was in zip(data, last.data, strict=True)]
    nodes = tuple(node_at(i, node) for i, node in enumerate(last.nodes))
    loss = at(Loss(), max(ratios, default=one), [p.loss for p in problems])
    number: dict[tuple[int, ...], int] = {}
    every = zip(*(p.blocks for p in problems), strict=True)  # two blocks may be equal at one size by chance
    kinds = [number.setdefault(tuple(b.kind for b in of_all), len(number)) for of_all in every]
    blocks = tuple(replace(b, kind=kind) for b, kind in zip(last.blocks, kinds, strict=True))
    found = replace(last, nodes=nodes, data=data, loss=loss, blocks=blocks)
    found.verify()
    return found, tuple(rough)
