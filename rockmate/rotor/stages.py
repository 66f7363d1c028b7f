"""Runs one stage of a chain: first without keeping its saved tensors, and later again to recompute them.

The first run records the autograd graph of eager mode, with a numbered slot in place of each saved tensor. A recompute
saves the same tensors in the same order; they go into the slots, and its own graph is dropped. It stops at the last
saved tensor unless its output is wanted. Gradients, hooks and accumulation are autograd's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from rkgb.randomness import Drawn, drawing_again, random_state
from rkgb.storages import storage_key
from rkgb.trace.code import not_compiled
from rkgb.trees import tensor_leaves
from rockmate.rotor.parts import Function, Moment, Parts, detached
from rockmate.run.slots import changed

Prepare = Callable[[int], None]


class Stop(Exception):
    """Ends a recompute when all slots are filled."""


Fixed = tuple[torch.Tensor, int]
"""A saved parameter or buffer, whose memory stays anyway, and its version counter when it was saved."""


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
        t, taken = stage.slots[index], stage.taken[index]
        if t is None and taken is not None:
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

    ``parts``: of the function, if known. ``slots``: recomputed saved tensors that autograd has not read yet. ``kinds``:
    their shapes and dtypes. ``saved``: for each tensor that the first run saved, in order, the number of its slot; None
    for a parameter or buffer. ``taken``: those that were read from slots. ``saves_early``: whether an operation saves a
    tensor that it fills afterwards, so that a recompute must not stop there. ``stopped``: whether the last recompute
    did. ``moment``: when the first run began. ``generators``, ``buffers``: random states, and contents of buffers, from
    before it, as far as it changed them; ``generators`` is None if that is not known, as autograd keeps what was saved.
    ``finished``: whether they were released.
    """

    function: Function
    preserve_rng_state: bool
    parts: Parts | None = None
    slots: list[torch.Tensor | None] = field(default_factory=list)
    kinds: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    saved: list[int | None] = field(default_factory=list)
    taken: list[weakref.ref[torch.Tensor] | None] = field(default_factory=list)
    moment: Moment | None = None
    generators: dict[Drawn, torch.Tensor] | None = None
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    saves_early: bool = False
    stopped: bool = False
    finished: bool = False

    @property
    def name(self) -> str:
        """The class of the layer, for messages."""
        return type(self.function).__name__

    def _begin(self) -> Moment:
        self.moment = Moment(Parts.again(self.function, self.parts))
        return self.moment

    def first(self, x: Any, prepare: Prepare) -> Any:
        """Run for the first time; the output, with history. Slots stand for saved tensors; ``prepare`` fills them."""
        moment = self._begin()
        states = moment.parts.generator_states(x) if self.preserve_rng_state else {}
        copies = moment.copies()
        fixed = {storage_key(t) for t in moment.parts.owned.values()}
        slots, saved, kinds = self.slots, self.saved, self.kinds

        def pack(t: torch.Tensor) -> Slot | Fixed:
            if storage_key(t) in fixed:
                saved.append(None)
                return t, t._version
            index = len(slots)
            saved.append(index)
            slots.append(None)
            kinds.append((t.shape, t.dtype))
            return Slot(self, index, prepare)

        with saved_tensors_hooks(not_compiled(pack), _unpack):
            output = self.function(x)
        self.generators = {d: s for d, s in states.items() if not torch.equal(s, random_state(d))}
        self.buffers = moment.learn_buffers(copies)
        self.taken = [None] * len(slots)
        self.saves_early = _saves_early(self.function, output, x, len(slots))
        return output

    def keep_all(self, x: Any) -> Any:
        """Run for the first time; the output, with history. Autograd keeps the saved tensors."""
        moment = self._begin()
        if not self.preserve_rng_state:
            self.generators = {}
        output = self.function(x)
        moment.learn_buffers({})
        return output

    def fill(self, x: Any, wanted: bool) -> Any:
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

        output = self._recompute(x, pack)
        return output if wanted else None

    def skim(self, x: Any) -> Any:
        """Recompute the detached output from the detached input ``x``, without its saved tensors."""
        return self._recompute(x, _forget)

    def clear(self) -> None:
        """Release what the slots hold."""
        self.slots = [None] * len(self.slots)

    def release_states(self) -> None:
        """Release random states and buffers of the first run: the last recompute is done."""
        self.finished = self.finished or bool(self.generators or self.buffers)
        self.generators, self.buffers = self.generators and {}, {}

    def _recompute(self, x: Any, pack: Callable[[torch.Tensor], None]) -> Any:
        """Run again from ``x``; None if the run was stopped. The caller sets grad mode, autocast and settings."""
        if self.finished:
            raise RuntimeError(self._gone())
        moment = self.moment
        assert moment is not None
        scratch = {name: t.clone() for name, t in (moment.statistics | self.buffers).items()}  # eager mode runs once
        moment.check(self.name, scratch)
        x = detached(x)  # autograd may hold the input of this run, and must not hold ours
        self.stopped = False
        with moment.again(scratch), self._drawing(x, moment.parts), saved_tensors_hooks(not_compiled(pack), _lost):
            try:
                output = self.function(x)
            except Exception:  # an interpreter between, as TorchScript's, makes another error of a Stop
                if not self.stopped:
                    raise
            return None if self.stopped else detached(output)

    @contextmanager
    def _drawing(self, x: Any, parts: Parts) -> Iterator[None]:
        """Meanwhile generators are as in the first run; afterwards as now.

        Raises ``RuntimeError`` if numbers are drawn and the states of the first run are not known.
        """
        states = parts.generator_states(x) if self.generators is None else self.generators
        with drawing_again([*states], [*states.values()]):
            yield
            unknown = self.generators is None
            drawn = unknown and any(not torch.equal(state, random_state(of)) for of, state in states.items())
        if drawn:
            raise RuntimeError(self._gone())

    def _gone(self) -> str:
        return (
            f"a second backward needs {self.name} to run again, but the random state (or buffers) of its first run "
            "are gone: they go with the first backward. Call forward again instead of using retain_graph"
        )


