"""From a captured program to one with compiled pieces."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from rkgb.program import in_mode
from rkgb.trace.preserved import drop_saved, preserved
from rockmate.calls.captured import Checkpointed
from rockmate.pieces.choice import Choices
from rockmate.pieces.dropout import with_seeds
from rockmate.pieces.functional import without_writes
from rockmate.pieces.fuse import Group, pieces_of, with_pieces
from rockmate.pieces.groups import grouped
from rockmate.pieces.inductor import at_once
from rockmate.pieces.kernels import isolated
from rockmate.pieces.norms import with_statistics, without_statistics
from rockmate.pieces.piece import Piece
from rockmate.pieces.seen import Seen, watch


@dataclass(frozen=True)
class Pieces:
    """``program``: with pieces. ``pieces``: how often each is called. ``eager``: groups that run by eager kernels.
    ``waited``: seconds for which compilers worked on after the code of all pieces was there.
    """

    program: fx.GraphModule
    pieces: dict[Piece, int]
    eager: int
    waited: float

    @property
    def seconds(self) -> float:
        """That compiling took so far."""
        return self.waited + sum(piece.seconds for piece in self.pieces)

    def __str__(self) -> str:
        """How many there are, and in a line for each class of compiled ones its operations."""
        count = sum(self.pieces.values())
        said = (
            f"{count + self.eager}, of them compiled: {count}, of {len(self.pieces)} classes, in {self.seconds:.1f} s"
        )
        return "\n".join([said, *(f"{n} × {piece.listed}" for piece, n in self.pieces.items())])


def with_compiled_pieces(
    program: fx.GraphModule,
    inputs: Sequence[Any],
    known: dict[Hashable, Piece],
    choices: Choices,
) -> Pieces:
    """``program`` with those of its light operations compiled that ``choices`` says.

    ``inputs``: of a call, on which pieces are looked at; buffers and generators are put back. ``known``: pieces by
    their identity, those of other programs of the model. Raises ``PieceError`` for a piece whose numbers are wrong.
    """
    program = copied(program)
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    with_checkpointed_parts(program)
    without_statistics(program)
    with_seeds(program, tensors[0].device)
    changed = [t for t in tensors if not isinstance(t, torch.nn.Parameter)]
    with preserved(torch.nn.Module(), changed), torch.enable_grad(), drop_saved():
        seen = watch(program, inputs)
    if without_writes(program, seen):
        with preserved(torch.nn.Module(), changed), torch.enable_grad(), drop_saved():
            seen = watch(program, inputs)
    grouping = grouped(program, seen)
    groups = pieces_of(grouping, seen, known)
    waited = isolated(partial(compile_ahead, groups, seen, choices))
    with preserved(torch.nn.Module(), changed):
        kept = _Judge(program, grouping.order, groups, choices).kept(inputs)
    chosen = [g for g in groups if g.piece in kept]
    program = with_pieces(program, grouping.order, chosen)
    with_statistics(program)
    return Pieces(
        program,
        dict(Counter(g.piece for g in chosen)),
        len(groups) - len(chosen),
        waited,
    )


def compile_ahead(groups: Sequence[Group], seen: Mapping[fx.Node, Seen], choices: Choices) -> float:
    """Compile the pieces of ``groups`` that run compiled or are to be timed, each for the arguments of its first call;
    returns for how many seconds it was waited for compilers at the end.
    """
    first = {group.piece: group for group in reversed(groups) if not group.piece.kernels}
    with at_once():
        for piece, group in first.items():
            forms = tuple(seen[i].argument for i in group.inputs)
            with in_mode(seen[group.members[0]].mode):
                if None not in forms and choices.known(piece, forms) is not False:
                    piece.compile_for(forms)
        start = time.perf_counter()
    return time.perf_counter() - start


class _Judge(fx.Interpreter):
    """Runs the program with all of its pieces; each is compiled and timed where it is first called."""

    def __init__(
        self,
        program: fx.GraphModule,
        order: Sequence[fx.Node],
        groups: Sequence[Group],
        choices: Choices,
    ) -> None:
        super().__init__(with_pieces(program, order, groups))
        self.extra_traceback = False  # an error says where it is from
        self.choices = choices
        self.judged: dict[Piece, bool] = {}

    def kept(self, inputs: Sequence[Any]) -> set[Piece]:
        """The pieces that are to run compiled."""
        with torch.no_grad():
            self.run(*inputs)
        return {piece for piece, compiled in self.judged.items() if compiled}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As in ``Interpreter``."""
        piece = self.fetch_attr(target)
        if not isinstance(piece, Piece):
            return super().call_module(target, args, kwargs)
        if piece not in self.judged:
            self.judged[piece] = self.choices.made(piece, args)
        return piece(*args) if self.judged[piece] else piece.eager(*args)


def with_checkpointed_parts(program: fx.GraphModule) -> None:
    """Put the operations of checkpointed parts, which run as they are, among the others."""
    for node in list(program.graph.find_nodes(op="call_module")):
        part = program.get_submodule(str(node.target))
        if not isinstance(part, Checkpointed):
            continue
        with_checkpointed_parts(part.body)
        known: dict[fx.Node, fx.Node] = dict(zip(part.body.graph.find_nodes(op="placeholder"), node.args, strict=True))
        with program.graph.inserting_before(node):
            for inner in part.body.graph.nodes:
                if inner.op == "get_attr" or inner.op == "call_module":
                    path = f"{node.name}_{inner.target}".replace(".", "_")
                    setattr(program, path, attrgetter(str(inner.target))(part.body))
                    known[inner] = program.graph.node_copy(inner, known.__getitem__)
                    known[inner].target = path
                elif inner.op not in ("placeholder", "output"):
                    known[inner] = program.graph.node_copy(inner, known.__getitem__)
        *_, output = part.body.graph.nodes
        _replace_results(node, fx.node.map_arg(output.args[0], known.__getitem__))
        program.graph.erase_node(node)


def _replace_results(node: fx.Node, results: Any) -> None:
    """Let what reads ``node`` read ``results``, a node or several."""
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
        return
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])
        user.graph.erase_node(user)


def copied(program: fx.GraphModule) -> fx.GraphModule:
    """The same program, to be changed."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
        if hasattr(node, "_dynamo_source"):
            known[node]._dynamo_source = node._dynamo_source
    return fx.GraphModule(program, graph)
