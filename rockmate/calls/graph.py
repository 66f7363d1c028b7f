"""One graph that TorchDynamo captured: what tells its calls apart, and what they start from."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import fx

from rkgb.sample import Call
from rkgb.storages import has_memory, storage_key
from rkgb.trace.meta import without_data
from rkgb.trees import tensors_in
from rockmate.calls.captured import Captured, captured_sources, without_wrappers
from rockmate.calls.families import Shown
from rockmate.calls.front import Front
from rockmate.calls.keys import call_key
from rockmate.calls.numbers import NUMBER, split
from rockmate.calls.runnable import Runnable
from rockmate.calls.structure import is_quick, writes
from rockmate.calls.surroundings import undisturbed
from rockmate.pieces.program import Choices, Pieces, with_compiled_pieces


class CapturedGraph:
    """``program``, which is a module with the model's parameters when its first call has come (``ready``). ``tensors``:
    the program without computations with numbers. ``pieces``: those that are compiled.
    """

    module: Captured

    def __init__(self, program: fx.GraphModule, front: Front) -> None:
        self.program, self.front, self.terms = program, front, front.terms
        self.split = split(program)
        self.tensors = self.split.program if self.split else program
        self.pieces: Pieces | None = None
        self.ready = False
        self.now = threading.local()  # the arguments of the call that this thread is in

    def make_ready(self, inputs: Sequence[Any]) -> None:
        """The program is a module, with pieces if it is to be compiled."""
        without_wrappers(self.tensors)
        if self.terms.options.compile:
            start = time.perf_counter()
            with undisturbed():
                choices = Choices(self.terms.options)
                self.pieces = with_compiled_pieces(self.tensors, inputs, self.front.pieces, choices)
            self.front.inside.compiled = time.perf_counter() - start
            self.tensors = self.pieces.program
        sources = captured_sources(self.program)
        if self.split:
            sources = [*(sources[k] for k in self.split.kept), *(f"{NUMBER}{k}" for k in range(len(self.split.uses)))]
        self.module = Captured(self.tensors, inputs, sources)
        self.ready = True

    @contextmanager
    def in_call(self, inputs: Sequence[Any]) -> Iterator[None]:
        """This thread is in a call with these ``inputs`` of the program of tensors."""
        self.now.inputs = inputs
        try:
            yield
        finally:
            self.now.inputs = None

    def module_ready(self) -> AbstractContextManager[None]:
        """Parameters and buffers are those of the call that this thread is in."""
        return self.module.holding(self.now.inputs)

    def shown(self) -> Shown:
        """What of the call that this thread is in shows without data."""
        inputs = self.now.inputs
        return Shown(self.module, without_data(inputs), device_of(inputs), quick=self.is_quick)

    def shown_as(self, before: Shown) -> Shown | None:
        """The same of a call of another capture, as a call of this one; None if its inputs do not follow from those."""
        known = dict(zip(before.module.sources, before.inputs or (), strict=False))
        inputs = self.program.graph.find_nodes(op="placeholder")
        given: list[Any] = [known.get(source) for source in captured_sources(self.program)]
        examples = [node.meta.get("example_value") for node in inputs]
        sizes: dict[Any, int] = {}  # by their expressions
        for t, like in zip(given, examples, strict=True):
            if isinstance(t, torch.Tensor) and isinstance(like, torch.Tensor):
                shapes: Iterator[tuple[Any, int]] = zip(like.shape, t.shape, strict=False)
                sizes |= {n.node.expr: m for n, m in shapes if isinstance(n, torch.SymInt)}
        for k, like in enumerate(examples):
            if given[k] is None and isinstance(like, torch.SymInt):
                given[k] = sizes.get(like.node.expr)
        if any(t is None for t in given):
            return None
        found = self.split.inputs(given)[0] if self.split else given
        return Shown(self.module, found, before.device, quick=before.quick)

    def sources(self, runnable: Runnable, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The tensors that the program starts from, for a call with ``inputs``; nothing is looked up in modules."""
        return self.module.values_of(runnable.program.s.d.sources, inputs, self.now.inputs)

    def kind(self, call: Call) -> tuple[Hashable, frozenset[str]]:
        """(key, parameters without gradient that need one): see ``call_key``."""
        key = id(self), call_key(call.leaves, None), self._shared(), self.terms.made
        inputs = self.now.inputs
        return key, frozenset([name for name, k in self.module.trained if inputs[k].grad is None])

    def _shared(self) -> tuple[int, ...]:
        """Which inputs share memory, where the program may write into some: others may then not be read later."""
        if not self.may_write:
            return ()
        first: dict[int, int] = {}
        tensors = (t for t in self.now.inputs if isinstance(t, torch.Tensor) and has_memory(t))
        return tuple(first.setdefault(storage_key(t), k) for k, t in enumerate(tensors))

    @cached_property
    def may_write(self) -> bool:
        """Whether the program may change what it is given in place."""
        return any(map(writes, self.tensors.graph.nodes))

    @cached_property
    def gives_gradients(self) -> bool:
        """Whether a backward can come to what the program returns."""
        returned = tensors_in([n.meta.get("example_value") for n in self.program.graph.output_node().all_input_nodes])
        return any(t.requires_grad for t in returned)

    @cached_property
    def is_quick(self) -> bool:
        return is_quick(self.program)

    def traced_on(self, call: Call) -> Call:
        """What is traced in the place of ``call``: inputs are leaves, so that a write in place fails, and does not make
        the trace their history.
        """
        return call.with_tensors(lambda t: t if t.is_leaf else t.detach().requires_grad_(t.requires_grad))


def device_of(arguments: Sequence[Any]) -> torch.device:
    """Where a call with these arguments runs."""
    return next(a.device for a in arguments if isinstance(a, torch.Tensor))
