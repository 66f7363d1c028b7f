"""Which operations of a captured program become one piece: connected, convex groups of light ones.

A group is convex if no path leads from it through another operation and back. So the groups, each as one node, have an
order again. Operations that change something, draw or switch a mode keep their order to those that it matters to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import fx

from rockmate.pieces.seen import Seen, takes_one

LEAST_WORK = 2
"""Operators, views not counted, that a piece has at least: one alone is a kernel already."""


@dataclass(frozen=True)
class Grouping:
    """``groups``: the nodes of each piece, in order; ``order``: all nodes, so that a piece's could run as one."""

    groups: tuple[tuple[fx.Node, ...], ...]
    order: tuple[fx.Node, ...]


def grouped(program: fx.GraphModule, seen: Mapping[fx.Node, Seen]) -> Grouping:
    """The groups of light operations that need a gradient. Several results stay with what takes single ones out."""
    nodes = [n for n in program.graph.nodes if n.op != "output"]
    before = _before(nodes, seen)
    together = _fusible(nodes, seen)
    graph = _Contracted(nodes, before)
    for n in nodes:
        if n in together and takes_one(n, seen):
            graph.merge(n, n.args[0])
    for n in nodes:
        for i in n.all_input_nodes:
            if n in together and i in together and graph.can_merge(n, i):
                graph.merge(n, i)
    found = [m for m in graph.members() if m[0] in together and sum(seen[n].work for n in m) >= LEAST_WORK]
    final = _Contracted(nodes, before)
    for members in found:
        for n in members:
            final.merge(members[0], n)
    return Grouping(tuple(map(tuple, found)), tuple(final.order()))


def _fusible(nodes: list[fx.Node], seen: Mapping[fx.Node, Seen]) -> set[fx.Node]:
    """Light nodes that need a gradient and change nothing, and whose memory no other node changes; what takes tensors
    out of several.
    """
    written = {base for n in nodes for base in seen[n].writes}
    found: set[fx.Node] = set()
    for n in nodes:
        if takes_one(n, seen):
            if n.args[0] in found:
                found.add(n)
        elif seen[n].light and seen[n].grad and not seen[n].writes and seen[n].base not in written:
            found.add(n)
    return found


def _before(nodes: list[fx.Node], seen: Mapping[fx.Node, Seen]) -> dict[fx.Node, set[fx.Node]]:
    """What each node stays behind: what it reads, the last draw before a draw, what read before a write or wrote before
    a read, and operations without tensors (modes), which all others keep their side of.
    """
    found: dict[fx.Node, set[fx.Node]] = {}
    readers: dict[fx.Node, set[fx.Node]] = {}
    writer: dict[fx.Node, fx.Node] = {}
    drawn: fx.Node | None = None
    since: list[fx.Node] = []  # the nodes since the last one that switches a mode, that one included
    for n in nodes:
        needed = found[n] = set(n.all_input_nodes)
        bases = {seen[i].base for i in n.all_input_nodes}
        needed.update(writer[b] for b in bases if b in writer)
        for b in seen[n].writes:
            needed.update(readers.get(b, ()))
            writer[b] = n
        for b in bases:
            readers.setdefault(b, set()).add(n)
        if seen[n].draws:
            needed.update(() if drawn is None else (drawn,))
            drawn = n
        if seen[n].switches:
            needed.update(since)
            since = [n]
        else:
            needed.update(since[:1] if since and seen[since[0]].switches else ())
            since.append(n)
        needed.discard(n)
    return found


class _Contracted:
    """The graph of groups: each node is one at first."""

    def __init__(self, nodes: list[fx.Node], before: Mapping[fx.Node, Iterable[fx.Node]]) -> None:
        self.at = {n: k for k, n in enumerate(nodes)}
        self.nodes = nodes
        self.group = list(range(len(nodes)))  # of each node
        self.of: dict[int, list[int]] = {k: [k] for k in self.group}
        self.before: dict[int, set[int]] = {self.at[n]: {self.at[i] for i in before[n]} for n in nodes}

    def merge(self, a: fx.Node, b: fx.Node) -> None:
        """The groups of both are one."""
        kept, gone = sorted((self.group[self.at[a]], self.group[self.at[b]]))
        if kept == gone:
            return
        self.of[kept] = sorted(self.of[kept] + self.of.pop(gone))
        for k in self.of[kept]:
            self.group[k] = kept
        self.before[kept] |= self.before.pop(gone)

    def can_merge(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether no path leads from one group through another to the other one."""
        one, other = self.group[self.at[a]], self.group[self.at[b]]
        return one != other and not self._reaches(one, other) and not self._reaches(other, one)

    def _reaches(self, start: int, end: int) -> bool:
        """Whether a path leads back from ``start`` to ``end`` through another group."""
        first = self.of[end][0]
        waiting = [g for g in self._groups_before(start) if g != end]
        known = set(waiting)
        while waiting:
            for g in self._groups_before(waiting.pop()):
                if g == end:
                    return True
                if g not in known and self.of[g][-1] > first:
                    known.add(g)
                    waiting.append(g)
        return False

    def _groups_before(self, group: int) -> set[int]:
        return {g for g in map(self.group.__getitem__, self.before[group]) if g != group}

    def members(self) -> list[list[fx.Node]]:
        return [[self.nodes[k] for k in members] for members in self.of.values()]

    def order(self) -> list[fx.Node]:
        """All nodes, those of a group together, as late as its last one stands if nothing else asks for more."""
        done: dict[int, None] = {}  # groups, in the order that is asked for
        for start in sorted(self.of, key=lambda g: self.of[g][-1]):
            stack = [start]
            while stack:
                g = stack[-1]
                left = [x for x in sorted(self._groups_before(g)) if x not in done]
                if left:
                    stack += left
                    continue
                stack.pop()
                done.setdefault(g)
        return [self.nodes[k] for g in done for k in self.of[g]]
