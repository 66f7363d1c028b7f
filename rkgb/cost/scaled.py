"""Costs of a graph at another size, scaled from costs that were measured at one size.

Bytes of results and gradients are exact. Temporary memory of kernels is an upper bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from fractions import Fraction
from math import ceil

import torch

from rkgb.cost.costs import Cost, InputGradient
from rkgb.device import kind_of
from rkgb.graphs import S_graph


def growth(old: S_graph, new: S_graph) -> Fraction:
    """The largest ratio of a value's bytes in ``new`` to its bytes in ``old``, which has the same skeleton."""
    return max((Fraction(x.bytes, max(1, old.d.values[v].bytes)) for v, x in new.d.values.items()), default=Fraction(1))


def scaled_costs(old: S_graph, new: S_graph, costs: Sequence[Cost]) -> list[Cost]:
    """The costs of the nodes of ``new``, from ``costs`` of the nodes of ``old``, which has the same skeleton.

    Times are scaled by the bytes that a node reads and makes. Memory is an upper bound under two assumptions: temporary
    memory of a kernel grows no faster than the values that it reads, makes and keeps (for operations on all pairs, than
    the square of their growth), and an operation that chooses by size needs no more for smaller inputs. For those that
    may (``choosing_anew``) memory is measured.
    """
    found: dict[Hashable, Cost] = {}

    def of(i: int, cost: Cost) -> Cost:
        """Equal nodes have one cost, and scale alike where they have the same sizes."""
        node = new.nodes[i]
        key = id(cost), node.saved.private, *(new.d.values[v].bytes for v in (*node.reads, *node.makes))
        if key not in found:
            found[key] = _scaled(old, new, i, cost)
        return found[key]

    return [of(i, cost) for i, cost in enumerate(costs)]


NUMBERS = 64
"""Bytes of numbers that kernels keep at any size (scales, counts)."""

START = 8
"""Most bytes of the gradient that only starts a measured backward, and is no part of its peak."""

_PAIRS = frozenset("scaled_dot_product_attention cdist _cdist_forward ctc_loss _ctc_loss pdist".split())

_CHOOSING = ("conv", "scaled_dot_product_attention", "lstm", "gru", "rnn_", "linalg")
"""Parts of the names of operations that choose an algorithm, or the sizes of its blocks, by the sizes of tensors."""


_PRODUCTS = ("linear", "mm", "matmul")
"""Parts of the names of operations that, in types of two bytes, oneDNN computes in blocks with copies of some."""


def chooses(s: S_graph, i: int) -> bool:
    """Whether node i has an operation that takes another amount of temporary memory from some size on, or one of the
    user's, of which nothing is known.
    """
    own = any(not isinstance(s.d.nodes[op].op, torch._ops.OpOverload) for op in s.nodes[i].ops)
    return own or _has_one_of(s, i, _CHOOSING) or _may_need_more_for_less(s, i)


def _may_need_more_for_less(s: S_graph, i: int) -> bool:
    """Whether node i has an operation that may need more memory for smaller tensors."""
    low = any(s.d.values[v].dtype in (torch.bfloat16, torch.float16) for v in s.nodes[i].reads)
    return _has_one_of(s, i, (*kind_of(s.device).choosing, *(_PRODUCTS if low else ())))


def _has_one_of(s: S_graph, i: int, parts: Sequence[str]) -> bool:
    """Whether node i has an operation with one of these ``parts`` in its name."""
    return any(part in s.d.nodes[op].name for op in s.nodes[i].ops for part in parts)