_EARLY = ("RreluWithNoiseBackward",)
"""Autograd's names of operations that save a tensor before they fill it."""

_known_early: weakref.WeakKeyDictionary[Any, dict[int, bool]] = weakref.WeakKeyDictionary()


def _saves_early(function: Function, output: Any, x: Any, saved: int) -> bool:
    """Whether one of ``_EARLY`` is in the graph between ``x`` and ``output``, of which ``saved`` tensors were saved.

    It is looked for once for each number of saved tensors.
    """
    known = _known_early.setdefault(function, {}) if isinstance(function, torch.nn.Module) else {}
    if saved not in known:
        seen: set[Any] = {None, *(t.grad_fn for t in tensor_leaves(x))}
        todo: set[Any] = {t.grad_fn for t in tensor_leaves(output)} - seen
        known[saved] = False
        while todo:
            node = todo.pop()
            seen.add(node)
            known[saved] = known[saved] or node.name().startswith(_EARLY)
            todo |= {following for following, _ in node.next_functions} - seen
    return known[saved]


@not_compiled
def _unpack(packed: Slot | Fixed) -> torch.Tensor:
    if isinstance(packed, Slot):
        return packed.take()
    t, then = packed
    if t._version != then:
        raise changed(f"a parameter or buffer of shape {tuple(t.shape)}", t, then)
    return t


@not_compiled
def _forget(_: torch.Tensor) -> None:
    return None


def _lost(_: None) -> torch.Tensor:
    raise RuntimeError("the graph of a recompute has no backward: a layer called backward within its forward")


def other_tensors_message(name: str, how: str) -> str:
    """The error of a layer called ``name`` that saves ``how`` (fewer, more, other) tensors in a recompute."""
    return (
        f"{name} saved {how} tensors for backward when it ran again: its forward depends on something that is neither "
        "its input, a parameter, a buffer, a number among its attributes nor a random number of torch's. Make that an "
        "input or a buffer"
    )
