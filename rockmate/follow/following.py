"""Around a forward whose operations a tape notes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from rockmate.calls.surroundings import modes_again
from rockmate.follow.exposed import telling_of_memory
from rockmate.follow.tape import Tape
from rockmate.follow.unhooked import giving_way


@contextlib.contextmanager
def following(tape: Tape, modes: list[Any]) -> Iterator[None]:
    """What runs within is noted on ``tape``, which is closed when it is over. ``modes``: the caller's, which are in
    force within.
    """
    pack, unpack = tape.pack, tape.unpack
    saved, way = saved_tensors_hooks(pack, unpack), giving_way(pack, unpack)
    with modes_again(modes), telling_of_memory(tape), saved, way, tape:
        yield
    tape.close()
