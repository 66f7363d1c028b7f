"""Runs one stage of a chain: first without keeping its saved tensors, and later again to recompute them.

The first run records the autograd graph of eager mode, with a numbered slot in place of each saved tensor. A recompute
saves the same tensors in the same order; they go into the slots, and its own graph is dropped. It stops at the last
saved tensor unless its output is wanted. Gradients, hooks and accumulation are autograd's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from rkgb.randomness import Drawn, random_state, set_random_state
from rkgb.storages import storage_key, version_of
from rkgb.trees import tensor_leaves
from rockmate.rotor.buffers import Attributes, Buffers, statistics_of
from rockmate.rotor.values import Fixed, Function, Parts, detached, generator_states, versions_of_all

Prepare = Callable[[int], None]


class Stop(Exception):
    """Ends a recompute when all slots are filled."""


@dataclass(slots=True)
class Slot:
    """Stands for the saved tensor ``index`` of ``stage`` in the autograd graph. ``prepare(index)`` fills it.

    Only slots hold the state of a call, so it is released with the graph.
    """

    stage: Stage
    index: int
    prepare: Prepare

    def take(self) -> torch.Tensor:
        """The tensor. The slot is empty afterwards, so that the tensor is released as early as in eager mode."""
        stage, index = self.stage, self.index
        t = stage.slots[index] if stage.slots[index] is not None else stage.still_alive(index)
        if t is None:
            self.prepare(index)
            t = stage.slots[index]
        if t is None:
            raise RuntimeError(other_tensors_message(stage.name, "fewer"))
        stage.slots[index], stage.unpacked[index] = None, weakref.ref(t)
        return t


@dataclass
class Stage:
    """One stage in one call: its slots, and what a recompute needs of the first run.

    ``slots``: recomputed saved tensors that autograd has not read yet. ``kinds``: their shapes and dtypes. ``saved``:
    for each tensor that the first run saved, in order, the number of its slot; None for a parameter or buffer.
    ``unpacked``: those from slots that it has read, if they are alive. ``saves_early``: whether an operation saves a
    tensor that it fills afterwards, so that a recompute must not stop there. ``stopped``: whether the last recompute
    did. ``generators``, ``buffers``: random states, and contents of buffers, from before the first run, as far as it
    changed them. ``autocasts``, ``autocast_cache``, ``attributes``: as in the first run. ``versions``: of the
    parameters and buffers of the first run. ``parts``: of the function then; ``statistics``: buffers that norms write
    in training, and do not read. ``saved_by_autograd``: whether the first run left its saved tensors to autograd.
    ``finished``: whether ``generators`` and ``buffers`` were released.
    """

    function: Function
    preserve_rng_state: bool
    parts: Parts | None = None
    slots: list[torch.Tensor | None] = field(default_factory=list)
    kinds: list[tuple[torch.Size, torch.dtype]] = field(default_factory=list)
    saved: list[int | None] = field(default_factory=list)
    generators: dict[Drawn, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    autocasts: list[tuple[str, bool, torch.dtype]] = field(default_factory=list)
    autocast_cache: bool = True
    versions: list[int] = field(default_factory=list)
    attributes: Attributes | None = None
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    saved_by_autograd: bool = False
    finished: bool = False
    unpacked: list[weakref.ref[torch.Tensor] | None] = field(default_factory=list)
    saves_early: bool = False
    stopped: bool = False

    @property
    def name(self) -> str:
        """The class of the layer, for messages."""
        return type(self.function).__name__

    def first(self, x: Any, prepare: Prepare) -> Any:
        """Run for the first time; the output, with history. Slots stand for saved tensors; ``prepare`` fills them."""
        parts = self._remember(x)
        generators = generator_states(parts, x) if self.preserve_rng_state else {}
        before = Buffers(self.function, parts)
        fixed = {storage_key(t) for t in parts.owned.values()}
        slots, saved, kinds = self.slots, self.saved, self.kinds

        def pack(t: torch.Tensor) -> Slot | Fixed:
            if storage_key(t) in fixed:
                saved.append(None)
                return Fixed(t, t._version)
            index = len(slots)
            saved.append(index)
            slots.append(None)
            kinds.append((t.shape, t.dtype))
            return Slot(self, index, prepare)

        with saved_tensors_hooks(pack, _unpack):
            output = self.function(x)
        self.generators = {d: s for d, s in generators.items() if not torch.equal(s, random_state(d))}
        self.buffers = before.changed()
        self.unpacked = [None] * len(self.slots)
        self.saves_early = _saves_early(self.function, output, x, len(self.slots))
        return output

    def keep_all(self, x: Any) -> Any:
        """Run for the first time; the output, with history. Autograd keeps the saved tensors."""
        parts = self._remember(x)
        self.saved_by_autograd = True
        buffers = Buffers(self.function, parts, copied=False)
        output = self.function(x)
        buffers.learn()
        return output

    def fill(self, x: Any, wanted: bool) -> Any:
        """Recompute the saved tensors from the detached input ``x``, into the slots.

        Returns the detached output if ``wanted``; else None, and the run stops at the last saved tensor if it can.
        """
        if wanted or self.slots:
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
            if wanted:
                return output
        return None

    def skim(self, x: Any) -> Any:
        """Recompute the detached output from the detached input ``x``, without its saved tensors."""
        return self._recompute(x, lambda _: None)

    def still_alive(self, index: int) -> torch.Tensor | None:
        """The tensor that the slot held, if it is alive: a custom function may read a saved tensor twice."""
        tensor = self.unpacked[index]
        return None if tensor is None else tensor()

    def clear(self) -> None:
        """Release what the slots hold."""
        self.slots = [None] * len(self.slots)

    def release_states(self) -> None:
        """Release random states and buffers of the first run: the last recompute is done."""
        self.finished = self.finished or bool(self.generators or self.buffers)
        self.generators, self.buffers = {}, {}

    def _recompute(self, x: Any, pack: Callable[[torch.Tensor], None]) -> Any:
        """Run again from ``x``."""
        if self.finished:
            raise RuntimeError(self._gone())
        assert self.attributes is not None
        with self.attributes.restored():
            return self._recompute_there(x, pack)

    def _recompute_there(self, x: Any, pack: Callable[[torch.Tensor], None]) -> Any:
        assert self.parts is not None
        parts = self.parts
        scratch = {name: t.clone() for name, t in (self.statistics | self.buffers).items()}  # eager mode runs once
        self._check_owned(scratch)
        instead = scratch
        if not parts.are_unchanged():
            parts = Parts(self.function)
            instead = self._replaced(parts.owned) | scratch
        for name in [
            name for name in instead if name in parts.homes
        ]:  # ``Attributes.restored`` puts back what is there
            t = instead.pop(name)
            for buffers, key in parts.homes[name]:
                buffers[key] = t
        x = detached(x)  # autograd may hold the input of this run, and must not hold ours
        self.stopped = False
        with self._modes(x, parts), saved_tensors_hooks(pack, _lost):
            try:
                if instead and isinstance(self.function, torch.nn.Module):
                    output = functional_call(self.function, instead, (x,), strict=False)
                else:
                    output = self.function(x)
            except Exception:  # an interpreter between, as TorchScript's, makes another error of a Stop
                if self.stopped:
                    return None
                raise
            if self.stopped:
                return None
        return detached(output)

    def _gone(self) -> str:
        return (
            f"a second backward needs {self.name} to run again, but the random state (or buffers) of its first run "
            "are gone: they go with the first backward. Call forward again instead of using retain_graph"
        )

    def _check_owned(self, scratch: dict[str, torch.Tensor]) -> None:
        assert self.parts is not None
        owned = self.parts.owned
        if versions_of_all(owned) == self.versions:
            return
        for (name, t), version in zip(owned.items(), self.versions, strict=True):
            if version_of(t) != version and name not in scratch:
                parameter = isinstance(t, torch.nn.Parameter)
                before = "optimizer.step()" if parameter else "the next forward, or what else changes it"
                raise RuntimeError(
                    f"{name} of {self.name} was changed in place between forward and backward, and the layer has to "
                    f"run again: call backward before {before}"
                )

    def _replaced(self, now: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the first run that other tensors have replaced since."""
        assert self.parts is not None
        return {name: t for name, t in self.parts.owned.items() if now.get(name) is not t}

    def _remember(self, x: Any) -> Parts:
        """Note what a recompute needs; the parts of now."""
        known = self.parts
        parts = known if known is not None and known.are_unchanged() else Parts(self.function)
        kinds = dict.fromkeys(["cpu", *(t.device.type for t in tensor_leaves(x))])
        self.autocasts = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.versions = versions_of_all(parts.owned)
        self.parts, self.statistics, self.attributes = parts, statistics_of(parts), Attributes(parts)
        return parts

    def _modes(self, x: Any, parts: Parts) -> AbstractContextManager[Any]:
        """Meanwhile grad mode, autocast and generators are those of the first run; afterwards those of now.

        Raises ``RuntimeError`` if the run draws random numbers and the states of the first run are not known.
        """
        cached = torch.is_autocast_cache_enabled() == self.autocast_cache
        casts = [
            (kind, enabled, dtype)
            for kind, enabled, dtype in self.autocasts
            if not cached or (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) != (enabled, dtype)
        ]
        unknown = self.saved_by_autograd and self.preserve_rng_state
        if not (casts or unknown or self.generators):  # to enter what is in force takes a good part of a small layer
            return torch.enable_grad()
        return self._other_modes(casts, generator_states(parts, x) if unknown else None)

    @contextmanager
    def _other_modes(
        self, casts: list[tuple[str, bool, torch.dtype]], unknown: dict[Drawn, torch.Tensor] | None
    ) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in casts:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                )
            outer = {source: random_state(source) for source in self.generators} if unknown is None else unknown
            for source, state in self.generators.items():
                set_random_state(source, state)
            drawn = False
            try:
                yield
            finally:
                for source, state in outer.items():
                    drawn = drawn or not torch.equal(state, random_state(source))
                    set_random_state(source, state)
            if unknown is not None and drawn:
                raise RuntimeError(self._gone())


