"""A captured program with its light operations as pieces: each a node that reads and makes tensors of others.

This takes place before tracing, on the program that TorchDynamo captured: all stages see a piece as one operation.

Connected, convex groups become pieces. A group is convex if no path leads from it through another operation and back.
So the groups, each as one node, have an order again. Operations that change something, draw or switch a mode keep their
order to those that it matters to.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import getitem

from torch import fx

from rockmate.calls.captured import line_of
from rockmate.pieces.functional import put_back
from rockmate.pieces.kernels import Form
from rockmate.pieces.piece import Piece
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
    """Light nodes that need a gradient and change nothing, whose memory no other node changes; what takes tensors out
    of several. What they read is changed neither later nor, where it outlives the call, at all: the code may save it
    where eager kernels save a result. Nor is it a fraction, which differs from other calls': each would be compiled.
    """
    last = {base: k for k, n in enumerate(nodes) for base in seen[n].writes}
    written = {base: k if base.op.startswith("call") else len(nodes) for base, k in last.items()}
    found: set[fx.Node] = set()
    for k, n in enumerate(nodes):
        if takes_one(n, seen):
            if n.args[0] in found:
                found.add(n)
        elif seen[n].light and seen[n].grad and not seen[n].writes and seen[n].base not in written:
            read = [seen[i] for i in n.all_input_nodes]
            if all(written.get(r.base, -1) < k and not isinstance(r.argument, float) for r in read):
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


MOST_WORDS = 4
"""Operations that the name of a piece has at most."""


@dataclass(frozen=True)
class Group:
    """A group that may become a piece: its ``inputs`` (nodes of others, in order), ``outputs`` and ``members``."""

    members: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    piece: Piece


def pieces_of(grouping: Grouping, seen: Mapping[fx.Node, Seen], known: dict[Hashable, Piece]) -> list[Group]:
    """The groups with their pieces, equal ones one object.

    ``known``: pieces by their identity and the forms of their arguments, which grows.
    """
    found = (_group(members, seen, known) for members in grouping.groups)
    return [group for group in found if group is not None]


def _group(members: Sequence[fx.Node], seen: Mapping[fx.Node, Seen], known: dict[Hashable, Piece]) -> Group | None:
    """Views of what the group makes, and of what it is given, are taken again outside where others read them."""
    inside = set(members)
    read = {n for n in members if not inside.issuperset(n.users)}
    for n in reversed(members):
        if n in read and not _allocates(n, seen):
            read.update(inside.intersection(n.all_input_nodes))
    outputs = tuple(n for n in members if n in read and _allocates(n, seen))
    if not any(seen[n].grad for n in outputs):
        return None
    graph = fx.Graph()
    inputs: dict[fx.Node, fx.Node] = {}
    needed = set(outputs)  # what these depend on
    for n in reversed(members):
        if n in needed:
            needed.update(inside.intersection(n.all_input_nodes))
    copies: dict[fx.Node, fx.Node] = {}
    for n in members:
        for i in n.all_input_nodes if n in needed else ():
            if i not in inside and i not in inputs:
                inputs[i] = copies[i] = graph.placeholder(f"given_{len(inputs)}")
    for n in (n for n in members if n in needed):
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), copies.__getitem__)
        copies[n] = graph.create_node(n.op, n.target, args, kwargs)
    graph.output(tuple(copies[n] for n in outputs))
    wanted = frozenset().union(*(seen[n].wants for n in needed))  # what is written may need a gradient only later
    wants = tuple(i in wanted for i in inputs)
    work = [n for n in members if n in needed and seen[n].work]
    words = dict.fromkeys(map(_word, work))
    flows = tuple(seen[n].grad for n in outputs)
    where = line_of(next((n for n in members if n in needed and n.meta.get("stack_trace")), members[0]))
    types = frozenset(t for n in members for t in seen[n].types)
    name, listed = "_".join(list(words)[:MOST_WORDS]), _listed(work)
    piece = Piece(fx.GraphModule({}, graph), wants, flows, types, name, where, listed)
    forms = tuple(a if isinstance(a := seen[i].argument, Form) else None for i in inputs)
    return Group(tuple(members), tuple(inputs), outputs, known.setdefault((piece.identity, forms), piece))


def _allocates(n: fx.Node, seen: Mapping[fx.Node, Seen]) -> bool:
    """Whether the result is memory that the node makes, or takes out of several results that are."""
    return seen[n].base is n or (takes_one(n, seen) and _allocates(n.all_input_nodes[0], seen))


def _word(n: fx.Node) -> str:
    name = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", str(n.target))
    return name.strip("_")


def _listed(work: Sequence[fx.Node]) -> str:
    """The operations, and behind those of one line of the user's that line."""
    lines = groupby(work, line_of)
    return "; ".join(f"{', '.join(map(_word, nodes))}{line}" for line, nodes in lines)


def with_pieces(program: fx.GraphModule, order: Sequence[fx.Node], groups: Sequence[Group]) -> fx.GraphModule:
    """``program`` with ``groups`` as calls of their pieces, which it then has as submodules, too.

    ``order``: of its nodes, those of a group together.
    """
    graph = fx.Graph()
    of = {n: group for group in groups for n in group.members}
    names = {id(group.piece): f"piece_{k}" for k, group in enumerate(groups)}
    new: dict[fx.Node, fx.Node] = {}

    def outside(n: fx.Node) -> fx.Node:
        """The value of ``n`` in the new graph; a view in a group is taken again."""
        if n not in new:
            new[n] = graph.node_copy(n, outside)
        return new[n]

    done: set[int] = set()
    for n in order:
        group = of.get(n)
        if group is None:
            new[n] = graph.node_copy(n, outside)
            put_back(new[n], of)
        elif id(group) not in done:
            done.add(id(group))
            program.add_submodule(names[id(group.piece)], group.piece)
            called = graph.call_module(names[id(group.piece)], tuple(outside(i) for i in group.inputs))
            _put_outputs(graph, group, called, new)
    output = next(iter(program.graph.find_nodes(op="output")))
    graph.output(fx.node.map_arg(output.args[0], outside))
    return fx.GraphModule(program, graph)


def _put_outputs(graph: fx.Graph, group: Group, called: fx.Node, new: dict[fx.Node, fx.Node]) -> None:
    """The results of a call of a piece are those of the group's outputs, with what is known of them."""
    main = next((n for n in group.members if n.meta.get("nn_module_stack")), group.members[0])
    called.meta = {k: v for k, v in main.meta.items() if k != "example_value"}
    examples = [n.meta.get("example_value") for n in group.outputs]
    if len(examples) == 1:
        new[group.outputs[0]] = called
        called.meta["example_value"] = examples[0]
        return
    called.meta["example_value"] = tuple(examples)
    for k, n in enumerate(group.outputs):
        new[n] = graph.call_function(getitem, (called, k))
        new[n].meta = {**called.meta, "example_value": examples[k]}
