"""Runs one stage of a chain: first without keeping its saved tensors, and later again to recompute them.

The first run records the autograd graph of eager mode, with a numbered slot in place of each saved tensor. A recompute
saves the same tensors in the same order; they go into the slots, and its own graph is dropped. It stops at the last
saved tensor unless its output is wanted. Gradients, hooks and accumulation are autograd's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

from rkgb.cost.piece import ignore
from rkgb.probe.contexts import functions_of, next_number
from rkgb.randomness import RandomSource, random_state, set_random_state
from rkgb.storages import storage_key
from rkgb.trace.code import not_compiled
from rkgb.trees import tensors_of
from rockmate.rotor.parts import Moment, detached
from rockmate.run.slots import changed

Prepare = Callable[[int], None]
States = dict[RandomSource, torch.Tensor]


class Stop(Exception):
    """Ends a recompute when all slots are filled."""


Fixed = tuple[torch.Tensor, int]  # a saved parameter or buffer, whose memory stays anyway, and its version counter then


@dataclass(slots=True)
class Slot:
    """Stands for the saved tensor ``index`` of ``stage`` in the autograd graph. ``prepare(index)`` fills it.

    Only slots hold the state of a call, so it is released with the graph.
    """

    stage: Stage
    index: int
    prepare: Prepare

    def take(self) -> torch.Tensor:
        """The tensor. The slot is empty afterwards, so that the tensor is released as early as in eager mode.

        What was taken before is given again while it is alive: a custom function may read a saved tensor twice.
        """
        stage, index = self.stage, self.index
        if not stage.taken:
            raise RuntimeError(BACKWARD_INSIDE)
        t = stage.slots[index]
        if t is None and (taken := stage.taken[index]) is not None:
            t = taken()
        if t is None:
            self.prepare(index)
            t = stage.slots[index]
        if t is None:
            raise RuntimeError(other_tensors_message(stage.name, "fewer"))
        stage.slots[index], stage.taken[index] = None, weakref.ref(t)
        return t


@dataclass
class Stage:
    """One stage in one call: its slots, and what a recompute needs of the first run.

    ``slots``: recomputed saved tensors that autograd has not read yet. ``kinds``: their shapes and dtypes. ``saved``:
    for each tensor that the first run saved, in order, the number of its slot; None for a parameter or buffer.
    ``taken``: those that were read from slots. ``saves_early``: whether an operation saves a tensor that it fills
    afterwards, so that a recompute must not stop there. ``stopped``: whether the last recompute did. ``moment``: when
    the first run began, an earlier one before it; None when what later runs need of it was released. ``generators``,
    ``buffers``: random states, and contents of buffers, from before it, as far as it changed them; ``generators`` is
    None if that is not known, as autograd keeps what was saved.
    """

    moment: Moment | None
    preserve_rng_state: bool
    slots: list[torch.Tensor | None] = field(default_factory=list)
    kinds: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    saved: list[int | None] = field(default_factory=list)
    taken: list[weakref.ref[torch.Tensor] | None] = field(default_factory=list)
    generators: dict[RandomSource, torch.Tensor] | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    saves_early: bool = False
    stopped: bool = False

    def __post_init__(self) -> None:
        self.function = cast(Moment, self.moment).function
        self.name = type(self.function).__name__

    def first(self, x: Any, prepare: Prepare | None, stops: bool = True, known: Collection[RandomSource] = ()) -> Any:
        """Run for the first time; the output, with history. Slots stand for saved tensors; ``prepare`` fills them. If
        it is None, autograd keeps the saved tensors. ``stops``: whether it is planned that a recompute stops.
        ``known``: generators that always have the right states when it runs again.
        """
        self.moment = moment = Moment(self.function, self.moment)
        if prepare is None:
            self.generators = None if self.preserve_rng_state else {}
            output = self.function(x)
            moment.learn_buffers({})
            return output
        states = moment.generator_states(x, known) if self.preserve_rng_state else {}
        copies, last = moment.copies(), 0
        fixed = {storage_key(t) for t in moment.owned.values()}
        slots, saved, kinds = self.slots, self.saved, self.kinds

        def pack(t: torch.Tensor) -> Slot | Fixed:
            nonlocal last
            if storage_key(t) in fixed:
                saved.append(None)
                return t, t._version
            index, last = len(slots), next_number()
            saved.append(index)
            slots.append(None)
            kinds.append((t.shape, t.dtype))
            return Slot(self, index, prepare)

        with saved_tensors_hooks(not_compiled(pack), _unpack):
            output = self.function(x)
        self.generators = moment.drawn(states)
        self.buffers = moment.learn_buffers(copies)
        self.taken = [None] * len(slots)
        made = functions_of(tensors_of(output), last - 1)  # lazily, from what saved last
        self.saves_early = not stops or any(f.name().startswith("RreluWithNoiseBackward") for f in made)
        return output

    def fill(self, x: Any, wanted: bool, aside: States) -> Any:
        """Recompute the saved tensors from the detached input ``x``, into the slots.

        Returns the detached output if ``wanted``; else None, and the run stops at the last saved tensor if it can.
        """
        if not (wanted or self.slots):
            return None
        saved, slots = iter(self.saved), self.slots
        last = None if wanted or self.saves_early else len(slots) - 1

        def pack(t: torch.Tensor) -> None:
            index = next(saved, -1)
            if index == -1:
                raise RuntimeError(other_tensors_message(self.name, "more"))
            if index is not None:
                if (t.shape, t.dtype) != self.kinds[index]:
                    raise RuntimeError(other_tensors_message(self.name, "other"))
                slots[index] = t.detach()
                if index == last:
                    self.stopped = True
                    raise Stop

        output = self.again(x, aside, pack)
        return output if wanted else None

    def again(self, x: Any, aside: States, pack: Callable[[torch.Tensor], None] = ignore) -> Any:
        """Recompute the detached output from the detached input ``x``; None if ``pack`` has stopped the run.

        ``pack`` gets the saved tensors. States of generators that it sets go to ``aside``, if none is there. The caller
        restores these, and sets grad mode, autocast and settings.
        """
        moment = self.moment
        if moment is None:
            raise RuntimeError(self._gone())
        scratch = {name: t.clone() for name, t in (moment.statistics | self.buffers).items()}  # eager mode runs once
        moment.check(self.name, scratch)
        x = detached(x)  # autograd may hold the input of this run, and must not hold ours
        self.stopped = False
        states = moment.generator_states(x) if self.generators is None else self.generators
        hooks = saved_tensors_hooks(not_compiled(pack), _lost)
        for source, state in states.items():
            if source not in aside:
                aside[source] = random_state(source)
            set_random_state(source, state)
        with moment.again(scratch), hooks:
            try:
                output = self.function(x)
            except Exception:  # an interpreter between, as TorchScript's, makes another error of a Stop
                if not self.stopped:
                    raise
            if self.generators is None and moment.drawn(states):
                raise RuntimeError(self._gone())
        return None if self.stopped else detached(output)

    def clear(self) -> None:
        """Release what the slots hold: in the list itself, which the hooks in the graph hold, too."""
        self.slots[:] = [None] * len(self.slots)

    def release_states(self) -> None:
        """Release random states and buffers of the first run: the last recompute is done."""
        if self.generators or self.buffers:
            self.moment, self.generators, self.buffers = None, {}, {}

    def _gone(self) -> str:
        return (
            f"a second backward needs {self.name} to run again, but the random state (or buffers) of its first run "
            "are gone: they go with the first backward. Call forward again instead of using retain_graph"
        )


BACKWARD_INSIDE = "it calls backward, or torch.autograd.grad, within its forward"
"""Why a stage cannot run without what autograd saves in it."""


@not_compiled
def _unpack(packed: Slot | Fixed) -> torch.Tensor:
    if isinstance(packed, Slot):
        return packed.take()
    t, then = packed
    if t._version != then:
        raise changed(f"a parameter or buffer of shape {tuple(t.shape)}", t, then)
    return t


def _lost(_: None) -> torch.Tensor:
    raise RuntimeError(BACKWARD_INSIDE)


def other_tensors_message(name: str, how: str) -> str:
    """The error of a layer called ``name`` that saves ``how`` (fewer, more, other) tensors in a recompute."""
    return (
        f"{name} saved {how} tensors for backward when it ran again: its forward depends on what is no input, "
        "parameter, buffer, number among its attributes or random number of torch's. Make that an input or a buffer"
    )