_EARLY = ("RreluWithNoiseBackward",)
"""Autograd's names of operations that save a tensor before they fill it."""

_known_early: weakref.WeakKeyDictionary[Any, dict[int, bool]] = weakref.WeakKeyDictionary()


def _saves_early(function: Function, output: Any, x: Any, saved: int) -> bool:
    """Whether one of ``_EARLY`` is in the graph between ``x`` and ``output``, of which ``saved`` tensors were saved.

    It is looked for once for each number of saved tensors.
    """
    if not isinstance(function, torch.nn.Module):
        return _has_early(output, x)
    known = _known_early.setdefault(function, {})
    if saved not in known:
        known[saved] = _has_early(output, x)
    return known[saved]


def _has_early(output: Any, x: Any) -> bool:
    seen = {t.grad_fn for t in tensor_leaves(x)}
    todo = [t.grad_fn for t in tensor_leaves(output)]
    while todo:
        node = todo.pop()
        if node in seen or node is None:
            continue
        seen.add(node)
        if node.name().startswith(_EARLY):
            return True
        todo += [following for following, _ in node.next_functions]
    return False


def _unpack(packed: Slot | Fixed) -> torch.Tensor:
    return packed.read() if isinstance(packed, Fixed) else packed.take()


def _lost(_: None) -> torch.Tensor:
    raise RuntimeError("the graph of a recompute has no backward: a layer called backward within its forward")


def other_tensors_message(name: str, how: str) -> str:
    """The error of a layer called ``name`` that saves ``how`` (fewer, more, other) tensors in a recompute."""
    return (
        f"{name} saved {how} tensors for backward when it ran again: its forward depends on something that is neither "
        "its input, a parameter, a buffer, a number among its attributes nor a random number of torch's. Make that an "
        "input or a buffer"
    )
