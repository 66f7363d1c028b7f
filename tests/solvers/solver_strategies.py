"""Random small problems for Hypothesis."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from solvers import Backward, Block, Data, Node, Problem


def pick(draw: st.DrawFn, ids: list[int], most: int) -> tuple[int, ...]:
    """Up to ``most`` different members of ``ids``, in order."""
    if not ids:
        return ()
    return tuple(sorted(draw(st.sets(st.sampled_from(ids), max_size=most))))


@st.composite
def problems(draw: st.DrawFn, max_nodes: int = 5, max_blocks: int = 3, plain: bool = False) -> Problem:
    """A problem of up to ``max_nodes`` nodes; ``plain`` ones have nothing random, held or run once only."""
    count = draw(st.integers(1, max_nodes))
    small = st.integers(0, 4)
    data: list[Data] = []
    made: list[tuple[int, ...]] = []
    for i in range(count):
        sizes = draw(st.lists(small, min_size=1, max_size=2))
        made.append(tuple(range(len(data), len(data) + len(sizes))))
        data += [Data(draw(st.sampled_from(["a", "a.b", f"d{i}"])), size, i) for size in sizes]
    gradients = draw(small)
    backwards: dict[int, Backward] = {}
    for i in reversed(range(count)):
        if draw(st.integers(0, 4)):
            after = draw(small)
            reads = pick(draw, [d for d, datum in enumerate(data) if datum.owner <= i], 2)
            backwards[i] = Backward(draw(small), reads, gradients, max(gradients, after) + draw(small), after)
            gradients = after
    nodes = tuple(
        Node(
            name=draw(st.sampled_from(["f", f"f{i}"])),
            time=draw(st.integers(0, 9)),
            reads=pick(draw, [d for d, datum in enumerate(data) if datum.owner < i], 2),
            makes=made[i],
            peak=sum(data[d].size for d in made[i]) + draw(st.integers(0, 3)),
            backward=backwards.get(i),
            rerun=plain or draw(st.integers(0, 4)) > 0,
            rng=0 if plain else draw(st.integers(0, 1)),
        )
        for i in range(count)
    )
    cuts = sorted({0, count, *draw(st.lists(st.integers(0, count), max_size=max_blocks - 1))})
    blocks = tuple(Block(a, b, k) for k, (a, b) in enumerate(pairwise(cuts)))
    held = frozenset() if plain else frozenset(pick(draw, list(range(len(data))), 1))
    returned = frozenset() if plain else frozenset(pick(draw, list(range(len(data))), 2))
    problem = Problem(nodes, tuple(data), held, draw(small), blocks, returned)
    problem.verify()
    return problem


@st.composite
def limited_problems(draw: st.DrawFn, max_nodes: int = 3) -> Problem:
    """Some nodes may run again before some backwards only."""
    problem = draw(problems(max_nodes=max_nodes))
    last = len(problem.nodes) - 1

    def limited(node: Node) -> Node:
        first = draw(st.none() | st.integers(0, last))
        return node if first is None else replace(node, within=(first, draw(st.integers(0, first))))

    return replace(problem, nodes=tuple(map(limited, problem.nodes)))
