"""The memory that a plan leaves for the caller's loss: a rule before the first step, what was seen from then on."""

from __future__ import annotations

from dataclasses import dataclass

from rkgb.Ktools import K_graph

SCALARS = 64
"""Bytes that every budget leaves for the numbers of the loss itself (its value, its gradient, counts): a few bytes
each, but a block of the allocator."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for the loss, beside the outputs themselves.

    ``between``: the most that it allocates between forward and backward. It includes the gradients of the outputs, and
    excludes ``kept``: what stays allocated through the backward, and is subtracted from the budget. ``usual``: what
    ``plan.predicted_peak`` counts in place of ``between``. ``seen``: whether the figures were measured in a step.
    """

    between: int
    kept: int
    usual: int
    seen: bool = False

    @property
    def predicted_kept(self) -> int:
        """What ``plan.predicted_peak`` counts in place of ``kept``: the usual losses keep nothing."""
        return self.kept if self.seen else 0


def usual_room(k: K_graph, loss_memory: int | None) -> Room:
    """Before the first step. ``loss_memory``: see ``Rockmate``; None for three times the bytes of the roots.

    Of the three, cross entropy takes two, and a copy cast to float32 one. As many bytes as the roots have may be kept:
    ``F.mse_loss`` and ``F.smooth_l1_loss`` return one number in storage as large as their input, and loops hold
    differences, probabilities and the like.
    """
    floats = _in_float(k)
    if loss_memory is not None:
        kept = min(floats, loss_memory)
        return Room(k.output_bytes + loss_memory - kept, kept, k.output_bytes + loss_memory)
    return Room(2 * floats + max(floats, k.output_bytes), floats, 3 * floats)


def seen_room(peak: int, kept: int) -> Room:
    """From steps in which a loss allocated ``peak`` bytes at most, of which ``kept`` stayed through the backward.

    Its numbers are among these, and have ``SCALARS`` bytes of their own.
    """
    kept = max(0, kept - SCALARS)
    between = max(0, peak - kept - SCALARS)
    return Room(between, kept, between, True)


def _in_float(k: K_graph) -> int:
    """Bytes of the roots, in single precision at least, as losses compute with them."""
    carried = [k.s.d.values[v] for v in k.usage.root_values(k.s.d)]
    return sum(v.bytes * max(1, 4 // v.dtype.itemsize) for v in carried)
