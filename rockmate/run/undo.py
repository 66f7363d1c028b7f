"""What a call puts back where a guard fails: generators and sources, as they were before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rkgb.graphs import S_graph
from rkgb.randomness import Drawn, drawn_by, random_state, set_random_state, state_bytes
from rkgb.trace.guards import is_guard


@dataclass(frozen=True)
class Undo:
    """What a call must put back if a guard fails: generators and sources changed before the last guard.

    ``last``: the node of the last guard, -1 if there is none.
    """

    last: int = -1
    drawn: tuple[Drawn, ...] = ()
    sources: tuple[int, ...] = ()


def undo_of(s: S_graph) -> Undo:
    """What the guards of ``s`` make necessary."""
    last = max((i for i, n in enumerate(s.nodes) if any(is_guard(s.d.nodes[op]) for op in n.ops)), default=-1)
    before = s.nodes[: last + 1]
    written = {x for n in before for op in n.ops for x in s.d.facts[op].writes}
    sources = tuple(v for v in s.d.sources if s.d.values[v].storage in written)
    drawn = dict.fromkeys(x for i in range(last + 1) for x in drawn_by(s, i))
    return Undo(last, tuple(drawn), sources)


def undo_bytes(s: S_graph) -> int:
    """What the copies of an ``Undo`` take."""
    undo = undo_of(s)
    return state_bytes(undo.drawn) + sum(s.d.values[v].bytes for v in undo.sources)


class Snapshot:
    """Generator states and copies of sources, to put back if a guard fails."""

    def __init__(self, undo: Undo, sources: dict[int, torch.Tensor]) -> None:
        self.states = [(x, random_state(x)) for x in undo.drawn]
        self.copies = [(sources[v], sources[v].detach().clone()) for v in undo.sources]
        self.counted = tuple(t for t, _ in self.copies if not t.is_inference())
        self.versions = tuple(t._version for t in self.counted)

    def restore(self) -> None:
        """Put all back; tensors count as never changed, since an earlier call in the same graph may have saved them."""
        for drawn, state in self.states:
            set_random_state(drawn, state)
        with torch.no_grad():
            for t, copy in self.copies:
                t.copy_(copy)
        torch._C._autograd._unsafe_set_version_counter(self.counted, self.versions)
