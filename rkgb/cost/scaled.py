"""What a graph costs at other sizes: costs that were measured at one size, scaled.

Bytes of results and gradients are exact; what kernels take is bounded from above.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import ceil

from rkgb.cost.costs import Cost, InputGradient
from rkgb.graphs import S_graph


def growth(old: S_graph, new: S_graph) -> Fraction:
    """How many times larger than in ``old`` the largest value of ``new`` has become, which has the same skeleton."""
    return max((Fraction(x.bytes, max(1, old.d.values[v].bytes)) for v, x in new.d.values.items()), default=Fraction(1))


def scaled_costs(old: S_graph, new: S_graph, costs: Sequence[Cost]) -> list[Cost]:
    """What the nodes of ``new`` cost, which has the skeleton of ``old``, whose nodes cost ``costs``.

    Times are in proportion to the bytes that a node reads and makes. Memory is an upper bound if what kernels take for
    themselves grows no faster than the values around them (in operations on all pairs, than the square of that), and
    is no more for smaller ones where an algorithm is chosen by size (convolutions).
    """
    found: dict[Hashable, Cost] = {}
    every = []
    for i, cost in enumerate(costs):
        own = tuple((old.d.values[v].bytes, new.d.values[v].bytes) for v in (*old.nodes[i].reads, *old.nodes[i].makes))
        key = id(cost), own, old.nodes[i].saved.private, new.nodes[i].saved.private  # equal nodes have one cost
        if key not in found:
            found[key] = _scaled(old, new, i, cost)
        every.append(found[key])
    return every


NUMBERS = 64
"""Bytes for the numbers that kernels keep (scales, counts), whatever the sizes are."""

_PAIRS = frozenset("scaled_dot_product_attention cdist _cdist_forward ctc_loss _ctc_loss pdist".split())


def _scaled(old: S_graph, new: S_graph, i: int, cost: Cost) -> Cost:
    was, node = old.nodes[i], new.nodes[i]
    before = {v: max(1, old.d.values[v].bytes) for v in (*was.reads, *was.makes)}
    after = {v: new.d.values[v].bytes for v in before}
    fixed = NUMBERS + sum(before[v] for v in was.reads if after[v] == before[v])  # parameters above all
    ratios: list[Fraction] = [Fraction(after[v], before[v]) for v in before if after[v] != before[v]]
    most: Fraction = max(ratios) if ratios else Fraction(1)
    names = {new.d.nodes[op].name for op in node.ops}
    if most > 1 and names & _PAIRS:
        most = most * most
    if most < 1 and any("conv" in name for name in names):  # another algorithm may be chosen there
        most = Fraction(1)
    share = Fraction(sum(after.values()) or 1, sum(before.values()) or 1)

    def bounded(measured: int) -> int:
        """``measured`` bytes at another size. At each moment some of them, for ``fixed`` and a copy of it, stay as they
        are, and the others become at most ``most`` times as many.
        """
        stays = min(measured, 2 * fixed) if most < 1 else 0
        return ceil(most * (measured - stays)) + stays

    made = sum(new.d.storages[x].bytes for x in node.storages) + sum(node.saved.private)
    forward = max(made, bounded(cost.forward_peak))
    time = max(1, int(cost.forward_time * share))
    if not cost.results:
        return dataclasses.replace(cost, forward_time=time, forward_peak=forward)

    def gradient(position: int, g: InputGradient) -> InputGradient:
        v = was.reads[position]
        return InputGradient(ceil(Fraction(g.bytes * after[v], before[v])), g.shares)

    inputs = tuple(None if g is None else gradient(k, g) for k, g in enumerate(cost.inputs))
    came = [sum(sizes[was.makes[k]] for k in cost.results) for sizes in (before, after)]
    return dataclasses.replace(
        cost,
        forward_time=time,
        forward_peak=forward,
        backward_time=max(1, int(cost.backward_time * share)),
        backward_peak=bounded(cost.backward_peak),
        held_peak=bounded(cost.held_peak),
        together_peak=bounded(cost.together_peak),
        incoming=came[1] if cost.incoming == came[0] else bounded(cost.incoming),
        inputs=inputs,
    )
