"""How one stage of a chain runs: first without keeping what its backward reads, and again to make it anew.

The first run records autograd's graph as eager mode does, but ``pack`` puts a numbered slot where a saved tensor
would be. A later run packs the same tensors in the same order into the slots, its own graph is thrown away, and it
stops at the last one unless its output is wanted. So gradients, hooks and accumulation are autograd's own.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from rkgb.randomness import Drawn, random_state, set_random_state
from rkgb.storages import storage_key
from rkgb.trees import tensor_leaves
from rockmate.rotor.buffers import Attributes, Buffers, statistics_of
from rockmate.rotor.selective import Keep, Kept, Replay
from rockmate.rotor.values import Fixed, Function, Held, detached, generator_states, owned_by, version_of

Prepare = Callable[[int], None]


class Stop(Exception):
    """Everything that the backward reads is there."""


@dataclass
class Slot:
    """What autograd holds instead of a saved tensor. ``prepare(index)`` fills it.

    A call's state belongs to its slots, and so to the graph: stages and calls know nothing of either.
    """

    stage: Stage
    index: int
    prepare: Prepare

    def take(self) -> torch.Tensor:
        """The tensor. The slot is empty afterwards: autograd drops the tensor as soon as eager mode would."""
        stage, index = self.stage, self.index
        t = stage.slots[index] if stage.slots[index] is not None else stage.taken(index)
        if t is None:
            self.prepare(index)
            t = stage.slots[index]
        if t is None:
            raise RuntimeError(f"{stage.name} saved fewer tensors for backward when it ran again")
        stage.slots[index], stage.given[index] = None, weakref.ref(t)
        return t


@dataclass
class Stage:
    """One stage in one call."""

    function: Function
    preserve_rng_state: bool
    slots: list[torch.Tensor | None] = field(default_factory=list)
    generators: dict[Drawn, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    autocasts: list[tuple[str, bool, torch.dtype]] = field(default_factory=list)
    autocast_cache: bool = True
    owned: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    attributes: Attributes | None = None
    saved_by_autograd: bool = False
    finished: bool = False
    kept: Kept = field(default_factory=Kept)
    input: Held | None = None
    given: list[weakref.ref[torch.Tensor] | None] = field(default_factory=list)

    @property
    def name(self) -> str:
        return type(self.function).__name__

    def first(self, x: Any, prepare: Prepare, keep: frozenset[int] = frozenset()) -> Any:
        """The output, with history; what the backward reads is dropped, for ``prepare`` to make it again.

        If results are to be kept, so is the input, for ``refill``.
        """
        self._remember(x)
        generators = generator_states(self.function, x) if self.preserve_rng_state else {}
        before = Buffers(self.function)
        fixed = self._fixed({})
        with saved_tensors_hooks(lambda t: self._pack(t, fixed, prepare), _unpack), self._keeping(x, keep):
            output = self.function(x)
        self.generators = {d: s for d, s in generators.items() if not torch.equal(s, random_state(d))}
        self.buffers = before.changed()
        self.given = [None] * len(self.slots)
        return output

    def keep_all(self, x: Any) -> Any:
        """The output, with history; autograd itself saves what the backward reads."""
        self._remember(x)
        self.saved_by_autograd = True
        buffers = Buffers(self.function, copied=False)
        output = self.function(x)
        buffers.learn()
        return output

    def fill(self, x: Any, wanted: bool) -> Any:
        """Run again from the detached input ``x`` into the slots. The detached output if ``wanted``, else None."""
        if wanted or self.slots:
            counter = iter(range(len(self.slots)))
            last = len(self.slots) - 1

            def pack(t: torch.Tensor) -> None:
                index = next(counter, None)
                if index is None:
                    raise RuntimeError(f"{self.name} saved more tensors for backward when it ran again")
                self.slots[index] = t.detach()
                if index == last and not wanted:
                    raise Stop

            return self._again(x, pack)
        return None

    def refill(self) -> None:
        """Run again from the kept input and results into the slots."""
        assert self.input is not None
        x, self.input = self.input.read(self.name), None
        kept, self.kept = self.kept, Kept()
        with Replay(kept):
            self.fill(x, False)

    def skim(self, x: Any, keep: frozenset[int] = frozenset()) -> Any:
        """Run again from the detached input ``x``, dropping what the backward reads. The detached output."""
        with self._keeping(x, keep):
            return self._again(x, lambda _: None)

    def _keeping(self, x: Any, keep: frozenset[int]) -> AbstractContextManager[Any]:
        if not keep:
            return nullcontext()
        self.input, self.kept = Held.of(x), Kept()
        return Keep(keep, self.kept)

    def taken(self, index: int) -> torch.Tensor | None:
        """What the slot held, if it is still alive: a custom function may ask twice."""
        known = self.given[index]
        return None if known is None else known()

    def clear(self) -> None:
        """Empty all slots."""
        self.slots = [None] * len(self.slots)
        self.input, self.kept = None, Kept()

    def spend(self) -> None:
        """The last run is done: what a later one would need goes."""
        self.finished = self.finished or bool(self.generators or self.buffers)
        self.generators, self.buffers = {}, {}

    def _pack(self, t: torch.Tensor, fixed: set[int], prepare: Prepare) -> Slot | Fixed:
        if storage_key(t) in fixed:
            return Fixed(t, t._version)
        self.slots.append(None)
        return Slot(self, len(self.slots) - 1, prepare)

    def _again(self, x: Any, pack: Callable[[torch.Tensor], None]) -> Any:
        if self.finished:
            raise RuntimeError(self._gone())
        assert self.attributes is not None
        with self.attributes.restored():
            return self._run_again(x, pack)

    def _run_again(self, x: Any, pack: Callable[[torch.Tensor], None]) -> Any:
        instead = self._scratch()
        self._check_owned(instead)
        instead = self._replaced() | instead
        fixed = self._fixed(instead)
        x = detached(x)  # autograd may hold on to the input of this run, not to ours

        def packed(t: torch.Tensor) -> None:
            if storage_key(t) not in fixed:
                pack(t)

        with self._modes(x), saved_tensors_hooks(packed, _lost):
            try:
                if instead and isinstance(self.function, torch.nn.Module):
                    output = functional_call(self.function, instead, (x,), strict=False)
                else:
                    output = self.function(x)
            except Stop:
                return None
        return detached(output)

    def _gone(self) -> str:
        return (
            f"a second backward needs {self.name} to run again, but the random state (or buffers) of its first run "
            "are gone: they go with the first backward. Call forward again instead of using retain_graph"
        )

    def _check_owned(self, scratch: dict[str, torch.Tensor]) -> None:
        for name, (t, version) in self.owned.items():
            if version_of(t) != version and name not in scratch:
                raise RuntimeError(
                    f"{name} of {self.name} was changed in place between forward and backward, and the layer has to "
                    "run again: call backward before optimizer.step()"
                )

    def _replaced(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the first run that are others by now (``torch.func.functional_call``)."""
        now = owned_by(self.function)
        return {name: t for name, (t, _) in self.owned.items() if now.get(name) is not t}

    def _fixed(self, scratch: dict[str, torch.Tensor]) -> set[int]:
        return {storage_key(t) for t in (*owned_by(self.function).values(), *scratch.values())}

    def _scratch(self) -> dict[str, torch.Tensor]:
        """Copies of the buffers that a run changes: they take the second change, which eager mode does not make."""
        if not isinstance(self.function, torch.nn.Module):
            return {}
        current = dict(self.function.named_buffers())
        return {name: t.clone() for name, t in (statistics_of(self.function, current) | self.buffers).items()}

    def _remember(self, x: Any) -> None:
        kinds = dict.fromkeys(["cpu", *(t.device.type for t in tensor_leaves(x))])
        self.autocasts = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self.autocast_cache = torch.is_autocast_cache_enabled()
        self.owned = {name: (t, version_of(t)) for name, t in owned_by(self.function).items()}
        self.attributes = Attributes(self.function)

    @contextmanager
    def _modes(self, x: Any) -> Iterator[None]:
        """Grad mode, autocast and generators as in the first run; the outer stream of random numbers goes on.

        Raises ``RuntimeError`` if the run draws random numbers and nobody knows where the first one began.
        """
        unknown = self.saved_by_autograd and self.preserve_rng_state
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, enabled, dtype in self.autocasts:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self.autocast_cache)
                )
            outer = {source: random_state(source) for source in self.generators}
            if unknown:
                outer = generator_states(self.function, x)
            for source, state in self.generators.items():
                set_random_state(source, state)
            drawn = False
            try:
                yield
            finally:
                for source, state in outer.items():
                    drawn = drawn or not torch.equal(state, random_state(source))
                    set_random_state(source, state)
            if unknown and drawn:
                raise RuntimeError(self._gone())


def _unpack(packed: Slot | Fixed) -> torch.Tensor:
    return packed.read() if isinstance(packed, Fixed) else packed.take()


def _lost(_: None) -> torch.Tensor:
    raise RuntimeError("the graph of a second run has no backward")
