"""Costs of a graph at a size at which it never ran, fitted to its costs at a few small sizes.

Each figure of each operation is fitted alone: the bytes of a result, the peak of a kernel. Such a figure is nearly
always affine in the size, or quadratic (attention over a length). The peak of a step is no such function, since it is
the largest of many sums; it is computed from the fitted figures as from measured ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

import torch

from rkgb.cost.costs import Cost
from rkgb.cost.usage import Usage
from rkgb.graphs import D_graph, Facts, Ref, S_graph, Saved, Storage
from rkgb.probe.skeleton import skeleton

FEWEST = 3
"""The fewest sizes at which a graph must be measured. Two points always lie on a line, so they cannot confirm one."""

POWERS = (1, 2, 3, 4)
"""Powers of the size that figures may grow with: images grow with its square, attention over their patches with its
fourth power."""


@dataclass(frozen=True, eq=False)
class Measured:
    """A graph traced where one dimension has ``size``, the ``costs`` of its nodes, and its blocks' ``classes``."""

    size: int
    s: S_graph
    costs: dict[Usage, list[Cost]]
    classes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Extrapolated:
    """The graph and its costs at another size. ``rough``: names of nodes whose bytes no fitted function describes."""

    s: S_graph
    costs: dict[Usage, list[Cost]]
    classes: tuple[int, ...]
    rough: tuple[str, ...]


def form(point: Measured) -> Hashable:
    """What must be equal at all sizes for figures to be functions of the size: operations, edges, and shared memory."""
    s = point.s
    saved = [x for f in s.d.facts for x in (f.saved, f.context)] + [n.saved for n in s.nodes]
    costs = tuple(
        (usage, tuple((c.results, c.views, tuple(g and (g.shares or "new") for g in c.inputs)) for c in every))
        for usage, every in point.costs.items()
    )
    return skeleton(s), tuple(len(x.private) for x in saved), costs


def extrapolated(points: Sequence[Measured], size: int) -> Extrapolated:
    """The graph and costs of ``points`` at ``size``. The points have the same ``form``, and their sizes rise."""
    columns: list[list[int]] = []
    for point in points:
        column: list[int] = []
        columns.append(column)

        def note(number: int, name: str, growth: Fraction, column: list[int] = column) -> int:
            column.append(number)
            return number

        _rebuilt(point, note)
    sizes = [p.size for p in points]
    known: dict[Hashable, tuple[int, bool]] = {}
    rough: dict[str, None] = {}
    rows = iter(zip(*columns, strict=True))

    def put(number: int, name: str, growth: Fraction) -> int:
        row = next(rows)
        if (row, growth) not in known:
            known[row, growth] = fitted(sizes, row, size, growth)
        figure, exact = known[row, growth]
        if name and not exact:
            rough[name] = None
        return figure

    s, costs = _rebuilt(points[-1], put)
    number: dict[tuple[int, ...], int] = {}
    kinds = zip(*(p.classes for p in points), strict=True)  # two blocks may be equal at one size by chance
    return Extrapolated(s, costs, tuple(number.setdefault(k, len(number)) for k in kinds), tuple(rough))


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


def _rebuilt(point: Measured, take: Callable[[int, str, Fraction], int]) -> tuple[S_graph, dict[Usage, list[Cost]]]:
    """The graph and costs of ``point`` with each figure replaced by ``take(figure, name, growth)``.

    ``name``: the value or node of the figure; empty if it is no figure of memory. ``growth``: the ratio by which the
    values around it have grown.
    """
    s, d = point.s, point.s.d
    one = Fraction(1)
    values = {
        v: dataclasses.replace(
            x,
            shape=tuple(take(n, "", one) for n in x.shape),
            stride=tuple(take(n, "", one) for n in x.stride),
            bytes=take(x.bytes, d.names[v], one),
        )
        for v, x in d.values.items()
    }
    times = {v: Fraction(x.bytes, max(1, d.values[v].bytes)) for v, x in values.items()}

    def around(name: str, *of_values: Sequence[int]) -> Callable[[int], int]:
        growth = max((times[v] for every in of_values for v in every if v in times), default=one)
        return lambda number: take(number, name, growth)

    def saved(x: Saved, of: Callable[[int], int]) -> Saved:
        return Saved(x.storages, tuple(map(of, x.private)))

    def facts(x: Facts, of: Callable[[int], int]) -> Facts:
        return dataclasses.replace(x, saved=saved(x.saved, of), context=saved(x.context, of))

    def storage(x: Storage, first: int | None) -> Storage:
        of = around("memory", ()) if first is None else around(d.names[first], (first,))
        return dataclasses.replace(x, bytes=of(x.bytes))

    every = tuple(facts(x, around(n.name, n.reads(), n.outputs)) for x, n in zip(d.facts, d.nodes, strict=True))
    graph = dataclasses.replace(
        d,
        values=values,
        storages=tuple(storage(x, d.first_value.get(k)) for k, x in enumerate(d.storages)),
        facts=every,
    )
    nodes = tuple(dataclasses.replace(n, saved=saved(n.saved, around(n.name, n.reads, n.makes))) for n in s.nodes)
    costs = {
        usage: [
            _cost(c, around(n.name, n.reads, n.makes), around("", n.reads, n.makes))
            for c, n in zip(of_all, s.nodes, strict=True)
        ]
        for usage, of_all in point.costs.items()
    }
    return dataclasses.replace(s, d=graph, nodes=nodes), costs


def _cost(c: Cost, of: Callable[[int], int], time: Callable[[int], int]) -> Cost:
    return dataclasses.replace(
        c,
        forward_time=time(c.forward_time),
        warm_time=None if c.warm_time is None else time(c.warm_time),
        forward_peak=of(c.forward_peak),
        backward_time=time(c.backward_time),
        backward_peak=of(c.backward_peak),
        held_peak=of(c.held_peak),
        together_peak=of(c.together_peak),
        incoming=of(c.incoming),
        inputs=tuple(g and dataclasses.replace(g, bytes=of(g.bytes)) for g in c.inputs),
    )


_LAST = 9
"""Arguments of ``aten._convolution`` on which the kernel depends: input, weight, bias, and how it is computed."""


def convolution_kernels(d: D_graph) -> dict[str, str]:
    """The kernel that PyTorch takes for each convolution on the CPU, by the name of its result: on one thread it
    depends on the number of images. Nothing runs; ``d`` may be of any size.
    """
    found = {}
    for node in d.nodes:
        if node.op is torch.ops.aten._convolution.default and d.values[node.outputs[0]].device.type == "cpu":
            arguments = [_form(d, a) if isinstance(a, Ref) else a for a in node.args[:_LAST]]
            found[d.names[node.outputs[0]]] = str(torch._C._select_conv_backend(*arguments))
    return found


def _form(d: D_graph, ref: Ref) -> torch.Tensor:
    """A tensor of the value's shape and type, and of one element's memory."""
    value = d.values[ref.index]
    return torch.empty((), dtype=value.dtype).expand(value.shape)
