"""From a captured program to one with compiled pieces.

Which run compiled is decided once for each class, before anything is planned, and kept for others.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from rkgb.device import kind_of
from rkgb.program import in_mode
from rkgb.settings import settings
from rkgb.trace.operators import WritesSeen
from rkgb.trace.preserved import drop_saved, preserved
from rkgb.trace.written import put_back
from rockmate.calls.functions import copied
from rockmate.pieces.dropout import with_seeds
from rockmate.pieces.functional import without_writes
from rockmate.pieces.fuse import Group, grouped, pieces_of, with_pieces
from rockmate.pieces.inductor import at_once
from rockmate.pieces.kernels import Form, form_of, isolated
from rockmate.pieces.norms import with_statistics, without_statistics
from rockmate.pieces.piece import Piece, Runner
from rockmate.pieces.seen import Seen, watch
from rockmate.planning.disk import named, places_of
from rockmate.planning.kept import versions
from rockmate.planning.options import PlanOptions


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

    ``inputs``: of a call, on which pieces are looked at; what this changes is put back, parameters that the program
    writes to, too. ``known``: pieces by their identity, those of other programs of the model. Raises ``PieceError`` for
    a piece whose numbers are wrong.
    """
    program = fx.GraphModule(program, copied(program.graph))
    tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
    without_statistics(program)
    with_seeds(program, tensors[0].device)
    changed = [t for t in tensors if not isinstance(t, torch.nn.Parameter)]
    parameters = torch.nn.ParameterList(t for t in tensors if isinstance(t, torch.nn.Parameter))
    writes = WritesSeen()
    with (
        preserved(torch.nn.Module(), changed),
        put_back(parameters, writes),
        writes,
        torch.enable_grad(),
        drop_saved(),
    ):
        seen = watch(program, inputs)
    written = {base for about in seen.values() for base in about.writes}
    places = zip(program.graph.find_nodes(op="placeholder"), inputs, strict=True)
    changed += [t for place, t in places if place in written and isinstance(t, torch.nn.Parameter)]
    if without_writes(program, seen):
        with preserved(torch.nn.Module(), changed), torch.enable_grad(), drop_saved():
            seen = watch(program, inputs)
    grouping = grouped(program, seen)
    groups = pieces_of(grouping, seen, known)
    waited = isolated(partial(compile_ahead, groups, seen, choices))
    with preserved(torch.nn.Module(), changed):
        kept = _Judge(with_pieces(program, grouping.order, groups), choices).kept(inputs)
    chosen = [g for g in groups if g.piece in kept]
    program = with_pieces(program, grouping.order, chosen)
    with_statistics(program)
    return Pieces(program, dict(Counter(g.piece for g in chosen)), len(groups) - len(chosen), waited)


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

    def __init__(self, program: fx.GraphModule, choices: Choices) -> None:
        super().__init__(program)
        self.extra_traceback = False  # an error says where it is from
        self.choices = choices
        self.judged: dict[Piece, bool] = {}

    def kept(self, inputs: Sequence[Any]) -> set[Piece]:
        with torch.no_grad():
            self.run(*inputs)
        return {piece for piece, compiled in self.judged.items() if compiled}

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        piece = self.fetch_attr(target)
        if not isinstance(piece, Piece):
            return super().call_module(target, args, kwargs)
        if piece not in self.judged:
            self.judged[piece] = self.choices.made(piece, args)
        return piece(*args) if self.judged[piece] else piece.eager(*args)


_DECIDED: dict[str, bool] = {}
"""Choices of this process that are not kept on disk."""


@dataclass(frozen=True)
class Choices:
    """Whether pieces run compiled, under ``options``.

    The choice for an earlier plan, of an earlier process, or of another rank, is taken over, so that the bits of two
    runs are the same. Where times are modelled, everything is compiled; so is what draws, since masks are not to depend
    on a clock.
    """

    options: PlanOptions

    def known(self, piece: Piece, forms: tuple[Any, ...]) -> bool | None:
        """The choice for arguments of such ``forms``; None if the piece is to be timed."""
        if self.options.costs != "measured" or piece.draws:
            return True
        places, name = places_of(self.options.disk), _name(piece, forms)
        return _DECIDED.get(name) if places is None else places.read(name, _checked)

    def made(self, piece: Piece, arguments: Sequence[Any]) -> bool:
        """The choice for ``arguments``, on which the piece is timed if need be."""
        forms = tuple(map(form_of, arguments))
        known = self.known(piece, forms)
        if known is not None:
            return known
        pays, places, name = Runner(piece, arguments).pays(), places_of(self.options.disk), _name(piece, forms)
        if places is None:
            return _DECIDED.setdefault(name, pays)
        return places.keep(name, {"compiled": pays}, _checked, pays)


def _name(piece: Piece, forms: tuple[Any, ...]) -> str:
    device = next(f.device for f in forms if isinstance(f, Form))
    where = device.type, kind_of(device).model(device), settings(), versions()
    return named("pieces", repr(piece), tuple(map(repr, forms)), torch.is_autocast_enabled(device.type), where)


def _checked(content: dict[str, Any]) -> bool:
    if not isinstance(content["compiled"], bool):
        raise ValueError("it does not say whether a piece is compiled")
    return content["compiled"]
