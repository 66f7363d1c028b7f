"""What measuring finds: the cost of a node, and all costs of a graph that are known."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from rkgb.cost.layouts import Outgoing
from rkgb.cost.piece import Layouts
from rkgb.cost.usage import Usage


@dataclass(frozen=True, slots=True)
class InputGradient:
    """The gradient that a backward computes for one input: ``bytes`` of new memory, or memory of another gradient.

    A parameter's ``.grad`` is this tensor itself if its strides are the parameter's, but for dimensions of size 1;
    where it is a view, all of its memory stays. With other strides ``.grad`` is a copy (``copied``), made when no other
    contribution is to come.

    ``shares``: ("result", k) if it lies in the incoming gradient of the k-th result, ("input", k) if in the gradient of
    the earlier input k, None for new memory. ``alias``: it is the very tensor that this other gradient is; autograd
    makes a parameter's ``.grad`` a copy while another value has the tensor. ``sparse``: indices and values, which are
    put behind those of an earlier contribution.
    """

    bytes: int
    shares: tuple[str, int] | None
    alias: bool = False
    copied: bool = False
    sparse: bool = False


class Times(NamedTuple):
    """Nanoseconds of a node: see ``Cost``."""

    forward: int
    backward: int
    warm: int | None = None
    launches: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Cost:
    """Costs of one S node; times in nanoseconds, memory in bytes.

    ``forward_time``: of a forward that runs again; ``warm_time``: of one right after the runs that made what it reads,
    None if it is the same. ``backward_time``: of all else that a step needs of the node, its
    backward and what its first forward takes beyond ``forward_time`` (less, if it finds its inputs in caches).
    ``forward_peak``: the most that a run allocates, results and saved tensors included. ``backward_peak``: the most
    that the backward adds to the level at its start, with ``incoming`` bytes of gradients of the results; saved
    tensors are released operation by operation. ``held_peak``: the same if somebody else holds the incoming gradients
    to the end. ``together_peak``: the same if the incoming gradients are views of one memory.
    ``results``: positions in ``makes`` of the results that get gradients. ``inputs``: for each position in ``reads``
    the gradient that the backward computes, or None. ``views``: positions in ``reads`` whose gradient is a view of
    other memory; autograd never accumulates into such a gradient in place. ``launches``: nanoseconds that the host
    takes to launch the forward and the backward, where the device runs behind it; else 0.
    """

    forward_time: int
    forward_peak: int
    backward_time: int = 0
    backward_peak: int = 0
    held_peak: int = 0
    together_peak: int = 0
    incoming: int = 0
    results: tuple[int, ...] = ()
    inputs: tuple[InputGradient | None, ...] = ()
    views: frozenset[int] = frozenset()
    warm_time: int | None = None
    launches: tuple[int, int] = (0, 0)

    @property
    def times(self) -> Times:
        return Times(self.forward_time, self.backward_time, self.warm_time, self.launches)


class Kept:
    """A store of costs that outlives the process. This one stores nothing."""

    def get(self, usage: Usage, given: frozenset[int]) -> list[Cost] | None:
        """The costs of all nodes for this ``usage``, where sources ``given`` have a ``.grad``; None if not stored."""
        return None

    def put(self, usage: Usage, given: frozenset[int], costs: list[Cost]) -> list[Cost]:
        """Store what was measured; that, or what is to be taken in its place."""
        return costs


class Known:
    """All costs of a graph that are known, so that equal nodes are measured once.

    ``given``: the sources that had a ``.grad`` at the first measuring; they are taken to have one ever after.
    ``stand_ins``: whether results of equal nodes may stand for each other. ``costs``: by the node, its gradients, their
    layouts, and what is held. ``of``: costs of all nodes of the graph, for each usage that was asked for. ``like``:
    gives costs that need no measuring, scaled from a graph of other sizes, or None; ``anew``: the nodes whose memory is
    measured nevertheless. ``layouts``: of the gradients that nodes get, where they are known. ``kept``: costs of an
    earlier process. ``own``: whether the graph itself was measured. ``measurings``: how often.
    """

    def __init__(
        self, like: Callable[[Usage], list[Cost] | None] = lambda _: None, anew: frozenset[int] = frozenset()
    ) -> None:
        self.kept = Kept()
        self.anew = anew
        self.layouts: dict[Usage, list[Layouts]] = {}
        self.own = False
        self.measurings = 0
        self.given: frozenset[int] | None = None
        self.stand_ins = True
        self.costs: dict[tuple[Hashable, ...], Cost] = {}
        self.outgoing: dict[Hashable, Outgoing] = {}
        self.of: dict[Usage, list[Cost]] = {}
        self.like = like

    def times(self, key: tuple[Hashable, ...]) -> Times | None:
        """Times of the node of ``key``, if it was measured with gradients of other layouts."""
        same = next((cost for other, cost in self.costs.items() if other[:2] == key[:2]), None)
        return None if same is None else same.times


def check_costs(costs: str, error: type[ValueError] = ValueError) -> None:
    """Raise ``error`` unless ``costs`` is "measured" or "flops"."""
    if costs not in ("measured", "flops"):
        raise error(f'costs={costs!r}: choose "measured" (time every operation) or "flops" (same on every run)')
