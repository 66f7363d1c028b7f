"""What a plan says of how and for what it was made, in memory as in its file."""

from __future__ import annotations

from dataclasses import dataclass

from rockmate.planning.room import Room


@dataclass(frozen=True, kw_only=True, repr=False)
class PlanFields:
    """How and for what a plan was made.

    ``budget``: bytes that one forward and its backward may allocate. ``costs``, ``loss_memory``: as for ``Rockmate``.
    ``missing``: parameters without ``.grad`` when the plan was made, so that their gradients count. ``room``: bytes
    left for the loss, and which of them ``predicted_peak`` counts. ``solver``: what found the schedule. ``reason``:
    what cut the search short, such as a time limit; empty if nothing did.
    """

    budget: int
    costs: str = "measured"
    loss_memory: int | None = None
    missing: frozenset[str] = frozenset()
    room: Room
    solver: str
    reason: str = ""
