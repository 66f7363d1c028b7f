"""Which pieces run compiled: decided once for each class, before anything is planned, and kept for others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rkgb.device import kind_of
from rkgb.settings import settings
from rockmate.pieces import judged
from rockmate.pieces.piece import Piece
from rockmate.planning.disk import named
from rockmate.planning.kept import versions
from rockmate.planning.options import PlanOptions
from rockmate.planning.places import places_of


def runs_compiled(piece: Piece, arguments: Sequence[Any], options: PlanOptions) -> bool:
    """Whether ``piece`` takes less time compiled than by eager kernels, on such ``arguments``.

    The choice of an earlier process, or of another rank, is taken over, so that the bits of two runs are the same.
    Where times are modelled, everything is compiled; so is what draws, since masks are not to depend on a clock.
    """
    if options.costs != "measured" or piece.draws:
        return True
    places = places_of(options.disk)
    device = next(a.device for a in arguments if isinstance(a, torch.Tensor))
    where = device.type, kind_of(device).model(device), settings(), versions()
    name = named("pieces", repr(piece), tuple(map(_form, arguments)), torch.is_autocast_enabled(device.type), where)
    known = None if places is None else places.read(name, _checked)
    if known is not None:
        return known
    pays = judged.pays(judged.Runner(piece, arguments))
    return pays if places is None else places.keep(name, {"compiled": pays}, _checked, pays)


def _form(a: Any) -> str:
    return f"{a.dtype} {list(a.shape)} {a.stride()}" if isinstance(a, torch.Tensor) else repr(a)


def _checked(content: dict[str, Any]) -> bool:
    if not isinstance(content["compiled"], bool):
        raise ValueError("it does not say whether a piece is compiled")
    return content["compiled"]
