"""A captured program with its light operations as pieces: each a node that reads and makes tensors of others.

This takes place before tracing, on the program that TorchDynamo captured: all stages see a piece as one operation.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import getitem

from torch import fx

from rockmate.calls.captured import line_of
from rockmate.pieces.functional import put_back
from rockmate.pieces.groups import Grouping
from rockmate.pieces.kernels import Form
from rockmate.pieces.piece import Piece
from rockmate.pieces.seen import Seen, takes_one

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
    wants = tuple(seen[i].grad for i in inputs)
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
            if hasattr(n, "_dynamo_source"):
                new[n]._dynamo_source = n._dynamo_source
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
