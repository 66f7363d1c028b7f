"""The costs of a chain of blocks that the dynamic program adds and compares, in bytes and nanoseconds.

``I_k``, the interface of block k, is the set of data made before block k that it or a later block reads, forward or
backward. *Always-live* data (held, or made by nodes that run once) and generator states are constants that depend on
the position only. That is conservative; the walker counts exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from solvers.block.block import BlockView, Option, block_view, counted, forward_figures, last_readers
from solvers.block.ilp import Grid, TimeLimit, member_options, view_options
from solvers.problem import Problem


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """Costs of blocks 0..B-1. Tuples have one item per block.

    ``interface_bytes[i][k]``: bytes of I_k not in I_i, for k in 0..B. ``pass_peak`` (bytes), ``pass_time``
    (nanoseconds): those of a forward phase that keeps nothing but the interface. Constant bytes: ``first_base`` while
    block k runs in the forward phase; ``rerun_base`` during reruns just before the backward of block k;
    ``backward_base`` during the backward of block k; ``loss_peak`` at the loss, beyond what is saved.
    """

    options: tuple[tuple[Option, ...], ...]
    interface_bytes: tuple[tuple[int, ...], ...]
    pass_peak: tuple[int, ...]
    pass_time: tuple[int, ...]
    first_base: tuple[int, ...]
    rerun_base: tuple[int, ...]
    backward_base: tuple[int, ...]
    loss_peak: int

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return len(self.options)

    def keep_everything_need(self) -> int:
        """Bytes that the dynamic program counts if every block keeps everything."""
        need, saved = self.loss_peak, 0
        for k, options in enumerate(self.options):
            keep = options[0]
            need = max(need, saved + keep.forward_peak + self.first_base[k])
            need = max(need, saved + keep.backward_peak + self.backward_base[k])
            saved += keep.save + self.interface_bytes[k][k + 1]
        return max(need, saved + self.loss_peak)


Options = Mapping[int, tuple[Option, ...]]
"""Options per kind of block."""

SolvedViews = dict[tuple[object, ...], tuple[Option, ...]]
"""Options by the key of a block's view and the grid for which they were solved."""


def kind_views(problem: Problem) -> dict[int, BlockView]:
    """For each kind of block, the view that most of its members have."""
    last = last_readers(problem)
    views: dict[int, Counter[tuple[object, ...]]] = {}
    example: dict[tuple[object, ...], BlockView] = {}
    for block in problem.blocks:
        view = block_view(problem, block, last)
        views.setdefault(block.kind, Counter())[view.key] += 1
        example.setdefault(view.key, view)
    return {kind: example[keys.most_common(1)[0][0]] for kind, keys in views.items()}


def kind_options(
    problem: Problem,
    grid: Grid,
    report: Callable[[float], None] = lambda _: None,
    limit: TimeLimit | None = None,
    solved: SolvedViews | None = None,
) -> dict[int, tuple[Option, ...]]:
    """The options of each kind of block, solved for the view that most of its members have.

    ``report``: called with the part of the kinds that is done. ``limit``: when no time is left, only the options found
    so far are returned. ``solved``: options of views solved before; those solved now are added.
    """
    views, limit, solved = kind_views(problem), limit or TimeLimit(), {} if solved is None else solved
    options: dict[int, tuple[Option, ...]] = {}
    for done, (kind, view) in enumerate(views.items()):

        def of_all(part: float, done: int = done) -> None:
            report((done + part) / len(views))

        key, stopped = (view.key, grid), limit.stopped
        options[kind] = solved.get(key) or view_options(view, grid, of_all, limit)
        if limit.stopped == stopped:
            solved[key] = options[kind]
        of_all(1.0)
    return options


def chain_costs(problem: Problem, options: Options) -> ChainCosts:
    """All costs of the chain. The options of a kind get the figures that they have in each of its blocks."""
    last = last_readers(problem)
    views = [block_view(problem, block, last) for block in problem.blocks]
    keys = [(block.kind, view.key) for block, view in zip(problem.blocks, views, strict=True)]
    distinct = dict(zip(keys, views, strict=True))
    members = {key: member_options(view, options[key[0]]) for key, view in distinct.items()}
    passes = {key: forward_figures(view, frozenset()) for key, view in distinct.items()}
    first, always = _always_live(problem)
    rng = sum(n.rng for n in problem.nodes if n.rerun)
    gradients = _gradients_before(problem)
    return ChainCosts(
        options=tuple(members[key] for key in keys),
        interface_bytes=_interface_bytes(problem, last),
        pass_peak=tuple(passes[key][0] for key in keys),
        pass_time=tuple(passes[key][1] for key in keys),
        first_base=tuple(first[k] + rng + _returned_before(problem, b.stop) for k, b in enumerate(problem.blocks)),
        rerun_base=tuple(always[k + 1] + rng + gradients[k] for k in range(len(views))),
        backward_base=tuple(always[k + 1] + rng + views[k].base for k in range(len(views))),
        loss_peak=always[-1] + rng + problem.loss + _returned_before(problem, len(problem.nodes)),
    )


def _interface_bytes(problem: Problem, last: list[int]) -> tuple[tuple[int, ...], ...]:
    """Bytes of I_k not in I_i: data made in i..k-1 and last read at or after k (for k > i)."""
    starts = [b.start for b in problem.blocks] + [len(problem.nodes)]
    data = [(d.owner, last[at], d.size) for at, d in enumerate(problem.data) if counted(problem, at)]
    crossing = [[x for x in data if x[0] < start <= x[1]] for start in starts]
    return tuple(
        tuple(sum(size for owner, _, size in crossing[k] if owner >= start) if k > i else 0 for k in range(len(starts)))
        for i, start in enumerate(starts[:-1])
    )


def _always_live(problem: Problem) -> tuple[list[int], list[int]]:
    """For each k in 0..B, the bytes of always-live data in the forward phase before block k, and after the loss."""
    read = {d for n in problem.nodes for d in n.reads + (n.backward.reads if n.backward else ())}
    starts = [b.start for b in problem.blocks] + [len(problem.nodes)]
    held = [problem.data[d] for d in problem.held]
    once = [
        datum
        for d, datum in enumerate(problem.data)
        if d in read and d not in problem.held and not problem.nodes[datum.owner].rerun
    ]
    first = [sum(datum.size for datum in held + once if datum.owner < start) for start in starts]
    late = [sum(datum.size for datum in held if datum.owner >= start) for start in starts]
    return first, [early + more for early, more in zip(first, late, strict=True)]


def _returned_before(problem: Problem, stop: int) -> int:
    """Bytes of returned data that nodes before ``stop`` make. Those that are also saved count twice (conservative)."""
    return sum(d.size for k in problem.returned - problem.held if (d := problem.data[k]).owner < stop)


def _gradients_before(problem: Problem) -> list[int]:
    """For each block, the gradient bytes live when the backward phase reaches it."""
    result: list[int] = []
    before = 0
    for block in problem.blocks:
        for i in range(block.start, block.stop):
            backward = problem.nodes[i].backward
            before = backward.before if backward else before
        result.append(before)
    return result