def choosing_anew(old: S_graph, new: S_graph) -> frozenset[int]:
    """The nodes of ``new`` that may need more memory than ``scaled_costs`` says: they have an operation that chooses by
    size, or one of the user's, and something they read or make has another shape, and is not smaller, than in ``old``.

    Convolutions may need more for smaller inputs, too: on CPUs some do for a batch of one instead of two, and some that
    have strides for one row less. ``Kind.choosing`` names such operations. So may products in types of two bytes.
    """
    pairs = [(v, x, old.d.values[v]) for v, x in new.d.values.items()]
    changed = {v for v, now, was in pairs if now.shape != was.shape}  # kernels are chosen by it, not by bytes
    larger = {v for v, now, was in pairs if v in changed and now.bytes >= was.bytes}

    def may_need_more(i: int) -> bool:
        suspect = changed if _may_need_more_for_less(new, i) else larger
        return not suspect.isdisjoint((*new.nodes[i].reads, *new.nodes[i].makes)) and chooses(new, i)

    return frozenset(filter(may_need_more, range(len(new.nodes))))


def _scaled(old: S_graph, new: S_graph, i: int, cost: Cost) -> Cost:
    was, node = old.nodes[i], new.nodes[i]
    before = {v: max(1, old.d.values[v].bytes) for v in (*was.reads, *was.makes)}
    after = {v: new.d.values[v].bytes for v in before}
    same = [v for v in before if after[v] == before[v]]  # parameters above all
    rows = sum(before[v] for v in same if len(old.d.values[v].shape) == 1)
    own = sum(before[v] for v in was.makes if v in same)
    fixed = 2 * (NUMBERS + sum(before[v] for v in same) + own) + torch.get_num_threads() * rows
    ratios: list[Fraction] = [Fraction(after[v], before[v]) for v in before if after[v] != before[v]]
    kept, keeps = sum(was.saved.private), sum(node.saved.private)  # of all pairs, in a product of three tensors
    if kept and keeps != kept:
        ratios.append(Fraction(keeps, kept))
    most: Fraction = max(ratios) if ratios else Fraction(1)
    names = {new.d.nodes[op].name for op in node.ops}
    if most > 1 and names & _PAIRS:
        most = most * most
    if most < 1 and chooses(new, i):
        most = Fraction(1)
    share = Fraction(sum(after.values()) or 1, sum(before.values()) or 1)

    def bounded(measured: int) -> int:
        """An upper bound of ``measured`` bytes at the new size.

        At most ``fixed`` of them do not shrink: values of fixed size and one copy (of results three: statistics and
        their gradients), and, of the parameters of a normalization, what each thread sums for their gradients. All
        others are scaled by ``most``.
        """
        stays = min(measured, fixed) if most < 1 else 0
        left_out = START if most > 1 else 0
        return ceil(most * (measured - stays + left_out)) + stays

    made = sum(new.d.storages[x].bytes for x in node.storages) + sum(node.saved.private)
    cost = dataclasses.replace(
        cost,
        forward_time=max(1, int(cost.forward_time * share)),
        warm_time=None if cost.warm_time is None else max(1, int(cost.warm_time * share)),
        forward_peak=max(made, bounded(cost.forward_peak)),
    )
    if not cost.results:
        return cost

    def gradient(position: int, g: InputGradient) -> InputGradient:
        """In memory as large as the input itself, or else as another value of the node: as that, or the fastest."""
        v = was.reads[position]
        if g.bytes == before[v]:
            return dataclasses.replace(g, bytes=after[v])
        equal = [after[w] for w in before if before[w] == g.bytes]
        fastest = max(Fraction(after[w], before[w]) for w in before)
        return dataclasses.replace(g, bytes=max(equal, default=ceil(g.bytes * fastest)))

    inputs = tuple(None if g is None else gradient(k, g) for k, g in enumerate(cost.inputs))
    came = [sum(sizes[was.makes[k]] for k in cost.results) for sizes in (before, after)]
    return dataclasses.replace(
        cost,
        backward_time=max(1, int(cost.backward_time * share)),
        backward_peak=bounded(cost.backward_peak),
        held_peak=bounded(cost.held_peak),
        together_peak=bounded(cost.together_peak),
        incoming=came[1] if cost.incoming == came[0] else bounded(cost.incoming),
        inputs=inputs,
    )
