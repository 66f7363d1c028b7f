"""Random small graphs for Hypothesis, and the optimum of a class by going through all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, combinations, product

from hypothesis import strategies as st

from solvers import GraphNode, GraphProblem
from solvers.whole.stages import Reruns, Staged


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 5, largest: int = 4) -> GraphProblem:
    """A graph of up to ``max_nodes`` nodes; sizes and times of 0 among them, any number of inputs and components."""
    count = draw(st.integers(1, max_nodes))
    small = st.integers(0, largest)
    nodes = []
    for i in range(count):
        reads = tuple(sorted(draw(st.sets(st.sampled_from(range(i)), max_size=3)))) if i else ()
        transient = draw(st.sampled_from([0, 0, 0, 1, 2]))
        nodes.append(GraphNode(draw(st.sampled_from(["a", f"n{i}"])), draw(small), draw(small), reads, transient))
    return GraphProblem(tuple(nodes))


def all_runs(staged: Staged) -> Iterator[Reruns]:
    """Every way to rerun operations, each at most once a stage, in order."""
    stages = []
    for t in range(staged.steps):
        again = [i for i in range(t) if t in staged.operations[i].stages]
        stages.append(list(chain.from_iterable(combinations(again, k) for k in range(len(again) + 1))))
    return product(*stages)


def least_costs(staged: Staged, judge: Callable[[Reruns], tuple[int, int]]) -> list[tuple[int, int]]:
    """The Pareto set of (peak, cost) over the whole class, by rising peak; ``judge`` is the walker."""
    best: list[tuple[int, int]] = []
    for peak, cost in sorted(judge(runs) for runs in all_runs(staged)):
        if not best or cost < best[-1][1]:
            best.append((peak, cost))
    return best


def cheapest(pareto: list[tuple[int, int]], budget: int) -> int | None:
    """The least cost within ``budget``, if anything fits."""
    return min((cost for peak, cost in pareto if peak <= budget), default=None)
