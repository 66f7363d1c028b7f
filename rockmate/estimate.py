"""``estimate``: what a step takes at sizes that are never run, from steps' operations measured at small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkgb.errors import GraphError
from rkgb.sample import Sample
from rockmate.budget import parse_budget, show_at_least, show_bytes
from rockmate.calls.attachment import Attachment
from rockmate.errors import BudgetError, CannotBeCalledError, InputError
from rockmate.fitted import FEWEST, FittedStep, Point, point_of
from rockmate.follow.known import Known
from rockmate.growing import Growing, checked_dims, checked_sizes
from rockmate.memory import rest_of
from rockmate.planning.checks import checked_call
from rockmate.planning.options import PlanOptions, options_of
from rockmate.progress import Progress, Report
from rockmate.signed import called_right
from solvers import Schedule, walk
from solvers.interrupts import Heeded
from solvers.tables import text_table

MEASURED = 4
"""Sizes that are measured: as many as say whether a figure follows a parabola."""

SOLVES = 4
"""Times that a solver is asked for a plan of the size after the largest that fits so far."""

MOST = 2**30
"""Times the sample's size; nobody asks whether more would fit."""


@dataclass(frozen=True, slots=True)
class SizeEstimate:
    """One size; memory in bytes.

    ``peak``: what a step takes without recomputation. Eager mode may take a little more, where variables of forward
    name what is not needed any more. ``max_budget``: the budget from which nothing is recomputed; it has room for the
    loss. ``min_budget``: the smallest budget of a plan. ``fits``: "yes", "recomputing" or "no" for the budget that was
    given, "" if none was.
    """

    size: int
    peak: int
    min_budget: int
    max_budget: int
    fits: str = ""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What steps of several sizes take; prints as a table.

    ``sizes``: one entry for each size that was asked for. ``budget``: bytes, None if none was given. ``largest``: the
    largest size that fits it under a plan, ``largest_plain`` without recomputation, be it below the sample's; 0 if
    none fits, None if there is no budget, or no end. ``measured``: the sizes that figures are fitted to. ``rough``:
    names of operations whose memory follows no line or parabola in the size, so that their figures are guesses.
    """

    sizes: tuple[SizeEstimate, ...]
    budget: int | None
    largest: int | None
    largest_plain: int | None
    measured: tuple[int, ...]
    rough: tuple[str, ...]
    kernels_from: int = 0

    def __str__(self) -> str:
        rows = [["size", "peak", "smallest budget", "fits"]]
        rows += [[str(s.size), show_bytes(s.peak), show_at_least(s.min_budget), s.fits] for s in self.sizes]
        rows = rows if self.budget is not None else [row[:-1] for row in rows]
        lines = [text_table(rows)]
        if self.budget is not None:
            ends = ["any size" if n is None else str(n or "none") for n in (self.largest, self.largest_plain)]
            lines.append(f"largest that fits {show_bytes(self.budget)}: {ends[0]}; without recomputation {ends[1]}")
        if self.rough:
            few = ", ".join(self.rough[:3]) + (", …" if len(self.rough) > 3 else "")
            lines.append(f"rough, since memory follows no function of the size: {few}")
        if self.kernels_from:
            lines.append(
                f"PyTorch takes other kernels for convolutions from size {self.kernels_from} on, which did not run: "
                "give a sample of that size"
            )
        return "\n".join(lines)


@called_right
def estimate(
    model: torch.nn.Module,
    sample: Sample,
    sizes: int | Iterable[int],
    budget: int | float | str | None = None,
    *,
    dim: int | tuple[int, ...] = 0,
    sample_kwargs: dict[str, Any] | None = None,
    loss_memory: int | str | None = None,
    progress: bool | None = None,
) -> Estimate:
    """What a training step of ``model`` takes at ``sizes`` larger than the ``sample``'s, none of which is run.

    The model is planned and measured on its device, as by ``attach``, at four sizes, the sample's to four times that,
    or less where the model takes no larger ones; rows of the sample are repeated for it. The memory of each operation
    is fitted as a function of the size. Where the fit is right, the prediction is that of the large size, byte for
    byte. It is not where a library takes another kernel beyond the sizes that were measured, where the model rounds
    sizes, and where times decide among plans. Limits of the model, such as the number of its positions, show only where
    it runs.

    Args:
        model: Any module whose tensors lie on one device.
        sample: A small call: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        sizes: Of dimension ``dim``. All tensors grow whose dimension has the size that the first tensor's has.
        budget: Bytes, or text as for ``Rockmate``, but no share.
        dim: 0 for batches, 1 for lengths of (batch, length, …). Several, such as ``(2, 3)`` for images, grow together.
        sample_kwargs: Keyword arguments beside a tuple.
        loss_memory: Bytes that the loss allocates, as for ``Rockmate``.
        progress: Whether to show how far it is.

    Raises:
        InputError: Sizes below the sample's, a sample that cannot grow, or a graph that changes with the size.
        GraphError: The model cannot be traced.
    """
    given, options = checked_call(model, sample, sample_kwargs), options_of("flops", loss_memory, cache=None)
    limit = None if budget is None else parse_budget(budget)
    if limit is not None and limit.share is not None:
        raise BudgetError(f"the budget {budget!r} is a share of each size's own peak: give bytes, such as '8 GiB'")
    call = Growing(given, checked_dims(dim))
    wanted = checked_sizes(sizes, call)
    with Heeded(), Progress(progress) as report:
        known = _Sizes(_measured(model, call, options, report), report)
        small = _Small(known, lambda size: FittedStep(size, [*_points(model, call, [size], options, report)], report))
        available = plain = largest = None
        if limit is not None:
            room = limit.bytes(known.at(known.measured[0]), lambda device: rest_of([model], device).room(device))
            plain = _largest_plain(known, call.size, wanted[-1], room)
            available, largest = room, _largest_planned(known, call.size, wanted[-1], room)
            if plain == 0:
                guess = _largest_plain(known, 1, call.size, room)
                plain = _largest_below(call.size, guess, lambda n: small.at(n).eager_peak <= room)
            if largest == 0:
                guess = _largest_planned(known, 1, call.size, room)
                largest = _largest_below(call.size, guess, lambda n: small.at(n).least[0] <= room)
        found = tuple(_of_size(known, size, available) for size in wanted)
        return Estimate(found, available, largest, plain, known.measured, *known.rough(wanted[-1]))


def _points(
    model: torch.nn.Module, call: Growing, sizes: Sequence[int], options: PlanOptions, report: Report
) -> Iterator[Point]:
    """These sizes, measured. Raises ``CannotBeCalledError`` where the model does not take the next one."""
    probe = Attachment.probe(model, options, progress=False)
    for k, size in enumerate(sizes):
        report(f"measure, size {size}", k / len(sizes))
        probe.families.clear()  # so that no size stands for another one
        probe.plan_for(call.at(size))
        yield point_of(size, probe.planned)
        if isinstance(probe.planned, Known):  # a call that is followed is planned once
            probe = Attachment.probe(model, options, progress=False)


def _measured(model: torch.nn.Module, call: Growing, options: PlanOptions, report: Report) -> list[Point]:
    """The sizes that are run, rising: they do not depend on what is asked, so that a size has one answer. The sample
    may be too small to be like the others, and is left out then.
    """
    step = call.size  # multiples, since sizes that are halved in the model stay whole
    points: list[Point] = []
    while len(points) < MEASURED:
        points.clear()
        tried = range(call.size, call.size + MEASURED * step, step)
        try:
            for point in _points(model, call, tried, options, report):
                points.append(point)
        except CannotBeCalledError as error:
            if not points:
                raise
            if step == 1:
                raise InputError(
                    f"the model takes the sample, but not one of size {call.size + len(points)}: {error.__cause__}. "
                    f"{call.said()}. Say with dim= what grows, or give a smaller sample: it is made larger until a fit "
                    "is possible"
                ) from error
            step //= 2
    alike = [point for point in points if point.form == points[-1].form]
    if len(alike) < FEWEST:
        sizes = ", ".join(str(point.size) for point in points)
        raise InputError(
            f"what the model computes changes with the size: its graphs at the sizes {sizes} are not the same "
            f"operations. {call.said()}. Give a larger sample, from whose size on the operations stay the same; if "
            "they never do (a loop over the length), plan the large one with rockmate.frontier"
        )
    return alike


class _Sizes:
    """Steps of any size, fitted to the ``points`` that were measured, and the schedules that were found for some."""

    def __init__(self, points: list[Point], report: Report) -> None:
        self.points, self.report = points, report
        self._steps: dict[int, FittedStep] = {}
        self._schedules: dict[int, Schedule] = {}  # of the smallest budgets

    @property
    def measured(self) -> tuple[int, ...]:
        """The sizes of these points."""
        return tuple(point.size for point in self.points)

    def rough(self, size: int) -> tuple[tuple[str, ...], int]:
        """Names of what has no function, in the order of the graph, and then of convolutions whose kernel did not run;
        the size from which on these take the kernels that they have at ``size``.
        """
        wanted, others = self.at(size).kernels, dict[str, int]()  # the last measured size with another kernel
        for seen in self.measured[-FEWEST:] if size > self.measured[-1] else ():
            there = self.at(seen).kernels
            others.update((name, seen) for name in wanted if there[name] != wanted[name])
        names = tuple(dict.fromkeys((*self.at(size).rough, *others)))
        if not others:
            return names, 0
        return names, 1 + (_largest(max(others.values()), size, lambda n: self.at(n).kernels != wanted) or 0)

    def at(self, size: int) -> FittedStep:
        """A step of ``size``, whose figures are fitted."""
        if size not in self._steps:
            self.report(f"size {size}, fit", 0.0)
            self._steps[size] = FittedStep(size, self.points, self.report)
        return self._steps[size]

    def least(self, size: int) -> int:
        """The smallest budget of the plans for ``size``."""
        if size not in self._schedules:
            self.report(f"size {size}, solve", 0.0)
        least, self._schedules[size] = self.at(size).least
        return least

    def fits(self, size: int, available: int) -> bool:
        """Whether a plan that was found for some size is one for ``size``, too."""
        step = self.at(size)
        return any(walk(step.problem, s).peak + step.reserved <= available for s in self._schedules.values())


class _Small:
    """Steps of sizes below the sample's, at which a model may compute something else: each one that is asked for is
    ``run``, or is one of ``known`` where the model does not take it.
    """

    def __init__(self, known: _Sizes, run: Callable[[int], FittedStep]) -> None:
        self.known, self.run = known, run
        self._steps: dict[int, FittedStep] = {}

    def at(self, size: int) -> FittedStep:
        if size not in self._steps:
            try:
                self._steps[size] = self.run(size)
            except (CannotBeCalledError, GraphError):
                self._steps[size] = self.known.at(size)
        return self._steps[size]


def _of_size(known: _Sizes, size: int, available: int | None) -> SizeEstimate:
    step, least = known.at(size), known.least(size)
    most, fits = step.eager_peak, ""
    if available is not None:
        fits = "yes" if most <= available else "recomputing" if least <= available else "no"
    return SizeEstimate(size, step.peak, least, most, fits)


def _largest(smallest: int, start: int, fits: Callable[[int], bool]) -> int | None:
    """The largest size for which ``fits``, which holds up to some size; 0 if not for the smallest, None if for all."""
    if not fits(smallest):
        return 0
    low, high = smallest, max(start, smallest + 1)
    while fits(high):
        low, high = high, 2 * high
        if high > MOST * smallest:
            return None
    return _between(low, high, fits)


def _between(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest size for which ``fits``, as it does for ``low``, and does not for ``high``."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _largest_below(size: int, guess: int | None, fits: Callable[[int], bool]) -> int:
    """As ``_largest``, of those below ``size``; they are tried from ``guess`` on."""
    low, high = 0, size
    for n in (guess or 0, 1 + (guess or 0)):
        if low < n < high:
            low, high = (n, high) if fits(n) else (low, n)
    return _between(low, high, fits)


def _largest_plain(known: _Sizes, smallest: int, start: int, available: int) -> int | None:
    return _largest(smallest, start, lambda n: known.at(n).eager_peak <= available)


def _largest_planned(known: _Sizes, smallest: int, start: int, available: int) -> int | None:
    """Plans that were found for some sizes say how far these go; the solver is asked for the size after it. Its plan
    for the size that is returned is within the budget.
    """
    known.least(smallest)
    found = _largest(smallest, start, lambda n: known.fits(n, available))
    for _ in range(SOLVES):
        if found is None or known.least(max(smallest, found + 1)) > available:
            break
        found = _largest(max(smallest, found + 1), start, lambda n: known.fits(n, available))
    if found and known.least(found) > available:
        found = _largest(smallest, found, lambda n: known.least(n) <= available)
    return found
