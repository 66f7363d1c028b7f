"""Tables over stages s and t, cut in square tiles, so that all tiles of a diagonal are one view."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

TILE = 8
"""Stages of a tile: so few that the rows that one tile reads stay in the processor's cache."""


@dataclass(frozen=True)
class Cells:
    """``whole[s, t]``: a table, padded to whole tiles. ``diagonals[d][i, s, t]``: its tiles (i, i + d), as a view."""

    whole: npt.NDArray[Any]
    diagonals: tuple[npt.NDArray[Any], ...]


def cells(whole: npt.NDArray[Any]) -> Cells:
    """``whole``, whose first two dimensions are s and t, with views of its diagonals."""
    count = len(whole) // TILE
    tiled = whole.reshape(count, TILE, count, TILE, *whole.shape[2:])
    return Cells(whole, tuple(np.einsum("isit...->ist...", tiled[: count - d, :, d:]) for d in range(count)))


def by_tile(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """``values`` of stages as [tile, stage in it]."""
    return values.reshape(-1, TILE)
