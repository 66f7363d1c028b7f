"""Which pieces run compiled: decided once for each class, before anything is planned, and kept for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.device import kind_of
from rkgb.settings import settings
from rockmate.pieces import judged
from rockmate.pieces.kernels import Form, form_of
from rockmate.pieces.piece import Piece
from rockmate.planning.disk import named
from rockmate.planning.kept import versions
from rockmate.planning.options import PlanOptions
from rockmate.planning.places import places_of


@dataclass(frozen=True)
class Choices:
    """Whether pieces run compiled, under ``options``.

    The choice of an earlier process, or of another rank, is taken over, so that the bits of two runs are the same.
    Where times are modelled, everything is compiled; so is what draws, since masks are not to depend on a clock.
    """

    options: PlanOptions

    def known(self, piece: Piece, forms: tuple[Any, ...]) -> bool | None:
        """The choice for arguments of such ``forms``; None if the piece is to be timed."""
        if self.options.costs != "measured" or piece.draws:
            return True
        places = places_of(self.options.disk)
        return None if places is None else places.read(_name(piece, forms), _checked)

    def made(self, piece: Piece, arguments: Sequence[Any]) -> bool:
        """The choice for ``arguments``, on which the piece is timed if need be."""
        forms = tuple(map(form_of, arguments))
        known = self.known(piece, forms)
        if known is not None:
            return known
        pays, places = judged.pays(judged.Runner(piece, arguments)), places_of(self.options.disk)
        return pays if places is None else places.keep(_name(piece, forms), {"compiled": pays}, _checked, pays)


def _name(piece: Piece, forms: tuple[Any, ...]) -> str:
    device = next(f.device for f in forms if isinstance(f, Form))
    where = device.type, kind_of(device).model(device), settings(), versions()
    return named("pieces", repr(piece), tuple(map(repr, forms)), torch.is_autocast_enabled(device.type), where)


def _checked(content: dict[str, Any]) -> bool:
    if not isinstance(content["compiled"], bool):
        raise ValueError("it does not say whether a piece is compiled")
    return content["compiled"]
