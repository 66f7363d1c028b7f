"""The same graph at other sizes: how its numbers follow from the sizes of the inputs.

Two traces of one model at different sizes differ in numbers only: they have one *skeleton*. The numbers among the
arguments of operations are fitted as functions of the inputs' sizes. For new sizes the program runs once with the
fitted numbers. This run shows all other sizes. It must show the same skeleton and give the module's outputs, bit for
bit, and the module must call the operators that it called when it was traced. So a fit may be a guess: a wrong one
costs a run, and never gives a wrong result.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import combinations_with_replacement
from typing import Any

import torch

from rkgb.Dtools import probe
from rkgb.errors import GraphError
from rkgb.graphs import B_graph, D_graph, Facts, Node, Ref, S_graph, S_node, Saved, Source, Storage, Value
from rkgb.probe.check import same_as_module
from rkgb.sample import Call
from rkgb.trace.guards import Guard, GuardFailed
from rkgb.trace.operators import OperatorCount

Sizes = tuple[int, ...]


def sizes_of(inputs: Sequence[torch.Tensor]) -> Sizes:
    """The sizes of all dimensions of all tensors of a call, in order."""
    return tuple(size for t in inputs for size in t.shape)


@dataclass(frozen=True, eq=False)
class Point:
    """A graph, and the sizes of the inputs on which it was traced."""

    sizes: Sizes
    s: S_graph


# ------------------------------------------------------------------------------------------------ skeletons


class _Size:
    """Takes the place of a number that may follow from sizes."""

    def __repr__(self) -> str:
        return "size"


_SIZE = _Size()


def skeleton(s: S_graph) -> Hashable:
    """A key that is equal for graphs that differ in sizes only."""
    d = s.d
    return (
        tuple(_operation(n) for n in d.nodes),
        d.outputs,
        tuple(sorted((v, _source(x)) for v, x in d.sources.items())),
        tuple((v, *_form(x), x.storage) for v, x in d.values.items()),
        tuple((x.shape, x.stride) for v, x in d.values.items() if v in d.sources and d.sources[v].kind != "input"),
        tuple((x.owner, x.source) for x in d.storages),
        tuple(_facts_key(facts) for facts in d.facts),
        str(d.structure.outputs),
        tuple((k, "number" if _may_be_size(c) else repr(c)) for k, c in d.structure.output_constants),
        (d.structure.assigned, d.structure.written, d.structure.stale),
        tuple((n.ops, n.reads, n.makes, n.storages, n.saved.storages, bool(n.saved.private), n.fixed) for n in s.nodes),
        s.blocks,
    )


def _operation(node: Node) -> Hashable:
    sized = _sized_arguments(node.op)
    arguments = tuple(_frozen(a, k in sized) for k, a in enumerate(node.args))
    keywords = tuple((name, _frozen(a, name in sized)) for name, a in node.kwargs)
    op: Hashable = node.op if isinstance(node.op, torch._ops.OpOverload) else str(node.op)
    if isinstance(node.op, Guard):
        op = node.op.name, repr(node.op.expected), node.op.line
    return op, node.name, arguments, keywords, node.outputs, node.several, node.mode


def _frozen(a: Any, sized: bool) -> Hashable:
    if isinstance(a, (list, tuple)):
        return tuple(_frozen(x, sized) for x in a)
    if isinstance(a, torch.Tensor):
        return _content(a)
    if sized and _may_be_size(a):
        return "size"
    return a if isinstance(a, Ref) else repr(a)


def _content(t: torch.Tensor) -> Hashable:
    """A constant: small ones by value."""
    few = t.numel() <= 4096 and t.layout == torch.strided
    return (str(t.dtype), tuple(t.shape), repr(t.tolist()) if few else str(id(t)))


def _source(source: Source) -> tuple[str, str]:
    return source.kind, repr(_content(source.key)) if isinstance(source.key, torch.Tensor) else repr(source.key)


def _form(value: Value) -> tuple[Hashable, ...]:
    return str(value.dtype), str(value.device), value.requires_grad, len(value.shape)


def _facts_key(facts: Facts) -> Hashable:
    return (
        facts.writes,
        facts.random,
        facts.unseen,
        facts.saved.storages,
        bool(facts.saved.private),
        facts.context.storages,
        bool(facts.context.private),
    )


def _may_be_size(a: Any) -> bool:
    return type(a) in (int, float)


@cache
def _sized_arguments(op: Any) -> frozenset[int | str]:
    """The arguments, by position and by name, that may follow from sizes: ``SymInt`` and ``Scalar`` in the schema."""
    if not isinstance(op, torch._ops.OpOverload):
        return frozenset()
    inside = str(op._schema).partition("(")[2].rpartition(") ->")[0]
    sized: set[int | str] = set()
    position = 0
    for argument in re.split(r", (?![^(\[]*[)\]])", inside):
        kind, _, name = argument.strip().partition(" ")
        if re.match(r"(SymInt|Scalar)", kind):
            sized |= {position, name.partition("=")[0]}
        position += kind != "*"
    return frozenset(sized)


# ------------------------------------------------------------------------------------------------ numbers


def _numbers(d: D_graph) -> list[int | float]:
    """All numbers that may follow from sizes, in order."""
    numbers = [a for node in d.nodes for a in _numbers_of(node)]
    return numbers + [c for _, c in d.structure.output_constants if _may_be_size(c)]


def _numbers_of(node: Node) -> Iterator[int | float]:
    sized = _sized_arguments(node.op)
    for k, a in (*enumerate(node.args), *node.kwargs):
        if k in sized:
            for x in a if isinstance(a, (list, tuple)) else (a,):
                if _may_be_size(x):
                    yield x


def _repeated(d: D_graph) -> list[bool]:
    """For each of ``_numbers`` whether an equal one stands before it in its list; the two may be different sizes."""
    repeated = []
    for node in d.nodes:
        sized = _sized_arguments(node.op)
        for k, a in (*enumerate(node.args), *node.kwargs):
            if k in sized:
                numbers = [x for x in (a if isinstance(a, (list, tuple)) else (a,)) if _may_be_size(x)]
                repeated += [x in numbers[:at] for at, x in enumerate(numbers)]
    return repeated + [False for _, c in d.structure.output_constants if _may_be_size(c)]


def _with_numbers(node: Node, numbers: Iterator[int | float]) -> Node:
    """``node`` with these numbers in place of its own."""
    sized = _sized_arguments(node.op)

    def put(key: int | str, a: Any) -> Any:
        if key not in sized:
            return a
        if isinstance(a, (list, tuple)):
            return type(a)(next(numbers) if _may_be_size(x) else x for x in a)
        return next(numbers) if _may_be_size(a) else a

    args = tuple(put(k, a) for k, a in enumerate(node.args))
    kwargs = tuple((name, put(name, a)) for name, a in node.kwargs)
    if node.op is torch.ops.aten.empty_strided.default:
        args = (args[0], _strides_as(node.args[0], node.args[1], args[0]) or args[1], *args[2:])
    return node if (args, kwargs) == (node.args, node.kwargs) else dataclasses.replace(node, args=args, kwargs=kwargs)


def _strides_as(sizes: Sequence[int], strides: Sequence[int], now: Sequence[int]) -> list[int] | None:
    """Strides without gaps for sizes ``now``, in the order of dimensions that ``strides`` have for ``sizes``.

    None if ``strides`` have gaps.
    """
    order = sorted(range(len(sizes)), key=lambda k: (strides[k], sizes[k]))
    before, after, result = 1, 1, [0] * len(sizes)
    for k in order:
        if strides[k] != before:
            return None
        result[k] = after
        before, after = before * sizes[k], after * now[k]
    return result


class _Fit:
    """Functions of sizes, fitted to the numbers at some points.

    Sizes that are equal at all points are one symbol. The first form that is right at all points is taken: a product of
    symbols, times a fraction, plus a constant; a symbol divided by a small number and rounded down; one divided by a
    symbol. With a single point only products are tried; a number that is no product is taken for constant.
    """

    def __init__(self, points: Sequence[Sizes], now: Sizes) -> None:
        columns = dict.fromkeys(zip(*points, now, strict=True))
        self.now = [c[-1] for c in columns]
        self.seen = [c[:-1] for c in columns]
        moving = [k for k, c in enumerate(columns) if len(set(c)) > 1]
        self.products: list[tuple[int, ...]] = [(k,) for k in moving]
        pairs = combinations_with_replacement(range(len(self.now)), 2)
        self.products += [p for p in pairs if set(p) & set(moving) and min(self.now[k] for k in p) > 1]
        self.new = [p for p in self.products if all(len(set(self.seen[k])) == 1 for k in p)]
        self._found: dict[tuple[int | float, ...], int | float | None] = {}

    def __call__(self, number: tuple[int | float, ...]) -> int | float | None:
        """The number for the present sizes, from those at the points; None if no form fits."""
        if number not in self._found:
            self._found[number] = self._fitted(number)
        return self._found[number]

    def _fitted(self, number: tuple[int | float, ...]) -> int | float | None:
        if len(set(number)) == 1:
            same = (p for p in self.new if type(number[0]) is int and self._at(p)[0] == number[0])
            product = next(same, None)
            return number[0] if product is None else self._value(product)
        if any(type(x) is float for x in number):
            return self._inverse(number)
        whole = [int(x) for x in number]
        return next((x for p in self.products for x in (self._affine(p, whole),) if x is not None), None)

    def _at(self, product: tuple[int, ...]) -> list[int]:
        """The product of sizes at each point."""
        products = [1] * len(self.seen[0])
        for k in product:
            products = [a * b for a, b in zip(products, self.seen[k], strict=True)]
        return products

    def _value(self, product: tuple[int, ...]) -> int:
        """The product of the present sizes."""
        product_now = 1
        for k in product:
            product_now *= self.now[k]
        return product_now

    def _affine(self, product: tuple[int, ...], number: list[int]) -> int | None:
        at = self._at(product)
        low, high = at.index(min(at)), at.index(max(at))
        if at[low] == at[high]:
            return None
        slope = Fraction(number[high] - number[low], at[high] - at[low])
        rest = number[low] - slope * at[low]
        if all(slope * x + rest == y for x, y in zip(at, number, strict=True)):
            result = slope * self._value(product) + rest
            if result.denominator == 1:
                return int(result)
        for divisor in (2, 4, 8, 16, 32) if len(product) == 1 else ():
            for added in range(divisor):
                less = number[0] - (at[0] + added) // divisor
                if all((x + added) // divisor + less == y for x, y in zip(at, number, strict=True)):
                    return (self._value(product) + added) // divisor + less
        return None

    def _inverse(self, number: tuple[int | float, ...]) -> float | None:
        for product in self.products:
            at, now = self._at(product), self._value(product)
            for function in (lambda x: 1.0 / x, lambda x: x**-0.5, float, lambda x: x**0.5):
                if all(x and function(x) == y for x, y in zip(at, number, strict=True)):
                    return function(now)
        return None


# -------------------------------------------------------------------------------------- the graph at other sizes


def resized(points: Sequence[Point], expected: Hashable, model: torch.nn.Module, call: Call) -> S_graph | None:
    """The graph of ``points``, whose skeleton is ``expected``, for ``call`` with tensors of other sizes.

    None if a number cannot be fitted, or if the program does not do what ``model`` does. Peak memory is that of
    inference.
    """
    now = sizes_of(call.tensors)
    if any(len(p.sizes) != len(now) for p in points):
        return None
    fit = _Fit([p.sizes for p in points], now)
    seen = list(zip(*(_numbers(p.s.d) for p in points), strict=True))
    every, again = [fit(x) for x in seen], _repeated(points[-1].s.d)
    doubtful = sorted({x[-1] for x, y, twice in zip(seen, every, again, strict=True) if twice and y != x[-1]})
    for constant in ((), *((x,) for x in doubtful[:2]), doubtful) if doubtful else ((),):
        numbers = [x[-1] if twice and x[-1] in constant else y for x, y, twice in zip(seen, every, again, strict=True)]
        graph = None if None in numbers else _given(points[-1].s, numbers, expected, model, call)
        if graph is not None:
            return graph
    return None


def _given(
    last: S_graph, numbers: Sequence[Any], expected: Hashable, model: torch.nn.Module, call: Call
) -> S_graph | None:
    """The graph ``last`` with these numbers; None if ``model`` does something else on ``call``."""
    left, d = iter(numbers), last.d
    nodes = tuple(_with_numbers(node, left) for node in d.nodes)
    constants = tuple((k, next(left) if _may_be_size(c) else c) for k, c in d.structure.output_constants)
    structure = dataclasses.replace(d.structure, output_constants=constants)
    b = B_graph(d.names, d.sources, nodes, d.outputs, structure, d.notes)
    try:
        with OperatorCount() as ours:
            probed = probe(b, model, call.tensors)
    except (GuardFailed, GraphError, RuntimeError, ValueError, TypeError, LookupError):
        return None
    graph = _with_sizes(last, probed.graph)
    if (
        graph is None
        or skeleton(graph) != expected
        or not same_as_module(b, model, call, probed, ours, d.operator_counts)
    ):
        return None
    return graph


def _with_sizes(s: S_graph, d: D_graph) -> S_graph | None:
    """``s`` with the numbers and sizes of ``d``, which has the same nodes and may number storages in another order.

    None if other values share memory in ``d``.
    """
    old = s.d
    if len(d.nodes) != len(old.nodes) or d.values.keys() != old.values.keys():
        return None
    number = {d.values[v].storage: old.values[v].storage for v in d.values}
    if any(number[d.values[v].storage] != old.values[v].storage for v in d.values):
        return None
    if len(set(number.values())) != len(number):
        return None

    def known(saved: Saved) -> Saved:
        return Saved(tuple(number[x] for x in saved.storages), saved.private)

    storages = list(old.storages)
    for x, mine in number.items():
        if (d.storages[x].owner, d.storages[x].source) != (storages[mine].owner, storages[mine].source):
            return None
        storages[mine] = Storage(d.storages[x].bytes, storages[mine].owner, storages[mine].source)
    new = dataclasses.replace(
        old,
        nodes=d.nodes,
        structure=d.structure,
        values={v: dataclasses.replace(x, storage=number[x.storage]) for v, x in d.values.items()},
        storages=tuple(storages),
        facts=tuple(
            dataclasses.replace(
                x, writes=tuple(number[w] for w in x.writes), saved=known(x.saved), context=known(x.context)
            )
            for x in d.facts
        ),
    )
    return dataclasses.replace(s, d=new, nodes=tuple(_with_private(n, new) for n in s.nodes))


def _with_private(node: S_node, d: D_graph) -> S_node:
    """``node`` with the bytes of its private saved tensors in ``d``."""
    mine = {x for op in node.ops for v in d.nodes[op].outputs for x in [d.values[v].storage]}
    known = dict.fromkeys(x for op in node.ops for x in d.facts[op].saved.storages)
    inner = [
        d.storages[x].bytes for x in known if x in mine and x not in node.storages and d.storages[x].owner in node.ops
    ]
    private = tuple(b for op in node.ops for b in d.facts[op].saved.private) + tuple(inner)
    return dataclasses.replace(node, saved=Saved(node.saved.storages, private))
