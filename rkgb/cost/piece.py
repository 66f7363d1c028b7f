"""A piece of a model that runs alone: how gradients reach its backward, and the memory that this takes.

In a whole step autograd is the only owner of the gradients between two operations. ``Tap`` and ``Feed`` keep it so for
a piece that runs alone: ``Feed``, behind the piece, makes the gradients of its results inside the backward; ``Tap``,
before it, collects the gradients of its inputs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.graph import get_gradient_edge

from rkgb.cost.memory import measure_phases, storage_bytes
from rkgb.device import kind_of
from rkgb.trees import replaced, tensors_of

Layouts = tuple[tuple[int, ...] | None, ...]
"""The strides of some gradients; None: contiguous."""

Gradients = tuple[torch.Tensor | None, ...]
"""Gradients in the order of the inputs that they are of; None where there is none."""


class Piece(Protocol):
    """A piece of a model that can run alone, forward and backward: a node of a graph, or a stage of a chain.

    ``device``: where it runs. ``layouts``: the strides of its incoming gradients, one for each of ``ends``; None if all
    are contiguous.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def layouts(self) -> Layouts | None: ...

    def forward(self, collect: Callable[[Gradients], None] = ...) -> list[torch.Tensor]:
        """The results of one run, with history. ``collect`` gets the gradients of the inputs from the backward."""

    def ends(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results that get gradients."""

    def drop_gradients(self) -> None:
        """Remove the ``.grad`` of parameters that an earlier backward made."""


class Tap(torch.autograd.Function):
    """Identity of its tensors. Its backward calls ``collect`` with their gradients and ends there. The results lie in
    the tensors' memory and are no views, which could not be read after a write within ``no_grad``.

    ``anchor``: a scalar that requires grad, so that autograd records the function whatever the tensors are.
    """

    @staticmethod
    def forward(ctx: Any, collect: Callable[[Any], None], anchor: torch.Tensor, *xs: torch.Tensor) -> Any:
        ctx.collect = collect
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in xs)  # ``view_as`` would change the strides of dimensions of size 1

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.collect(grads)
        return (None,) * (len(grads) + 2)


def tapped(x: Any, anchor: torch.Tensor, collect: Callable[[Any], None]) -> Any:
    """``x`` with the results of a ``Tap`` in the place of its tensors that require grad, and no history elsewhere."""
    taps = iter(Tap.apply(collect, anchor, *(t for t in tensors_of(x) if t.requires_grad)))
    return replaced(x, lambda t: next(taps) if t.requires_grad else t.detach())


def held_on(run: Callable[[Any], Any], x: Any) -> tuple[bool, bool]:
    """Whether ``run`` goes on holding the memory of its input ``x``, and that of its results, when they are let go: as
    attributes of modules, or of the ``ctx`` of a function of the graph that it records.
    """
    uses: Callable[[int], int] = torch._C._storage_Use_Count
    given = {(storage := t.untyped_storage())._cdata: storage for t in tensors_of(x)}
    before = [*map(uses, given)]
    results = tensors_of(run(tapped(x, torch.zeros((), requires_grad=True), ignore)))
    graph = [t.grad_fn for t in results]
    made = {(storage := t.untyped_storage())._cdata: storage for t in results}
    alone = torch.empty(1).untyped_storage()
    del results
    found = [*map(uses, given)] != before, any(uses(key) > uses(alone._cdata) for key in made if key not in given)
    del graph
    return found


class Feed(torch.autograd.Function):
    """A scalar whose backward makes one gradient for each of the tensors ``ys``, and gives all of them to ``note``."""

    @staticmethod
    def forward(
        ctx: Any, note: Callable[[Any], None], layouts: Layouts | None, together: bool, *ys: torch.Tensor
    ) -> torch.Tensor:
        strides = (None,) * len(ys) if layouts is None else layouts
        ctx.note, ctx.like = note, [(y.shape, x, y.dtype, y.device) for y, x in zip(ys, strides, strict=True)]
        ctx.together = together
        return torch.empty((), device=ys[0].device)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        grads = tuple(gradients_together(ctx.like) if ctx.together else (gradient(*form) for form in ctx.like))
        ctx.note(grads)
        return (None, None, None, *grads)


def feed(
    note: Callable[[Any], None], piece: Piece, results: list[torch.Tensor], *, together: bool = False
) -> torch.Tensor:
    """A scalar whose ``backward()`` runs the backward of ``piece``, which gave ``results``.

    ``note`` gets the incoming gradients when they are made. ``together``: make them as views of one memory.
    """
    end: torch.Tensor = Feed.apply(note, piece.layouts, together, *piece.ends(results))
    return end


def gradients_together(
    forms: Sequence[tuple[torch.Size, tuple[int, ...] | None, torch.dtype, torch.device]],
) -> list[torch.Tensor]:
    """Gradients of one dtype that are views of one memory, as ``cat`` makes them for the tensors that it reads."""
    like = [gradient(shape, stride, dtype, torch.device("meta")) for shape, stride, dtype, _ in forms]
    counts = [t.untyped_storage().nbytes() // t.element_size() for t in like]
    starts = itertools.accumulate(counts, initial=0)
    memory = torch.ones(sum(counts), dtype=like[0].dtype, device=forms[0][3])
    return [memory.as_strided(t.shape, t.stride(), start) for t, start in zip(like, starts, strict=False)]


def gradient(
    shape: torch.Size, stride: tuple[int, ...] | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A gradient of ones with the strides given; None: contiguous."""
    if stride is None:
        return torch.ones(shape, dtype=dtype, device=device)
    dense = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    if 0 not in stride:
        return dense.fill_(1)
    return torch.ones(dense.untyped_storage().nbytes() // dtype.itemsize, dtype=dtype, device=device).as_strided(
        shape, stride
    )


def gradients(piece: Piece, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """New gradients of ones for the ``ends`` of ``results``, with the strides ``layouts`` of the piece."""
    ends = piece.ends(results)
    layouts = piece.layouts or (None,) * len(ends)
    return [gradient(t.shape, x, t.dtype, t.device) for t, x in zip(ends, layouts, strict=True)]


def randomized(gradient: torch.Tensor) -> torch.Tensor:
    """``gradient``, filled with random numbers: on a GPU, matrix products of ones take less power, and so less time."""
    if gradient.dtype.itemsize > 1:
        count = gradient.untyped_storage().nbytes() // gradient.element_size()
        gradient.as_strided((count,), (1,), 0).normal_(0, 0.1)
    return gradient


def edges(ends: Sequence[torch.Tensor]) -> list[Any]:
    """Where a backward of ``ends`` begins, for ``run_backward``: it needs them no more, as in a step."""
    return [get_gradient_edge(t) for t in ends]


def run_backward(ends: Sequence[Any], grads: Sequence[torch.Tensor]) -> None:
    """``torch.autograd.backward``, without its check of shapes, which imports torch's symbolic shapes at first use."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(tuple(ends), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


def ignore(_: Any) -> None:
    """Takes gradients that nobody needs."""


@dataclass(frozen=True, slots=True)
class BackwardMemory:
    """Memory of one forward and its backward, in bytes.

    ``forward_peak``: the most that the forward adds to the level at its start. ``incoming``: the gradients of the
    results. ``peak``: the most that the backward adds to the level at its start, ``incoming`` included. ``inputs``: the
    gradients of the inputs that require grad, which are still there. ``times``: nanoseconds of the forward and the
    backward, in this one run, whose memory was watched.
    """

    forward_peak: int
    incoming: int
    peak: int
    inputs: tuple[torch.Tensor | None, ...]
    times: tuple[int, int]


def backward_memory(
    piece: Piece, hold: Callable[[Any], None] = ignore, held: tuple[int, ...] = (), *, together: bool = False
) -> BackwardMemory:
    """Measure the backward of ``piece``, which has at least one of ``ends``.

    ``hold`` gets the incoming gradients and may hold them until the backward ends. ``held``: positions of the results
    that are held meanwhile; autograd releases all else that it saved as the backward goes on. ``together``: make the
    incoming gradients as views of one memory.
    """
    collected: list[Gradients] = []
    results: list[torch.Tensor] = []
    sizes: list[int] = []
    marks: list[Any] = []
    kind = kind_of(piece.device)

    def mark() -> None:
        marks.append(kind.mark(piece.device))

    def note(grads: tuple[torch.Tensor, ...]) -> None:
        sizes.extend(storage_bytes(g) for g in grads)
        hold(grads)

    def forward(_: None) -> list[torch.Tensor]:
        mark()
        made = piece.forward(collected.append)
        mark()
        return made

    def prepare(made: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        results.extend(made[k] for k in held)
        end = feed(note, piece, made, together=together)
        return end, torch.ones_like(end)  # here: a gradient that only ``Feed`` needs is not part of the peak

    def backward(made: tuple[torch.Tensor, torch.Tensor]) -> None:
        mark()
        run_backward(made[:1], made[1:])
        mark()

    piece.drop_gradients()  # here, as the profiler warns of a block that is older than its session and released in it
    _, ((forward_peak, _), _, (peak, _)) = measure_phases([forward, prepare, backward], piece.device)
    times = kind.between(marks[0], marks[1]), kind.between(marks[2], marks[3])
    return BackwardMemory(forward_peak, sum(sizes), peak, collected[0] if collected else (), times)
