"""What decides what is held of a followed forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rockmate.follow.record import Datum, Slot

Tape = Any
"""``rockmate.follow.tape.Tape``, which has a policy."""


class Policy:
    """What is held of a followed forward, and what is made again when: at first nothing, and what is asked for."""

    def before(self, tape: Tape, index: int) -> None:
        """Operation ``index`` comes."""

    def after(self, tape: Tape, index: int, results: Sequence[Any]) -> None:
        """It has run."""

    def packed(self, tape: Tape, slot: Slot, t: torch.Tensor) -> None:
        """Autograd saves ``t``, for which it gets ``slot``."""

    def over(self, tape: Tape) -> None:
        """The forward has returned."""

    def asked(self, tape: Tape, slot: Slot) -> None:
        """The backward reads ``slot``, or one within the forward does, while the tape is open."""

    def answered(self, tape: Tape, slot: Slot) -> None:
        """It has got what ``slot`` refers to."""

    def let_go(self, tape: Tape, datum: Datum) -> None:
        """One slot of ``datum`` is gone."""

    def keeps(self, tape: Tape, datum: Datum) -> bool:
        """Whether ``datum``, which cannot be made again, is to be held."""
        return True

    def ended(self, tape: Tape) -> None:
        """No slot is left."""

    def followed_by(self, policy: Policy) -> Policy:
        """What decides from now on, where ``policy`` is to take over."""
        return policy
