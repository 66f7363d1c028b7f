"""One block as a problem of its own, and the exact memory and time of a way to run it.

A block decides on its *counted* data only: data of positive size, not held, made by nodes of the block that may run
again. All other data are always live here, and the chain counts their memory. Bytes of gradients are relative to the
block's ``base``, the least gradient bytes at any of its backwards, so that equal blocks at different depths have equal
figures.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from solvers.problem import Block, Node, Problem

Reruns = tuple[tuple[int, ...], ...]
"""For each stage (one per backward of the block, in backward order), the nodes that run again, in order."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The reruns before one backward, and the backward of ``node``. It reads the counted data ``reads``.

    ``before``, ``peak``: those of the ``Backward``, less the block's base (bytes).
    """

    node: int
    reads: frozenset[int]
    before: int
    peak: int


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block with positions 0..n-1 for its nodes and 0..m-1 for its counted data.

    ``nodes[i].reads`` and ``nodes[i].makes`` are positions of counted data, as are ``interface``, the data that later
    blocks read. ``owners``, ``sizes``: the node and bytes of each. ``base``: gradient bytes that stages leave out.
    Views of equal blocks differ in ``base`` only, so the view without it (``key``) identifies blocks to solve once.
    """

    nodes: tuple[Node, ...]
    owners: tuple[int, ...]
    sizes: tuple[int, ...]
    interface: frozenset[int]
    stages: tuple[Stage, ...]
    base: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for blocks that have the same options."""
        return (self.nodes, self.owners, self.sizes, self.interface, self.stages)

    @property
    def no_runs(self) -> Reruns:
        """No reruns: the block keeps everything."""
        return ((),) * len(self.stages)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a block. Bytes and nanoseconds are exact.

    ``runs``: for each backward of the block, the nodes (positions in the block) that run again before it. ``save``:
    bytes kept from forward to backward, without the interface. ``forward_peak``: most bytes of the forward phase above
    what was live before it. ``backward_peak``: most bytes of the backward phase above the block's base gradients.
    ``time``: nanoseconds of reruns. ``forward_time``: nanoseconds of the forward phase when it is a rerun. ``fresh``:
    the option needs neither saved data nor the block's interface, so that ``time`` includes a forward phase. ``bound``:
    no schedule of the class of ``solvers.block.ilp_model`` takes less time within the limits that the option was solved
    for, nor within its own ``save`` and ``backward_peak``. ``optimal``: ``bound`` is ``time``, up to the solver's gap.
    """

    runs: Reruns
    save: int
    forward_peak: int
    backward_peak: int
    time: int
    forward_time: int
    fresh: bool
    optimal: bool
    bound: int


class Solved(NamedTuple):
    """The best option within limits. ``searched``: the search did not end at its time limit."""

    option: Option
    searched: bool


def counted(problem: Problem, d: int) -> bool:
    """Whether datum ``d`` can be deleted and made again, and has bytes."""
    datum = problem.data[d]
    return datum.size > 0 and d not in problem.held and problem.nodes[datum.owner].rerun


def last_readers(problem: Problem) -> list[int]:
    """For each datum, the last node whose forward or backward reads it; its owner if none does."""
    last = [d.owner for d in problem.data]
    for i, node in enumerate(problem.nodes):
        for d in node.reads + (node.backward.reads if node.backward else ()):
            last[d] = max(last[d], i)
    return last


def block_view(problem: Problem, block: Block, last: list[int] | None = None) -> BlockView:
    """``block`` as a problem of its own. ``last``: the problem's ``last_readers``, if the caller has them."""
    if last is None:
        last = last_readers(problem)
    inside = range(block.start, block.stop)
    nodes = problem.nodes[block.start : block.stop]
    data = [d for node in nodes for d in node.makes if counted(problem, d)]
    at = {d: position for position, d in enumerate(data)}

    def local(ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(at[d] for d in ids if d in at)

    backwards = [(i, b) for i in reversed(inside) if (b := problem.nodes[i].backward)]
    base = min((min(b.before, b.after) for _, b in backwards), default=0)
    return BlockView(
        nodes=tuple(Node("", n.time, local(n.reads), local(n.makes), n.peak, None, n.rerun) for n in nodes),
        owners=tuple(problem.data[d].owner - block.start for d in data),
        sizes=tuple(problem.data[d].size for d in data),
        interface=frozenset(at[d] for d in data if last[d] >= block.stop),
        stages=tuple(
            Stage(i - block.start, frozenset(local(b.reads)), b.before - base, b.peak - base) for i, b in backwards
        ),
        base=base,
    )


def option(view: BlockView, runs: Reruns, optimal: bool = False, bound: int = 0) -> Option:
    """``runs`` without useless ones, with their exact memory and time by liveness, and what is proven of them."""
    needed: set[int] = set()
    live = peak = time = 0

    def read(data: Iterable[int]) -> None:
        nonlocal live
        for d in data:
            if d not in needed:
                needed.add(d)
                live += view.sizes[d]

    kept: list[tuple[int, ...]] = []
    for stage, chosen in zip(reversed(view.stages), reversed(runs), strict=True):
        read(stage.reads)
        peak = max(peak, live + stage.peak)
        useful: list[int] = []
        for i in reversed(chosen):
            node = view.nodes[i]
            made = needed.intersection(node.makes)
            if not made:
                continue
            needed -= made
            live -= sum(view.sizes[d] for d in made)
            read(node.reads)
            peak = max(peak, live + node.peak + stage.before)
            time += node.time
            useful.append(i)
        kept.append(tuple(reversed(useful)))
    forward_peak, forward_time = forward_figures(view, frozenset(needed))
    return Option(
        runs=tuple(reversed(kept)),
        save=sum(view.sizes[d] for d in needed - view.interface),
        forward_peak=forward_peak,
        backward_peak=peak,
        time=time,
        forward_time=forward_time,
        fresh=not needed,
        optimal=optimal,
        bound=min(bound, time),
    )


def forward_figures(view: BlockView, saved: frozenset[int]) -> tuple[int, int]:
    """Of the forward phase that keeps ``saved`` and the interface: peak in bytes, and nanoseconds to make these."""
    needed = set(saved | view.interface)
    made_for = set(needed)
    live = sum(view.sizes[d] for d in needed)
    peak = time = 0
    for node in reversed(view.nodes):
        made = needed.intersection(node.makes)
        needed -= made
        live -= sum(view.sizes[d] for d in made)
        for d in node.reads:
            if d not in needed:
                needed.add(d)
                live += view.sizes[d]
        peak = max(peak, live + node.peak)
        if not made_for.isdisjoint(node.makes):
            made_for.difference_update(node.makes)
            made_for.update(node.reads)
            time += node.time
    return peak, time
