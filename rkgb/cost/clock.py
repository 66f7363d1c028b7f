"""How long a piece of a model takes: medians of timed runs on its device, or by counted operations and bytes."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from rkgb.cost.costs import Times
from rkgb.cost.piece import Piece, edges, gradients, randomized, run_backward
from rkgb.device import kind_of
from rkgb.trace.preserved import each_saved

Mark = Callable[[], Any]
"""Marks this moment of a device."""

TimedRun = Callable[[Mark], Sequence[tuple[Any, Any]]]
"""Runs a piece once, and returns pairs of marks: begin and end of each part that is timed."""

_LINE = 8  # numbers of 8 bytes that a line of a processor's caches holds: to read one brings all of them
_COLD = 1.25, 300_000  # times one from the caches, and ns more: a forward from memory that takes longer is timed again
_ENOUGH = 25_000_000  # ns of timed runs of each part after which no more are made


def read(tensors: Iterable[torch.Tensor]) -> None:
    """Read ``tensors``, so that the processor's cache holds what of them it can."""
    for t in tensors:
        t.sum()


def _beside_the_allocator(count: int) -> torch.Tensor:
    """``count`` numbers in memory of the host's that torch's allocator knows nothing of: what is planned within a
    budget must not take more of its memory. They are written, since pages that never were are one page.
    """
    return torch.frombuffer(mmap.mmap(-1, 8 * count), dtype=torch.float64).fill_(1)


@dataclass(frozen=True, slots=True)
class Clock:
    """Times what runs on a device, in nanoseconds.

    ``read``: tensors that are read before each timed run, to empty the caches. On CPUs nothing is read: in a step a
    piece finds in the caches most of what it reads, since that was just made. With emptied caches the forwards of six
    models (benchmarks/peers_run/models.py) added up to 0.97 to 1.50 of the step's own, without to 0.95 to 1.09.
    ``again``: tensors that are read before a forward is timed as one that runs again, in the backward: what it reads
    has left the caches by then.
    ``repeat``: how many runs a median is of; fewer if together they take more than 25 ms for each part.
    """

    read: tuple[torch.Tensor, ...] = ()
    repeat: int = 5
    again: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, model: torch.nn.Module, touched: int = 0) -> Clock:
        """A clock for the device of the parameters of ``model``, between whose runs ``touched`` bytes are used."""
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        kind = kind_of(device)
        used = min(touched, kind.caches) // 8
        return cls(tuple(kind.to_read(device)), again=(_beside_the_allocator(used)[::_LINE],) if used else ())

    def medians(self, run: TimedRun, device: torch.device) -> tuple[int, ...]:
        runs: list[list[int]] = []
        launched = spent = 0
        while len(runs) < self.repeat and spent < _ENOUGH:
            times, launched = self._once(run, device, launched)
            runs.append(times)
            spent += sum(times) // max(1, len(times))
        return tuple(int(median(part)) for part in zip(*runs, strict=True))

    def times(self, piece: Piece) -> Times:
        """The median time of a forward that runs again, the time of all else that a step needs of the piece, and the
        median time of a forward that finds in the caches what it reads.

        The second is the backward's, and that of the first forward where it takes longer or shorter than one that runs
        again; it is 0 where no result gets a gradient.
        """
        grads = [randomized(g) for g in gradients(piece, piece.forward())]

        def run(mark: Mark) -> Sequence[tuple[Any, Any]]:
            start = mark()
            results = piece.forward()
            middle = mark()
            if grads:
                ends = edges(piece.ends(results))
                del results
                run_backward(ends, grads)
            return (start, middle), (middle, mark())

        forward, backward = self.medians(run, piece.device)
        launches = self._launches(run, piece.device)
        if not grads:
            return Times(forward, 0, launches=launches)
        again = max(forward, self._again(piece, forward)) if self.again else forward
        return Times(again, max(1, forward + backward - again), forward, launches)

    @staticmethod
    def _launches(run: TimedRun, device: torch.device) -> tuple[int, int]:
        """What the host takes for the two parts of ``run`` while the device is held; 0 where it runs them itself."""
        kind = kind_of(device)
        if not kind.launches:
            return 0, 0
        kind.hold(device)
        (a, b), (c, d) = run(time.perf_counter_ns)
        return b - a, d - c

    def _again(self, piece: Piece, warm: int) -> int:
        """The time of a forward from memory, where one from the caches takes ``warm``: of two the shorter, if the first
        takes much longer, since it may have been disturbed.
        """

        def run(mark: Mark) -> Sequence[tuple[Any, Any]]:
            read(self.again)
            start = mark()
            results = piece.forward()
            end = mark()
            del results
            return ((start, end),)

        (first,), _ = self._once(run, piece.device, 0)
        times, more = _COLD
        if first <= times * warm + more:
            return first
        (second,), _ = self._once(run, piece.device, 0)
        return min(first, second)

    def _once(self, run: TimedRun, device: torch.device, launched: int) -> tuple[list[int], int]:
        """The times of the parts, and how long the host took for the run, which was ``launched`` ns the last time."""
        kind = kind_of(device)
        read(self.read)
        kind.hold(device, 2 * launched)
        began = time.perf_counter_ns()
        marks = run(lambda: kind.mark(device))
        launched = time.perf_counter_ns() - began
        return [kind.between(start, end) for start, end in marks], launched


Model = Callable[[int, int], int]
"""(operations, bytes touched) -> nanoseconds."""


def counted(function: Callable[[], Any]) -> tuple[Any, int]:
    """The result of ``function`` and the number of its operations."""
    with FlopCounterMode(display=False) as counter:
        result = function()
    return result, counter.get_total_flops()


def counted_tail(function: Callable[[], Any]) -> int:
    """The number of operations of ``function`` after autograd has saved the last tensor."""
    at_last = 0

    def note(_: torch.Tensor) -> None:
        nonlocal at_last
        at_last = counter.get_total_flops()

    with FlopCounterMode(display=False) as counter, each_saved(note):
        function()
    return int(counter.get_total_flops()) - at_last


def modelled_times(piece: Piece, touched: int, time: Model) -> tuple[int, int]:
    """Times of forward and backward by ``time``, the same on every run and on every machine of a kind; the latter is 0
    where no result gets a gradient. Counted are the operations that PyTorch's flop counter knows: matrix products,
    convolutions, attention.

    ``touched``: bytes that the forward reads and writes. The backward is taken to touch twice as many.
    """
    results, operations = counted(piece.forward)
    forward = time(operations, touched)
    grads, ends = gradients(piece, results), edges(piece.ends(results))
    del results
    if not ends:
        return forward, 0
    _, operations = counted(lambda: run_backward(ends, grads))
    return forward, time(operations, 2 * touched)
